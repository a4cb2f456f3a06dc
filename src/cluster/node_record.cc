// SPDX-License-Identifier: Apache-2.0
#include "cluster/node_record.h"

#include <algorithm>
#include <charconv>

#include "base/id.h"
#include "base/utf8.h"

namespace dsec::cluster {
namespace {

constexpr size_t kMaxAddress = 255;
constexpr size_t kMaxCapabilities = 256;
constexpr size_t kMaxCapabilityWord = 64;
constexpr size_t kMaxCapabilityDetail = 1024;
constexpr size_t kMaxLabels = 64;
constexpr size_t kMaxLabelKey = 63;
constexpr size_t kMaxLabelValue = 255;
constexpr size_t kMaxBuild = 128;
constexpr size_t kMaxBootId = 64;
constexpr std::string_view kHex = "0123456789abcdef";
constexpr std::string_view kKeyCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-";

Error Bad(std::string_view field, std::string_view rule) {
  return Error(Code::kInvalidArgument, "node.record", fmt::format("{}: {}", field, rule))
      .WithField(std::string(field));
}

bool Within(std::string_view text, std::string_view characters, size_t most) {
  return text.size() <= most && text.find_first_not_of(characters) == std::string_view::npos;
}

Result<void> CheckCapabilities(const v1::NodeRecord& record) {
  if (static_cast<size_t>(record.capabilities_size()) > kMaxCapabilities) {
    return Bad("capabilities",
               fmt::format("{} are more than {}", record.capabilities_size(), kMaxCapabilities));
  }
  for (const v1::Capability& capability : record.capabilities()) {
    if (capability.name().size() > kMaxCapabilityWord ||
        capability.used().size() > kMaxCapabilityWord ||
        capability.detail().size() > kMaxCapabilityDetail || !IsUtf8(capability.name()) ||
        !IsUtf8(capability.used()) || !IsUtf8(capability.detail())) {
      return Bad("capabilities", "a row is too long or not UTF-8");
    }
  }
  return Ok();
}

Result<void> CheckLabels(const v1::NodeRecord& record) {
  if (record.labels().size() > kMaxLabels) {
    return Bad("labels", fmt::format("{} are more than {}", record.labels().size(), kMaxLabels));
  }
  for (const auto& [key, value] : record.labels()) {
    if (key.empty() || !Within(key, kKeyCharacters, kMaxLabelKey) ||
        value.size() > kMaxLabelValue || !IsUtf8(value)) {
      return Bad("labels", "a key is 1 to 63 of [A-Za-z0-9._/-], a value at most 255 of UTF-8");
    }
  }
  return Ok();
}

}  // namespace

std::string NodeKey(std::string_view node_id) {
  return std::string(kNodePrefix) + std::string(node_id);
}

Result<HostPort> ParseHostPort(std::string_view address, std::string_view field) {
  const auto bad = [&](std::string_view rule) {
    return Error(Code::kInvalidArgument, "node.address", fmt::format("{}: {}", field, rule))
        .WithField(std::string(field));
  };
  if (address.size() > kMaxAddress) return bad("longer than 255 bytes");
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos) return bad("must be HOST:PORT");
  HostPort out;
  const std::string_view port = address.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (port.empty() || error != std::errc() || end != port.data() + port.size()) {
    return bad("the port must be a number up to 65535");
  }
  std::string_view host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad("an IPv6 address stands in brackets");
  }
  if (host.empty() ||
      !std::all_of(host.begin(), host.end(), [](char c) { return c > ' ' && c < 127; })) {
    return bad("the host must be a name or an address");
  }
  out.host = std::string(host);
  return out;
}

Result<void> CheckNodeRecord(const v1::NodeRecord& record) {
  if (!ParseNodeId(record.node_id()).ok()) return Bad("node_id", "must be 1 to 32 of [a-z0-9]");
  if (auto address = ParseHostPort(record.address(), "address"); !address.ok()) {
    return Bad("address", address.error().message());
  }
  if (record.epoch() == 0) return Bad("epoch", "begins at 1");
  if (record.epoch() > kMaxEpoch) {
    return Bad("epoch", fmt::format("{} is more than {}", record.epoch(), kMaxEpoch));
  }
  if (!v1::NodeState_IsValid(record.state()) || record.state() == v1::NODE_STATE_UNSPECIFIED) {
    return Bad("state", fmt::format("{} is none", static_cast<int>(record.state())));
  }
  if (!Within(record.boot_id(), "0123456789abcdef-", kMaxBootId)) {
    return Bad("boot_id", "must be at most 64 of [0-9a-f-]");
  }
  for (const auto& [field, print] :
       {std::pair<std::string_view, std::string_view>{"certificate_sha256",
                                                      record.certificate_sha256()},
        {"previous_certificate_sha256", record.previous_certificate_sha256()},
        {"key_sha256", record.key_sha256()}}) {
    if (!print.empty() && (print.size() != 64 || !Within(print, kHex, 64))) {
      return Bad(field, "must be 64 hex digits");
    }
  }
  DSEC_TRY_VOID(CheckCapabilities(record));
  DSEC_TRY_VOID(CheckLabels(record));
  if (!Within(record.pool(), kKeyCharacters, kMaxLabelKey)) {
    return Bad("pool", "must be at most 63 of [A-Za-z0-9._/-]");
  }
  if (record.build().size() > kMaxBuild || !IsUtf8(record.build())) {
    return Bad("build", "must be UTF-8 of at most 128 bytes");
  }
  if (record.ByteSizeLong() > kMaxNodeRecordBytes) {
    return Bad(
        "", fmt::format("{} bytes are more than {}", record.ByteSizeLong(), kMaxNodeRecordBytes));
  }
  return Ok();
}

Result<std::string> EncodeNodeRecord(v1::NodeRecord record) {
  record.set_version(kNodeRecordVersion);
  DSEC_TRY_VOID(CheckNodeRecord(record));
  return record.SerializeAsString();
}

Result<v1::NodeRecord> ParseNodeRecord(std::string_view bytes) {
  const auto damaged = [](std::string_view why) {
    return Error(Code::kInternal, "node.record_damaged",
                 fmt::format("a record of a node in the store cannot be used: {}", why));
  };
  if (bytes.size() > kMaxNodeRecordBytes) return damaged("too large");
  v1::NodeRecord record;
  if (!record.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return damaged("not a record");
  }
  if (record.version() != kNodeRecordVersion) {
    return damaged(
        fmt::format("version {}, this program knows {}", record.version(), kNodeRecordVersion));
  }
  if (auto checked = CheckNodeRecord(record); !checked.ok()) {
    return damaged(checked.error().message());
  }
  return record;
}

}  // namespace dsec::cluster
