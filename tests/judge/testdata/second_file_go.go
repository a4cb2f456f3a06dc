package main

func main() { println2("two") }
