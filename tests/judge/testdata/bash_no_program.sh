no-such-program
