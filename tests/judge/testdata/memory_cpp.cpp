#include <vector>
int main() {
  std::vector<std::vector<long>> v;
  for (;;) v.emplace_back(1 << 17, 1);
}
