printf x
