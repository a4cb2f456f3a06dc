#include <netinet/in.h>
#include <sys/socket.h>
int main(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_ICMP) >= 0; }
