package main

func main() {
	for i := 0; i < 8; i++ {
		go func() {
			for {
			}
		}()
	}
	select {}
}
