int f(volatile char* p) {
  volatile char a[1 << 16];
  a[0] = *p;
  return f(a) + a[1];
}
int main(void) {
  volatile char c = 1;
  return f(&c);
}
