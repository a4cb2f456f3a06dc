package main

const a = 1 << 60000

func main() { println(a) }
