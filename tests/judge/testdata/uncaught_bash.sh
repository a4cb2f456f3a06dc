set -e
false
echo not here
