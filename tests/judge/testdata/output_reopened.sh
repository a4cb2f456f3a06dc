exec 1>&2
echo here
