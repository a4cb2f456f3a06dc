package main

import (
	"fmt"
	"sync"
)

func main() {
	var wg sync.WaitGroup
	c := make(chan int, 1000)
	for i := 0; i < 1000; i++ {
		wg.Add(1)
		go func(i int) { c <- i; wg.Done() }(i)
	}
	wg.Wait()
	close(c)
	sum := 0
	for x := range c {
		sum += x
	}
	fmt.Println(sum)
}
