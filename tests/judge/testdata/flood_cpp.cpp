#include <iostream>
int main() {
  for (;;) std::cout << "flood\n";
}
