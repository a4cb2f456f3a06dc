yes flood
