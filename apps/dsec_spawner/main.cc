// SPDX-License-Identifier: Apache-2.0
#include "spawn/stage/run.h"

int main(int, char** argv) { return dsec::spawn::stage::RunSpawner(argv); }
