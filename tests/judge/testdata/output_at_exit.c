#include <stdio.h>
#include <stdlib.h>
static void late(void) { puts("late"); }
int main(void) {
  atexit(late);
  puts("early");
  return 0;
}
