char a[2147483647] = {1};
int main(void) { return a[0] - 1; }
