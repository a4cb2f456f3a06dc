yes flood &
sleep 60
