package main
func main() {
