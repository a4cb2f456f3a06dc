echo out
echo err >&2
