constexpr long f(long n) {
  long x = 0;
  for (long i = 0; i < n; i++) x += i;
  return x;
}
constexpr long a = f(20000000), b = f(30000001), c = f(20000002), d = f(30000003);
int main() { return (a + b + c + d) & 1; }
