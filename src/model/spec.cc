// SPDX-License-Identifier: Apache-2.0
#include "model/spec.h"

#include <algorithm>
#include <unordered_set>

#include "base/utf8.h"

namespace dsec::model {
namespace {

constexpr size_t kMaxToolkits = 64;
constexpr size_t kMaxLayerRef = 256;
constexpr size_t kMaxEntrypointItems = 4096;
constexpr uint64_t kDefaultInodeBytes = 4096;
constexpr uint64_t kDefaultInodesFloor = 65536;

template <typename... Args>
Error Invalid(std::string_view field, std::string_view reason, fmt::format_string<Args...> format,
              Args&&... args) {
  return Error(Code::kInvalidArgument, reason,
               fmt::format("{}: {}", field, fmt::format(format, std::forward<Args>(args)...)))
      .WithField(std::string(field));
}

bool IsAlpha(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsAlnum(char c) { return IsAlpha(c) || IsDigit(c); }

// First character alphanumeric (or in `also_first`), the others also of `also`.
bool Matches(std::string_view text, size_t max, std::string_view also_first,
             std::string_view also) {
  if (text.empty() || text.size() > max) return false;
  if (!IsAlnum(text[0]) && also_first.find(text[0]) == std::string_view::npos) return false;
  return std::all_of(text.begin() + 1, text.end(),
                     [&](char c) { return IsAlnum(c) || also.find(c) != std::string_view::npos; });
}

// UTF-8 without C0, DEL and C1 controls.
bool IsPlainText(std::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0 || first < 0x20 || first == 0x7f) return false;
    if (first == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0) return false;
    text.remove_prefix(length);
  }
  return true;
}

Result<void> CheckRange(uint64_t value, const LimitRule& rule, std::string_view field) {
  if (!rule.unenforceable.empty()) {
    return Error(Code::kFailedPrecondition, "limit.unenforceable",
                 fmt::format("{}: this node cannot enforce it: {}", field, rule.unenforceable))
        .WithField(std::string(field));
  }
  if (value < rule.min) {
    return Invalid(field, "spec.out_of_range", "{} is below the minimum {}", value, rule.min);
  }
  if (value > rule.max) {
    return Invalid(field, "spec.out_of_range", "{} is above the maximum {}", value, rule.max);
  }
  return Ok();
}

uint64_t DefaultInodes(uint64_t disk_bytes, const LimitsPolicy& policy) {
  if (policy.disk_inodes.fallback != 0) return policy.disk_inodes.fallback;
  if (policy.inode_cost_bytes != 0) {
    return std::max(disk_bytes / policy.inode_cost_bytes, policy.disk_inodes.min);
  }
  return std::clamp(std::max(disk_bytes / kDefaultInodeBytes, kDefaultInodesFloor),
                    policy.disk_inodes.min, policy.disk_inodes.max);
}

Result<void> NormalizeLimits(v1::Limits& limits, const LimitsPolicy& policy) {
  auto fill = [](uint64_t value, uint64_t fallback) { return value != 0 ? value : fallback; };
  limits.set_memory_bytes(fill(limits.memory_bytes(), policy.memory_bytes.fallback));
  DSEC_TRY_VOID(CheckRange(limits.memory_bytes(), policy.memory_bytes, "limits.memory_bytes"));
  limits.set_cpu_millis(fill(limits.cpu_millis(), policy.cpu_millis.fallback));
  DSEC_TRY_VOID(CheckRange(limits.cpu_millis(), policy.cpu_millis, "limits.cpu_millis"));
  limits.set_pids(fill(limits.pids(), policy.pids.fallback));
  DSEC_TRY_VOID(CheckRange(limits.pids(), policy.pids, "limits.pids"));
  limits.set_disk_bytes(fill(limits.disk_bytes(), policy.disk_bytes.fallback));
  DSEC_TRY_VOID(CheckRange(limits.disk_bytes(), policy.disk_bytes, "limits.disk_bytes"));
  limits.set_disk_inodes(fill(limits.disk_inodes(), DefaultInodes(limits.disk_bytes(), policy)));
  DSEC_TRY_VOID(CheckRange(limits.disk_inodes(), policy.disk_inodes, "limits.disk_inodes"));
  if (policy.inode_cost_bytes != 0) {
    const uint64_t follows = limits.disk_bytes() / policy.inode_cost_bytes;
    if (limits.disk_inodes() < follows) {
      return Error(Code::kFailedPrecondition, "limit.unenforceable",
                   fmt::format("limits.disk_inodes: {} cannot be enforced on this node, whose "
                               "writable layers bound inodes "
                               "through bytes only: disk_bytes {} holds at most {} inodes",
                               limits.disk_inodes(), limits.disk_bytes(), follows))
          .WithField("limits.disk_inodes");
    }
  }
  limits.set_shm_bytes(
      fill(limits.shm_bytes(), std::min(policy.shm_bytes.fallback, limits.memory_bytes() / 2)));
  DSEC_TRY_VOID(CheckRange(limits.shm_bytes(), policy.shm_bytes, "limits.shm_bytes"));
  if (limits.shm_bytes() > limits.memory_bytes()) {
    return Invalid("limits.shm_bytes", "spec.out_of_range",
                   "{} is above limits.memory_bytes {}, to which it is charged", limits.shm_bytes(),
                   limits.memory_bytes());
  }
  limits.set_open_files(fill(limits.open_files(), policy.open_files.fallback));
  DSEC_TRY_VOID(CheckRange(limits.open_files(), policy.open_files, "limits.open_files"));
  limits.set_output_bytes(fill(limits.output_bytes(), policy.output_bytes.fallback));
  return CheckRange(limits.output_bytes(), policy.output_bytes, "limits.output_bytes");
}

Result<void> NormalizeTimes(v1::SandboxSpec& spec, const LimitsPolicy& policy) {
  if (spec.ttl_ms() == 0) spec.set_ttl_ms(policy.ttl_ms.fallback);
  if (spec.ttl_ms() != 0) DSEC_TRY_VOID(CheckRange(spec.ttl_ms(), policy.ttl_ms, "ttl_ms"));
  if (spec.idle_ms() == 0) spec.set_idle_ms(policy.idle_ms.fallback);
  if (spec.idle_ms() != 0) DSEC_TRY_VOID(CheckRange(spec.idle_ms(), policy.idle_ms, "idle_ms"));
  if (spec.ttl_ms() != 0 && spec.idle_ms() > spec.ttl_ms()) {
    return Invalid("idle_ms", "spec.out_of_range", "{} is above ttl_ms {}", spec.idle_ms(),
                   spec.ttl_ms());
  }
  constexpr std::string_view kExtension = "ttl_policy.max_extension_ms";
  if (!spec.ttl_waits_for_exec()) {
    if (spec.ttl_extension_ms() != 0) {
      return Invalid(kExtension, "spec.contradiction", "{} without ttl_policy.wait_for_exec",
                     spec.ttl_extension_ms());
    }
    return Ok();
  }
  if (spec.ttl_extension_ms() == 0) spec.set_ttl_extension_ms(policy.ttl_extension_ms.fallback);
  return CheckRange(spec.ttl_extension_ms(), policy.ttl_extension_ms, kExtension);
}

// Form only: the layer store knows what exists.
Result<void> CheckLayerRef(std::string_view ref, std::string_view field) {
  if (!Matches(ref, kMaxLayerRef, "", "_.:/@+-")) {
    return Invalid(
        field, "spec.layer_ref",
        "{} is not a layer id or name:tag (letters, digits and _.:/@+-, at most {} bytes)",
        Quoted(ref), kMaxLayerRef);
  }
  return Ok();
}

Result<void> CheckEntrypoint(const google::protobuf::RepeatedPtrField<std::string>& argv) {
  if (argv.empty()) return Ok();
  if (argv.size() > static_cast<int>(kMaxEntrypointItems)) {
    return Invalid("entrypoint", "spec.too_long", "{} items, at most {}", argv.size(),
                   kMaxEntrypointItems);
  }
  if (argv[0].empty()) return Invalid("entrypoint[0]", "spec.empty", "must name a program");
  size_t total = 0;
  for (int i = 0; i < argv.size(); ++i) {
    const std::string field = fmt::format("entrypoint[{}]", i);
    if (argv[i].find('\0') != std::string::npos) {
      return Invalid(field, "spec.nul_byte", "holds a NUL byte");
    }
    if (argv[i].size() + 1 > kMaxArgString) {
      return Invalid(field, "spec.too_long", "{} bytes, at most {}", argv[i].size(),
                     kMaxArgString - 1);
    }
    total += argv[i].size() + 1;
  }
  if (total > kMaxArgvBytes) {
    return Invalid("entrypoint", "spec.too_long", "{} bytes, at most {}", total, kMaxArgvBytes);
  }
  return Ok();
}

Result<void> CheckLabels(const google::protobuf::Map<std::string, std::string>& labels) {
  if (labels.size() > kMaxLabels) {
    return Invalid("labels", "spec.too_long", "{} labels, at most {}", labels.size(), kMaxLabels);
  }
  for (const auto& [key, value] : labels) DSEC_TRY_VOID(CheckLabel(key, value));
  return Ok();
}

}  // namespace

