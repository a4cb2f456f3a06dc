// SPDX-License-Identifier: Apache-2.0
// The least that the first process of a machine can do: switch it off.
#include <sys/reboot.h>

int main() { return reboot(RB_POWER_OFF); }
