package main

import "fmt"

func main() {
	var n, x, sum int
	fmt.Scan(&n)
	for i := 0; i < n; i++ {
		fmt.Scan(&x)
		sum += x
	}
	fmt.Println(sum)
}
