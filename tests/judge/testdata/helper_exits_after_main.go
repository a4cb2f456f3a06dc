package main

import (
	"fmt"
	"os/exec"
)

func main() {
	exec.Command("sleep", "600").Start()
	fmt.Println("done")
}
