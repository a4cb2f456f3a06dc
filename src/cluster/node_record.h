// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "dsec/v1/cluster.pb.h"

namespace dsec::cluster {

// The record of a node in the store: v1::NodeRecord under node/<id>. An edge announces it, an
// apiserver writes it, and all read it, so what comes from either side is checked against the same
// rules.

inline constexpr uint32_t kNodeRecordVersion = 1;
inline constexpr size_t kMaxNodeRecordBytes = size_t{64} << 10;
inline constexpr std::string_view kNodePrefix = "node/";
// Epochs grow by one with each death or joining of a machine; no honest one comes near this.
inline constexpr uint64_t kMaxEpoch = uint64_t{1} << 48;

// "node/<id>".
std::string NodeKey(std::string_view node_id);

// kInvalidArgument "node.record" with the field: node_id is none; address is not HOST:PORT (IPv6 in
// brackets) or longer than 255; epoch 0 or over kMaxEpoch; state not one of v1::NodeState; boot_id
// over 64 characters of [0-9a-f-]; certificate_sha256, previous_certificate_sha256 or key_sha256
// neither empty nor 64 hex digits; over 256 capabilities or one whose texts have more than 64, 64
// and 1,024 bytes; over 64 labels or one that is not 1 to 63 of [A-Za-z0-9._/-] with a value of at
// most 255 bytes; pool over 63 of those characters; build over 128 bytes; over kMaxNodeRecordBytes
// in all.
Result<void> CheckNodeRecord(const v1::NodeRecord& record);

// For the store; sets the version. Errors of CheckNodeRecord.
Result<std::string> EncodeNodeRecord(v1::NodeRecord record);
// kInternal "node.record_damaged": no such message, another version, or what CheckNodeRecord
// refuses.
Result<v1::NodeRecord> ParseNodeRecord(std::string_view bytes);

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
};
// kInvalidArgument "node.address" with `field`.
Result<HostPort> ParseHostPort(std::string_view address, std::string_view field);

}  // namespace dsec::cluster
