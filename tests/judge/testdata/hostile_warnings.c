#define W unsigned char x = 100000;
#define V { W } { W } { W } { W } { W } { W } { W } { W } { W } { W }
#define U V V V V V V V V V V
#define T U U U U U U U U U U
#define S T T T T T T T T T T
int main(void) { S S S S return 0; }
