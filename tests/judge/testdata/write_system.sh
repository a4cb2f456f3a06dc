for f in /etc/passwd /usr/bin/python3 /proc/sysrq-trigger /proc/sys/kernel/core_pattern /sys/kernel/mm/ksm/run; do
  { echo x >> "$f"; } 2> /dev/null
done
python3 -c "print(1)"
