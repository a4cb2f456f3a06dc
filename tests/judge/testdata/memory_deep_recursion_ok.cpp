#include <cstdio>
long f(long n) { return n == 0 ? 0 : 1 + f(n - 1); }
int main(int argc, char**) { std::printf("%ld\n", f(20000 * argc)); }
