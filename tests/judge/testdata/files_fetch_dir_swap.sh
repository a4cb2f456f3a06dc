mkdir d
rmdir d
ln -s / d
