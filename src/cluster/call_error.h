// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "dsec/v1/cluster.pb.h"

namespace dsec::cluster {

// An error of EdgeApi on its way between daemons: code, reason, field, errno and message arrive as
// they were; context frames join the message.
v1::CallError ToWire(const Error& error);
// Texts are cut to 4 KiB. A code that is none becomes kInternal. A reason of at most 96 of
// [a-z0-9_.] arrives as itself as long as this process has met at most 2,048 different ones (they
// are kept for ever, since an Error's reason has static storage, and the peer may be hostile); else
// it is "edge.remote_error", and stands before the message.
Error FromWire(const v1::CallError& error);

}  // namespace dsec::cluster
