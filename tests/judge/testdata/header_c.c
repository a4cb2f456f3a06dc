#include "value.h"
int main(void) { return VALUE - 5; }