std::string Quoted(std::string_view bytes, size_t max) {
  std::string text = "\"";
  for (const char c : bytes.substr(0, max)) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c >= 0x20 && c < 0x7f) {
      text += c;
    } else {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  text += bytes.size() > max ? "...\"" : "\"";
  return text;
}

Result<void> CheckEnvKey(std::string_view key, std::string_view field) {
  constexpr size_t kMax = 256;
  if (!Matches(key, kMax, "_", "_.-") || IsDigit(key[0])) {
    return Invalid(
        field, "spec.env_key",
        "key {} must be a letter or _ followed by letters, digits and _.-, at most {} bytes",
        Quoted(key), kMax);
  }
  return Ok();
}

Result<void> CheckEnv(const google::protobuf::RepeatedPtrField<v1::KeyValue>& env,
                      std::string_view field) {
  if (env.size() > static_cast<int>(kMaxEnvCount)) {
    return Invalid(field, "spec.too_long", "{} variables, at most {}", env.size(), kMaxEnvCount);
  }
  std::unordered_set<std::string_view> seen;
  size_t total = 0;
  for (const v1::KeyValue& item : env) {
    DSEC_TRY_VOID(CheckEnvKey(item.key(), field));
    if (!seen.insert(item.key()).second) {
      return Invalid(field, "spec.env_key", "key {} is given twice", Quoted(item.key()));
    }
    if (item.value().find('\0') != std::string::npos) {
      return Invalid(field, "spec.nul_byte", "the value of {} holds a NUL byte", item.key());
    }
    const size_t size = item.key().size() + item.value().size() + 2;  // '=' and the final NUL
    if (size > kMaxArgString) {
      return Invalid(field, "spec.too_long", "{} takes {} bytes with its value, at most {}",
                     item.key(), size, kMaxArgString);
    }
    total += size;
  }
  if (total > kMaxEnvBytes) {
    return Invalid(field, "spec.too_long", "{} bytes in all, at most {}", total, kMaxEnvBytes);
  }
  return Ok();
}

