echo out > /dev/stdout
echo err > /dev/stderr
cat /dev/stdin
