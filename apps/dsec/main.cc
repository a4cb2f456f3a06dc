// SPDX-License-Identifier: Apache-2.0
#include "cli/cli.h"
#include "up/up.h"

int main(int argc, char** argv) {
  return dsec::cli::CliMain(
      argc, argv,
      {{"up", "Run the platform on this machine", dsec::up::UpMain},
       {"edge", "Run a node of a cluster", dsec::up::EdgeMain},
       {"apiserver", "Run the API of a cluster", dsec::up::ApiserverMain},
       {"cluster", "A cluster's CA, tokens and nodes", dsec::up::ClusterMain},
       {"purge", "Remove everything of this node from the host", dsec::up::PurgeMain}});
}
