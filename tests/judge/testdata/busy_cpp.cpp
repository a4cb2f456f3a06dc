#include <atomic>
int main() {
  std::atomic<int> x{0};
  while (x >= 0) x = (x + 1) & 0xffff;
}
