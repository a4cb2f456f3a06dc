package main

// #include "/dev/zero"
import "C"

func main() {}
