(sleep 1; echo late; echo late > result) &
echo early > result
echo early
