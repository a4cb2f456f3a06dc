// SPDX-License-Identifier: Apache-2.0
// The program of the interop test's container: exits with the status that it is given, or waits to be killed.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "wait") == 0) {
    for (;;) pause();
  }
  return argc > 1 ? atoi(argv[1]) : 0;
}
