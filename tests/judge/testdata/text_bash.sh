tr a-z A-Z | sort | uniq -c | sed "s/^ *//"
