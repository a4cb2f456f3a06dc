#include <atomic>
#include <iostream>
#include <thread>
#include <vector>
int main() {
  std::atomic<long> sum{0};
  std::vector<std::thread> all;
  for (int i = 0; i < 8; i++) all.emplace_back([&, i] { sum += i; });
  for (auto& t : all) t.join();
  std::cout << sum << std::endl;
}
