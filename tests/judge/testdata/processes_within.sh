for i in 1 2 3 4 5 6 7 8; do (exit 0) & done
wait
echo done
