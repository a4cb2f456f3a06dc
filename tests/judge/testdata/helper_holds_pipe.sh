sleep 600 &
echo done