Result<void> CheckUser(std::string_view user, std::string_view field) {
  auto id_ok = [](std::string_view digits) {
    if (digits.empty() || digits.size() > 5) return false;
    uint32_t value = 0;
    for (const char c : digits) {
      if (!IsDigit(c)) return false;
      value = value * 10 + static_cast<uint32_t>(c - '0');
    }
    return value <= 65535;
  };
  const size_t colon = user.find(':');
  const bool numeric = !user.empty() && IsDigit(user[0]);
  const bool ok = numeric ? id_ok(user.substr(0, colon)) &&
                                (colon == std::string_view::npos || id_ok(user.substr(colon + 1)))
                          : Matches(user, 32, "_", "_.-");
  if (!ok) {
    return Invalid(field, "spec.user",
                   "{} is neither a user name (at most 32 of letters, digits, _.-) nor uid or "
                   "uid:gid with ids up to 65535",
                   Quoted(user));
  }
  return Ok();
}

Result<void> CheckAbsolutePath(std::string_view path, std::string_view field) {
  if (path.empty() || path[0] != '/') {
    return Invalid(field, "spec.path", "{} is not an absolute path", Quoted(path));
  }
  if (path.find('\0') != std::string_view::npos) {
    return Invalid(field, "spec.nul_byte", "holds a NUL byte");
  }
  if (path.size() > kMaxPathBytes) {
    return Invalid(field, "spec.too_long", "{} bytes, at most {}", path.size(), kMaxPathBytes);
  }
  return Ok();
}

