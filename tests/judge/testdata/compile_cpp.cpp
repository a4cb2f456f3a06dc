int main() { std::vector<int> v; }
