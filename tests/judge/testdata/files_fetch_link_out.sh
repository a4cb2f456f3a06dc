ln -s /etc/shadow secret
ln /etc/passwd hard 2>/dev/null || true
