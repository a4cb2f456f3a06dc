read -r n
read -r -a words
sum=0
for ((i = 0; i < n; i++)); do ((sum += words[i])); done
echo "$sum"
