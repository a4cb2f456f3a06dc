// SPDX-License-Identifier: Apache-2.0
#include "config/node_config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <span>
#include <string_view>
#include <variant>

#include "base/id.h"

namespace dsec::config {
namespace {

using Text = std::string NodeConfig::*;
using Number = uint64_t NodeConfig::*;
using Flag = bool NodeConfig::*;

// One key: where it goes, its unit, bounds of numbers, and what it means.
struct Key {
  std::string_view name;
  std::variant<Text, Number, Flag> member;
  std::string_view unit;
  uint64_t min;
  uint64_t max;
  std::string_view sentence;
};

constexpr uint64_t kTera = 1ull << 40;
constexpr uint64_t kMonthMs = 30ull * 86'400'000;

const Key kKeys[] = {
    {"node_id", &NodeConfig::node_id, "", 0, 0,
     "Name of the node, 1 to 32 of [a-z0-9]; part of every sandbox id."},
    {"listen", &NodeConfig::listen, "", 0, 0,
     "HOST:PORT of the HTTP API, or unix:/PATH. Port 0 picks a free one."},
    {"state_dir", &NodeConfig::state_dir, "", 0, 0, "Records, API key, scratch space. Absolute."},
    {"run_dir", &NodeConfig::run_dir, "", 0, 0,
     "Sockets of sandboxes; at most 64 bytes long. Absolute."},
    {"layers_dir", &NodeConfig::layers_dir, "", 0, 0,
     "Root of the layer store; may lie on a cluster file system. Empty: state_dir/layers."},
    {"layers_cache_dir", &NodeConfig::layers_cache_dir, "", 0, 0,
     "Copies of the layers' manifests and metadata, on a local file system (none on tmpfs and "
     "overlayfs). Empty: state_dir/layers_cache."},
    {"layers_cache_bytes", &NodeConfig::layers_cache_bytes, "bytes", 0, 1024 * kTera,
     "Size of those copies; what is mounted does not go."},
    {"layers_patience_ms", &NodeConfig::layers_patience_ms, "ms", 100, 600'000,
     "How long a create waits for the file system of layers_dir."},
    {"layers_prefetch", &NodeConfig::layers_prefetch, "", 0, 64,
     "Requests at once that read ahead what the traces of newly mounted layers name; 0: none."},
    {"layers_prefetch_bytes_per_s", &NodeConfig::layers_prefetch_bytes_per_s, "bytes", 4096, kTera,
     "How much of that is read in a second, at most."},
    {"layers_verify", &NodeConfig::layers_verify, "", 0, 0,
     "Check each chunk of layers against its digest when it is read (docs/verified_layers.md)."},
    {"layers_url", &NodeConfig::layers_url, "", 0, 0,
     "http:// or https:// URL below which an object store has blobs/HEX/* of the layers. What is "
     "read from there is always checked; names are those of layers_dir, ids work without. Empty: "
     "layers come from layers_dir."},
    {"layers_url_headers_file", &NodeConfig::layers_url_headers_file, "", 0, 0,
     "File with lines \"Name: value\" that each request to layers_url carries, such as "
     "Authorization; needs https or a loopback address. Read anew for each."},
    {"layers_url_ca_file", &NodeConfig::layers_url_ca_file, "", 0, 0,
     "Certificates (PEM) that layers_url is checked against. Empty: those of the system."},
    {"layers_data_cache_dir", &NodeConfig::layers_data_cache_dir, "", 0, 0,
     "Local copy of checked content, with layers_verify or layers_url. Empty: "
     "state_dir/layers_data."},
    {"layers_data_cache_bytes", &NodeConfig::layers_data_cache_bytes, "bytes", 0, 1024 * kTera,
     "Size of that copy; the longest unused goes first. 0: nothing is kept."},
    {"blobfs_path", &NodeConfig::blobfs_path, "", 0, 0,
     "The dsec-blobfs program. Empty: beside dsec."},
    {"spawner_path", &NodeConfig::spawner_path, "", 0, 0,
     "The dsec-spawner program. Empty: beside dsec."},
    {"aether_path", &NodeConfig::aether_path, "", 0, 0,
     "The dsec-aether program. Empty: beside dsec."},
    {"vm_guest_dir", &NodeConfig::vm_guest_dir, "", 0, 0,
     "Kernel (vmlinuz) and initramfs (initrd) of microVMs, made by tools/guest/build_guest.py. "
     "Empty: share/dsec/guest beside dsec's folder."},
    {"vm_qemu_path", &NodeConfig::vm_qemu_path, "", 0, 0,
     "The qemu-system-x86_64 program. Empty: /usr/bin or /usr/local/bin."},
    {"vm_keeper_path", &NodeConfig::vm_keeper_path, "", 0, 0,
     "The dsec-vmkeeper program. Empty: beside dsec."},
    {"vm_allow_emulation", &NodeConfig::vm_allow_emulation, "", 0, 0,
     "Make microVMs also where no guest boots under KVM: QEMU emulates them, some ten times "
     "slower, "
     "and their records say `emulated`. Off: only those with the label "
     "dsec.io/allow-emulation=true."},
    {"vm_max", &NodeConfig::vm_max, "machines", 0, 4096, "Virtual machines at most."},
    {"shards", &NodeConfig::shards, "threads", 0, 64, "Event loops. 0: one a core, at most 8."},
    {"capacity", &NodeConfig::capacity, "sandboxes", 1, 30'000, "Live sandboxes at most."},
    {"slot_pool_size", &NodeConfig::slot_pool_size, "slots", 0, 1024,
     "Slots that are made ahead of use."},
    {"creates_at_once", &NodeConfig::creates_at_once, "creates", 1, 256,
     "Creations that work at the same time."},
    {"create_queue", &NodeConfig::create_queue, "creates", 0, 1'000'000,
     "Creations that may wait for their turn or for room."},
    {"id_base", &NodeConfig::id_base, "uid", 65'536, 0xfffeffff,
     "First host id of sandboxes; each takes 65,536."},
    {"agent_uid_base", &NodeConfig::agent_uid_base, "uid", 1000, 0xfffeffff,
     "First host id of agents; each takes one."},
    {"scratch_bytes", &NodeConfig::scratch_bytes, "bytes", 0, 1024 * kTera,
     "Size of the scratch image where one is used; sparse. 0: four fifths of what is free."},
    {"memory_reserve_bytes", &NodeConfig::memory_reserve_bytes, "bytes", 0, kTera,
     "Creations are refused below so much available memory of the host."},
    {"disk_reserve_bytes", &NodeConfig::disk_reserve_bytes, "bytes", 0, kTera,
     "Creations are refused below so much free scratch or state space."},
    {"psi_memory_max_percent", &NodeConfig::psi_memory_max_percent, "%", 0, 100,
     "Creations are refused above this memory pressure (some, 10 s). 0: off."},
    {"psi_cpu_max_percent", &NodeConfig::psi_cpu_max_percent, "%", 0, 100,
     "The same for CPU pressure. 0: off."},
    {"default_memory_bytes", &NodeConfig::default_memory_bytes, "bytes", 16ull << 20, 4 * kTera,
     "Memory of a sandbox that does not say."},
    {"default_cpu_millis", &NodeConfig::default_cpu_millis, "1/1000 core", 10, 1'024'000,
     "CPU of a sandbox that does not say."},
    {"default_pids", &NodeConfig::default_pids, "processes", 4, 1 << 20,
     "Processes and threads of a sandbox that does not say."},
    {"default_disk_bytes", &NodeConfig::default_disk_bytes, "bytes", 16ull << 20, 16 * kTera,
     "Writable layer of a sandbox that does not say."},
    {"default_disk_inodes", &NodeConfig::default_disk_inodes, "files", 0, 1ull << 32,
     "Files of the writable layer. 0: follows from its bytes."},
    {"default_shm_bytes", &NodeConfig::default_shm_bytes, "bytes", 1ull << 20, 4 * kTera,
     "/dev/shm of a sandbox that does not say."},
    {"default_open_files", &NodeConfig::default_open_files, "descriptors", 256, 1 << 20,
     "Descriptors of one process."},
    {"default_output_bytes", &NodeConfig::default_output_bytes, "bytes", 1024, 32ull << 20,
     "Kept output per stream of one command."},
    {"default_ttl_ms", &NodeConfig::default_ttl_ms, "ms", 0, kMonthMs,
     "Lifetime of a sandbox that does not say. 0: none."},
    {"default_idle_ms", &NodeConfig::default_idle_ms, "ms", 0, kMonthMs,
     "Idle time of a sandbox that does not say. 0: none."},
    {"default_exec_timeout_ms", &NodeConfig::default_exec_timeout_ms, "ms", 0, kMonthMs,
     "Time limit of attached commands that do not say. 0: none."},
    {"max_memory_bytes", &NodeConfig::max_memory_bytes, "bytes", 16ull << 20, 4 * kTera,
     "Largest memory a sandbox may ask for."},
    {"max_disk_bytes", &NodeConfig::max_disk_bytes, "bytes", 16ull << 20, 16 * kTera,
     "Largest writable layer a sandbox may ask for."},
    {"max_output_bytes", &NodeConfig::max_output_bytes, "bytes", 1024, 32ull << 20,
     "Largest kept output a command may ask for."},
    {"claim_grace_ms", &NodeConfig::claim_grace_ms, "ms", 1000, kMonthMs,
     "A sandbox whose creation nobody received is ended after this time."},
    {"disconnect_grace_ms", &NodeConfig::disconnect_grace_ms, "ms", 0, kMonthMs,
     "A command whose follower vanished is ended after this time."},
    {"reconcile_period_ms", &NodeConfig::reconcile_period_ms, "ms", 1000, kMonthMs,
     "How often records and host are compared."},
    {"ended_records", &NodeConfig::ended_records, "records", 0, 10'000'000,
     "Ended sandboxes that are remembered at most."},
    {"ended_age_ms", &NodeConfig::ended_age_ms, "ms", 0, 12 * kMonthMs,
     "How long ended sandboxes are remembered at most."},
    {"events_kept", &NodeConfig::events_kept, "events", 1000, 100'000'000,
     "Events that are kept at most."},
    {"iam_cache_max_ms", &NodeConfig::iam_cache_max_ms, "ms", 1000, kMonthMs,
     "How long keys and rights that were read last go on to hold while the store is away."},
    {"audit_records", &NodeConfig::audit_records, "records", 1000, 100'000'000,
     "Records of the audit log that are kept."},
    {"fn_types_dir", &NodeConfig::fn_types_dir, "", 0, 0,
     "Folder of the node's task types, *.json. Empty: share/dsec/fn_types beside bin, or share of "
     "the source. Those that were put lie in state_dir/fn_types and stand before them."},
    {"fn_workers_max", &NodeConfig::fn_workers_max, "workers", 0, 4096,
     "Workers of FnCall over all pools, so calls that run at once. 0: four a core, at least 8."},
    {"fn_makes_at_once", &NodeConfig::fn_makes_at_once, "workers", 1, 64,
     "Workers that are made at the same time."},
    {"fn_queue_max", &NodeConfig::fn_queue_max, "calls", 1, 1'000'000,
     "Calls that may wait for a worker; one principal alone may fill four fifths of it."},
    {"fn_queue_bytes", &NodeConfig::fn_queue_bytes, "bytes", 64ull << 20, kTera,
     "Code, files and input of the calls under way, those that wait included."},
    {"fn_attempts", &NodeConfig::fn_attempts, "workers", 1, 16,
     "Workers that a call is tried on when the platform fails it."},
    {"fn_idle_ms", &NodeConfig::fn_idle_ms, "ms", 100, kMonthMs,
     "A worker above its pool's minimum that had no call for this long is ended."},
    {"fn_ops_kept", &NodeConfig::fn_ops_kept, "results", 0, 10'000'000,
     "Results that are kept for repeats of their op_id, at most."},
    {"fn_ops_kept_bytes", &NodeConfig::fn_ops_kept_bytes, "bytes", 0, kTera,
     "Their bytes, at most."},
    {"fn_ops_kept_ms", &NodeConfig::fn_ops_kept_ms, "ms", 0, kMonthMs, "Their age, at most."},
    {"fn_compile_cache", &NodeConfig::fn_compile_cache, "compiles", 0, 10'000'000,
     "Outcomes of compile steps that are kept, at most."},
    {"fn_artifact_bytes", &NodeConfig::fn_artifact_bytes, "bytes", 1ull << 20, 1024 * kTera,
     "Artefacts that are kept on disk; least recently used first out."},
    {"fn_artifact_max_bytes", &NodeConfig::fn_artifact_max_bytes, "bytes", 1024, 1ull << 30,
     "One artefact, at most."},
    {"fn_fetch_bytes", &NodeConfig::fn_fetch_bytes, "bytes", 1024, 1ull << 30,
     "All files that one step of a call may bring back."},
    {"fn_default_wall_ms", &NodeConfig::fn_default_wall_ms, "ms", 1, 3'600'000,
     "Wall time of a step that does not say; its waiting does not count."},
    {"fn_default_cpu_ms", &NodeConfig::fn_default_cpu_ms, "ms", 1, 3'600'000,
     "CPU time of a step's whole tree that does not say."},
    {"fn_default_memory_bytes", &NodeConfig::fn_default_memory_bytes, "bytes", 8ull << 20,
     4 * kTera, "Memory of a step that does not say."},
    {"fn_default_processes", &NodeConfig::fn_default_processes, "processes", 1, 65'536,
     "Processes and threads of a step that does not say."},
    {"fn_default_output_bytes", &NodeConfig::fn_default_output_bytes, "bytes", 1, 64ull << 20,
     "Each stream of a step that does not say."},
    {"fn_default_file_bytes", &NodeConfig::fn_default_file_bytes, "bytes", 1, kTera,
     "One file of a step that does not say."},
    {"fn_default_disk_bytes", &NodeConfig::fn_default_disk_bytes, "bytes", 1ull << 20, kTera,
     "Writable layer of a step that does not say; it lies in memory."},
    {"fn_max_wall_ms", &NodeConfig::fn_max_wall_ms, "ms", 1, kMonthMs,
     "Largest wall and CPU time a step may ask for."},
    {"fn_max_memory_bytes", &NodeConfig::fn_max_memory_bytes, "bytes", 8ull << 20, 4 * kTera,
     "Largest memory a step may ask for."},
    {"fn_max_output_bytes", &NodeConfig::fn_max_output_bytes, "bytes", 1, 64ull << 20,
     "Largest stream a step may ask for."},
    {"fn_mig_profiles", &NodeConfig::fn_mig_profiles, "", 0, 0,
     "Profiles of MIG instances, as nvidia-smi mig -lgi lists them: "
     "gpu0/gi1=1g.10gb,gpu0/gi2=3g.40gb. An instance without one has the kind mig."},
    {"fn_gpu_shared_max", &NodeConfig::fn_gpu_shared_max, "calls", 1, 1024,
     "Calls that hold one shared GPU or instance at the same time."},
    {"cluster_listen", &NodeConfig::cluster_listen, "", 0, 0,
     "`dsec edge`, `dsec apiserver`: ADDRESS:PORT (no name) where other daemons connect, with TLS. "
     "Port 0 picks a free one."},
    {"cluster_address", &NodeConfig::cluster_address, "", 0, 0,
     "`dsec edge`: HOST:PORT under which apiservers reach cluster_listen. Empty: the same."},
    {"apiservers", &NodeConfig::apiservers, "", 0, 0,
     "`dsec edge`: cluster_listen of the apiservers, HOST:PORT, between commas."},
    {"join_token", &NodeConfig::join_token, "", 0, 0,
     "`dsec edge`: what `dsec cluster token` has printed; used once, for the first start."},
    {"node_pool", &NodeConfig::node_pool, "", 0, 0,
     "`dsec edge`: the pool that the node is of, such as cloud. Empty: the usual one."},
    {"node_labels", &NodeConfig::node_labels, "", 0, 0,
     "`dsec edge`: KEY=VALUE, between commas; what placement may ask for."},
    {"etcd", &NodeConfig::etcd, "", 0, 0,
     "`dsec apiserver`: members of etcd, http://HOST:PORT between commas; empty: SQLite in "
     "state_dir, for one apiserver. `dsec edge`: the same etcd, for quotas; empty: this node "
     "enforces none."},
    {"etcd_prefix", &NodeConfig::etcd_prefix, "", 0, 0, "Before every key in etcd."},
    {"ca_dir", &NodeConfig::ca_dir, "", 0, 0,
     "`dsec apiserver`: ca.key, ca.pem and trusted.pem of `dsec cluster init`. Absolute."},
    {"log_level", &NodeConfig::log_level, "", 0, 0, "debug, info, warn or error."},
    {"log_format", &NodeConfig::log_format, "", 0, 0, "text or json."},
};

Error Bad(std::string_view reason, std::string_view key, std::string message) {
  return Error(Code::kInvalidArgument, reason, std::move(message)).WithField(std::string(key));
}

// Sets one key from its TOML value.
Result<void> Assign(NodeConfig& config, const Key& key, const toml::node& value,
                    const std::string& place) {
  if (const Text* text = std::get_if<Text>(&key.member)) {
    const auto given = value.value_exact<std::string>();
    if (!given)
      return Bad("config.type", key.name, fmt::format("{}: {} must be a string", place, key.name));
    config.*(*text) = *given;
    return {};
  }
  if (const Flag* flag = std::get_if<Flag>(&key.member)) {
    const auto given = value.value_exact<bool>();
    if (!given) {
      return Bad("config.type", key.name,
                 fmt::format("{}: {} must be true or false", place, key.name));
    }
    config.*(*flag) = *given;
    return {};
  }
  const auto given = value.value_exact<int64_t>();
  if (!given || *given < 0) {
    return Bad("config.type", key.name,
               fmt::format("{}: {} must be a non-negative integer", place, key.name));
  }
  config.*std::get<Number>(key.member) = static_cast<uint64_t>(*given);
  return {};
}

bool IsAbsolute(const std::string& path) {
  return path.starts_with('/') && path.find('\0') == std::string::npos;
}

// Credentials do not go over a wire that anybody can read.
Result<void> CheckLayersUrl(const NodeConfig& config) {
  const std::string& url = config.layers_url;
  const bool secure = url.starts_with("https://");
  if (url.empty()) return {};
  if ((!secure && !url.starts_with("http://")) || url.ends_with('/') ||
      url.find_first_of(" \t\r\n?#@") != std::string::npos) {
    return Bad("config.value", "layers_url",
               fmt::format("layers_url: {} is not http(s)://HOST[:PORT][/PATH] without credentials "
                           "and without a slash at its end",
                           url));
  }
  std::string host = url.substr(url.find("://") + 3);
  host.resize(std::min(host.size(), host.find_first_of(":/")));
  if (!secure && !config.layers_url_headers_file.empty() && host != "127.0.0.1" &&
      host != "localhost")
    return Bad("config.value", "layers_url_headers_file",
               "layers_url_headers_file: needs an https:// URL");
  return {};
}

}  // namespace

Result<void> CheckNodeConfig(const NodeConfig& config) {
  for (const Key& key : kKeys) {
    const Number* number = std::get_if<Number>(&key.member);
    if (number == nullptr) continue;
    const uint64_t value = config.*(*number);
    if (value < key.min || value > key.max) {
      return Bad("config.range", key.name,
                 fmt::format("{}: {} is not from {} to {}", key.name, value, key.min, key.max));
    }
  }
  DSEC_TRY([[maybe_unused]] const NodeId id, ParseNodeId(config.node_id));
  for (const auto& [name, path] :
       {std::pair{"state_dir", &config.state_dir}, std::pair{"run_dir", &config.run_dir}}) {
    if (!IsAbsolute(*path))
      return Bad("config.path", name, fmt::format("{}: {} is not an absolute path", name, *path));
  }
  // sun_path holds 107 bytes and a socket's name takes up to 40 of them.
  if (config.run_dir.size() > 64) {
    return Bad("config.path", "run_dir",
               fmt::format("run_dir: {} is longer than 64 bytes", config.run_dir));
  }
  for (const auto& [name, path] :
       {std::pair{"layers_dir", &config.layers_dir},
        std::pair{"layers_cache_dir", &config.layers_cache_dir},
        std::pair{"layers_data_cache_dir", &config.layers_data_cache_dir},
        std::pair{"layers_url_headers_file", &config.layers_url_headers_file},
        std::pair{"layers_url_ca_file", &config.layers_url_ca_file},
        std::pair{"vm_guest_dir", &config.vm_guest_dir},
        std::pair{"vm_qemu_path", &config.vm_qemu_path},
        std::pair{"vm_keeper_path", &config.vm_keeper_path},
        std::pair{"fn_types_dir", &config.fn_types_dir}, std::pair{"ca_dir", &config.ca_dir}}) {
    if (!path->empty() && !IsAbsolute(*path))
      return Bad("config.path", name, fmt::format("{}: {} is not an absolute path", name, *path));
  }
  DSEC_TRY_VOID(CheckLayersUrl(config));
  const uint64_t ids_end = config.id_base + (config.capacity + config.slot_pool_size) * 65'536;
  if (ids_end > 0xffffffffull) {
    return Bad("config.range", "id_base",
               fmt::format("id_base: {} leaves no room for {} sandboxes below 2^32", config.id_base,
                           config.capacity));
  }
  const uint64_t agents_end = config.agent_uid_base + config.capacity + config.slot_pool_size;
  if (config.agent_uid_base < ids_end && config.id_base < agents_end) {
    return Bad("config.range", "agent_uid_base",
               "agent_uid_base: the ids of agents and of sandboxes overlap");
  }
  for (const auto& [name, low, high] :
       {std::tuple{"max_memory_bytes", config.default_memory_bytes, config.max_memory_bytes},
        std::tuple{"max_disk_bytes", config.default_disk_bytes, config.max_disk_bytes},
        std::tuple{"max_output_bytes", config.default_output_bytes, config.max_output_bytes},
        std::tuple{"fn_max_wall_ms", std::max(config.fn_default_wall_ms, config.fn_default_cpu_ms),
                   config.fn_max_wall_ms},
        std::tuple{"fn_max_memory_bytes", config.fn_default_memory_bytes,
                   config.fn_max_memory_bytes},
        std::tuple{"fn_max_output_bytes", config.fn_default_output_bytes,
                   config.fn_max_output_bytes}}) {
    if (low > high)
      return Bad("config.range", name,
                 fmt::format("{}: {} is below the default {}", name, high, low));
  }
  constexpr std::string_view kLevels[] = {"debug", "info", "warn", "error"};
  if (std::find(std::begin(kLevels), std::end(kLevels), config.log_level) == std::end(kLevels)) {
    return Bad("config.value", "log_level",
               fmt::format("log_level: {} is not debug, info, warn or error", config.log_level));
  }
  if (config.log_format != "text" && config.log_format != "json") {
    return Bad("config.value", "log_format",
               fmt::format("log_format: {} is not text or json", config.log_format));
  }
  return {};
}

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    size_t first = at;
    size_t last = end;
    while (first < last && text[first] == ' ') ++first;
    while (last > first && text[last - 1] == ' ') --last;
    if (first < last) out.push_back(text.substr(first, last - first));
    at = end + 1;
  }
  return out;
}

