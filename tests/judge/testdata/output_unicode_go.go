package main

import "fmt"

func main() { fmt.Println("ü中😀") }
