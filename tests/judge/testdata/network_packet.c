#include <sys/socket.h>
int main(void) { return socket(AF_PACKET, SOCK_RAW, 0) >= 0; }
