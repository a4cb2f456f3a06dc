#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
int main(void) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(53)};
  a.sin_addr.s_addr = inet_addr("8.8.8.8");
  int fd = socket(AF_INET, SOCK_DGRAM, 0);
  return sendto(fd, "x", 1, 0, (struct sockaddr*)&a, sizeof a) > 0;
}
