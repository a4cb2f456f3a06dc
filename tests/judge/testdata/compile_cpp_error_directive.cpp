#error "not today"
int main() {}