Result<NodeConfig> ParseNodeConfig(const std::string& text, const std::string& name) {
  NodeConfig config;
  toml::table table;
  try {
    table = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    return Bad("config.syntax", "",
               fmt::format("{}:{}:{}: {}", name, error.source().begin.line,
                           error.source().begin.column, error.description()));
  }
  for (const auto& [key, value] : table) {
    const std::string place =
        fmt::format("{}:{}:{}", name, key.source().begin.line, key.source().begin.column);
    const auto* known = std::find_if(std::begin(kKeys), std::end(kKeys),
                                     [&](const Key& k) { return k.name == key.str(); });
    if (known == std::end(kKeys)) {
      return Bad("config.unknown_key", key.str(),
                 fmt::format("{}: unknown key {}", place, key.str()));
    }
    DSEC_TRY_VOID(Assign(config, *known, value, place));
  }
  DSEC_TRY_VOID(CheckNodeConfig(config).Context("{}", name));
  return config;
}

Result<NodeConfig> LoadNodeConfig(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error(Code::kNotFound, "config.unreadable", fmt::format("cannot read {}", path));
  std::string text(size_t{1} << 20, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (!file.eof()) return Bad("config.syntax", "", fmt::format("{} is larger than 1 MiB", path));
  return ParseNodeConfig(text, path);
}

std::string DumpNodeConfig(const NodeConfig& config) {
  std::string out;
  for (const Key& key : kKeys) {
    if (const Text* text = std::get_if<Text>(&key.member)) {
      std::string quoted;
      for (const char c : config.*(*text)) {
        if (c == '"' || c == '\\') quoted += '\\';
        quoted += c;
      }
      out += fmt::format("{} = \"{}\"\n", key.name, quoted);
    } else if (const Flag* flag = std::get_if<Flag>(&key.member)) {
      out += fmt::format("{} = {}\n", key.name, config.*(*flag));
    } else {
      out += fmt::format("{} = {}\n", key.name, config.*std::get<Number>(key.member));
    }
  }
  return out;
}

std::string NodeConfigReference() {
  const NodeConfig defaults;
  std::string out =
      "<!-- SPDX-License-Identifier: Apache-2.0 -->\n"
      "<!-- Written by `dsec up --config-reference`; the source is the table in "
      "src/config/node_config.cc. -->\n"
      "# Settings of a node\n\n"
      "A TOML file, given by `dsec up --config FILE`; `dsec edge` and `dsec apiserver` "
      "(docs/cluster.md) take the same keys. Every key may be left out; an unknown key is "
      "an error with its line. "
      "`--check-config` only checks, `--dump-config` prints what holds. All are read at start.\n\n"
      "| key | default | unit | range | what |\n| --- | --- | --- | --- | --- |\n";
  for (const Key& key : kKeys) {
    if (const Text* text = std::get_if<Text>(&key.member)) {
      out +=
          fmt::format("| `{}` | `\"{}\"` | | | {} |\n", key.name, defaults.*(*text), key.sentence);
    } else if (const Flag* flag = std::get_if<Flag>(&key.member)) {
      out += fmt::format("| `{}` | {} | | | {} |\n", key.name, defaults.*(*flag), key.sentence);
    } else {
      out += fmt::format("| `{}` | {} | {} | {} to {} | {} |\n", key.name,
                         defaults.*std::get<Number>(key.member), key.unit, key.min, key.max,
                         key.sentence);
    }
  }
  return out;
}

}  // namespace dsec::config
