#include <bits/stdc++.h>
int main() {
  int n;
  std::cin >> n;
  std::vector<long> v(n);
  for (auto& x : v) std::cin >> x;
  std::cout << std::accumulate(v.begin(), v.end(), 0L) << std::endl;
}
