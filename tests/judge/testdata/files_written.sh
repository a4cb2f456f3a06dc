mkdir -p out/deep
printf one > out/a
printf two > out/deep/b
ln -s /etc/passwd out/link
