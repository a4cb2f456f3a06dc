#include <cstdio>
struct Late {
  ~Late() { std::puts("late"); }
} late;
int main() { std::puts("early"); }
