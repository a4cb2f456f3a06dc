// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::up {

// `dsec up`: apiserver and edge of one machine in one process, until SIGTERM or SIGINT. Sandboxes
// outlive it unless --stop-sandboxes. argv[0] is the name of the command. Returns the exit code;
// prints one line with the address on stdout when it is ready.
int UpMain(int argc, char** argv);

// `dsec edge`: the node agent of a cluster: all of `dsec up` but the HTTP API and IAM. Joins with a
// token at its first start; serves apiservers and watchers over TLS. Prints one line with its
// address when it is ready.
int EdgeMain(int argc, char** argv);

// `dsec apiserver`: HTTP API and IAM of a cluster, and the door by which nodes join it. Prints one
// line with both addresses when it is ready.
int ApiserverMain(int argc, char** argv);

// `dsec cluster`: CA, join tokens and nodes.
int ClusterMain(int argc, char** argv);

// `dsec purge`: ends and removes everything of this node from the host, whatever its records say.
// Refused while a daemon runs.
int PurgeMain(int argc, char** argv);

}  // namespace dsec::up
