template <int N> struct A { typedef typename A<N + 1>::T T; };
A<0>::T x;
int main() {}