Result<void> CheckHostname(std::string_view name) {
  bool ok = Matches(name, 63, "", "-.") && IsAlnum(name.back());
  for (size_t i = 1; ok && i < name.size(); ++i) {
    // A dot stands between two alphanumeric characters.
    if (name[i] == '.') ok = IsAlnum(name[i - 1]) && IsAlnum(name[i + 1]);
  }
  if (!ok) {
    return Invalid("hostname", "spec.hostname",
                   "{} is not a host name of RFC 1123 (letters, digits, - and ., at most 63 bytes)",
                   Quoted(name));
  }
  return Ok();
}

Result<void> CheckName(std::string_view name) {
  if (!Matches(name, 63, "", "_.-")) {
    return Invalid(
        "name", "spec.name",
        "{} must be a letter or digit followed by letters, digits and _.-, at most 63 bytes",
        Quoted(name));
  }
  return Ok();
}

Result<void> CheckLabel(std::string_view key, std::string_view value) {
  if (!Matches(key, 63, "", "_./-")) {
    return Invalid(
        "labels", "spec.label",
        "key {} must be a letter or digit followed by letters, digits and _./-, at most 63 bytes",
        Quoted(key));
  }
  if (value.size() > 256 || !IsPlainText(value)) {
    return Invalid(fmt::format("labels.{}", key), "spec.label",
                   "{} must be UTF-8 text without control characters, at most 256 bytes",
                   Quoted(value));
  }
  return Ok();
}

Result<void> NormalizeSpec(v1::SandboxSpec& spec, const LimitsPolicy& policy) {
  if (!v1::Backend_IsValid(spec.backend())) {
    return Invalid("backend", "spec.backend", "{} is not a backend",
                   static_cast<int>(spec.backend()));
  }
  if (spec.backend() == v1::BACKEND_UNSPECIFIED) spec.set_backend(v1::BACKEND_CONTAINER);
  if (spec.base().empty()) return Invalid("base", "spec.empty", "a base layer is required");
  DSEC_TRY_VOID(CheckLayerRef(spec.base(), "base"));
  if (!spec.workspace().empty()) DSEC_TRY_VOID(CheckLayerRef(spec.workspace(), "workspace"));
  if (spec.toolkits_size() > static_cast<int>(kMaxToolkits)) {
    return Invalid("toolkits", "spec.too_long", "{} layers, at most {}", spec.toolkits_size(),
                   kMaxToolkits);
  }
  for (int i = 0; i < spec.toolkits_size(); ++i) {
    DSEC_TRY_VOID(CheckLayerRef(spec.toolkits(i), fmt::format("toolkits[{}]", i)));
  }
  DSEC_TRY_VOID(NormalizeLimits(*spec.mutable_limits(), policy));
  v1::NetworkPolicy& network = *spec.mutable_network();
  if (network.mode().empty()) network.set_mode("none");
  if (network.mode() != "none") {
    return Invalid("network.mode", "spec.network", "{} is not a network mode (only \"none\" is)",
                   Quoted(network.mode()));
  }
  DSEC_TRY_VOID(NormalizeTimes(spec, policy));
  DSEC_TRY_VOID(CheckEnv(spec.env(), "env"));
  if (spec.workdir().empty()) spec.set_workdir("/");
  DSEC_TRY_VOID(CheckAbsolutePath(spec.workdir(), "workdir"));
  // What is not UTF-8 must not get into a protobuf `string`: the record could be written but not
  // read back.
  if (!IsUtf8(spec.workdir())) {
    return Invalid("workdir", "spec.path", "{} is not UTF-8", Quoted(spec.workdir()));
  }
  if (spec.user().empty()) spec.set_user("0");
  DSEC_TRY_VOID(CheckUser(spec.user(), "user"));
  if (!spec.hostname().empty()) DSEC_TRY_VOID(CheckHostname(spec.hostname()));
  DSEC_TRY_VOID(CheckLabels(spec.labels()));
  DSEC_TRY_VOID(CheckEntrypoint(spec.entrypoint()));
  if (!spec.name().empty()) DSEC_TRY_VOID(CheckName(spec.name()));
  return Ok();
}

}  // namespace dsec::model
