package main

import (
	"bufio"
	"fmt"
	"os"
	"sort"
)

func main() {
	in := bufio.NewScanner(os.Stdin)
	var all []string
	for in.Scan() {
		all = append(all, in.Text())
	}
	sort.Strings(all)
	fmt.Println(all)
}
