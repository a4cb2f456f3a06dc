sleep 0.3
echo done
