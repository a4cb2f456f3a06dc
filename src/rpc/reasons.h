// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace dsec::rpc {

// The reasons that an error may bring over the wire: those of aether and of what it is built from.
// A fixed table, because the reason of an Error has static storage and a peer may be hostile. A
// test finds each reason that those folders name and that is not here.
//
// The same text in static storage; empty when it is not in the table.
std::string_view KnownReason(std::string_view text);

}  // namespace dsec::rpc
