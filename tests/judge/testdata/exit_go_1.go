package main

import (
	"os"
	"strconv"
)

func main() {
	code, _ := strconv.Atoi(os.Args[1])
	os.Exit(code)
}
