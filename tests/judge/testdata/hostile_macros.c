#define A "0123456789012345678901234567890123456789"
#define B A A A A A A A A A A A A A A A A
#define C B B B B B B B B B B B B B B B B
#define D C C C C C C C C C C C C C C C C
#define E D D D D D D D D D D D D D D D D
#define F E E E E E E E E E E E E E E E E
const char* s = F F F F F F F F F F F F F F F F;
int main(void) { return 0; }
