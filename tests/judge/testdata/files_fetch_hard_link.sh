ln /etc/shadow secret || exit 0
