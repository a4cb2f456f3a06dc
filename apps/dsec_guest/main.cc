// SPDX-License-Identifier: Apache-2.0
#include "guest/guest.h"

int main() { return dsec::guest::Main(); }
