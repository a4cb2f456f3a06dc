int main(int argc, char** argv) { volatile int z = argc - 1; return (argc + 5) / z; }
