int main(int argc, char** argv) { volatile int z = argc - 1; return 1 / z; }
