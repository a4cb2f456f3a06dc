// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace dsec::config {

// The settings of one node; a value. docs/config.md is generated from the table in node_config.cc,
// which also holds the bounds.
struct NodeConfig {
  std::string node_id = "local";
  std::string listen = "127.0.0.1:7878";
  std::string state_dir = "/var/lib/dsec";
  std::string run_dir = "/run/dsec";
  std::string layers_dir;        // empty: <state_dir>/layers
  std::string layers_cache_dir;  // empty: <state_dir>/layers_cache
  uint64_t layers_cache_bytes = 4ull << 30;
  uint64_t layers_patience_ms = 10'000;
  uint64_t layers_prefetch = 2;
  uint64_t layers_prefetch_bytes_per_s = 128ull << 20;
  bool layers_verify = false;
  std::string layers_url;  // empty: content comes from layers_dir
  std::string layers_url_headers_file;
  std::string layers_url_ca_file;
  std::string layers_data_cache_dir;  // empty: <state_dir>/layers_data
  uint64_t layers_data_cache_bytes = 16ull << 30;
  std::string blobfs_path;   // empty: dsec-blobfs beside this program
  std::string spawner_path;  // empty: dsec-spawner beside this program
  std::string aether_path;   // empty: dsec-aether beside this program
  uint64_t shards = 0;       // 0: one a core, at most 8

  std::string vm_guest_dir;    // empty: share/dsec/guest beside this program, or the source's build
  std::string vm_qemu_path;    // empty: where the system has it
  std::string vm_keeper_path;  // empty: dsec-vmkeeper beside this program
  bool vm_allow_emulation = false;
  uint64_t vm_max = 256;

  uint64_t capacity = 4000;
  uint64_t slot_pool_size = 32;
  uint64_t creates_at_once = 16;
  uint64_t create_queue = 4096;
  uint64_t id_base = 0x70000000;  // sandbox/isolators/ids.h says why
  uint64_t agent_uid_base = 0x7fff0000;
  uint64_t scratch_bytes = 0;  // 0: four fifths of what is free

  uint64_t memory_reserve_bytes = 512ull << 20;
  uint64_t disk_reserve_bytes = 1ull << 30;
  uint64_t psi_memory_max_percent = 60;
  uint64_t psi_cpu_max_percent = 0;

  uint64_t default_memory_bytes = 1ull << 30;
  uint64_t default_cpu_millis = 1000;
  uint64_t default_pids = 1024;
  uint64_t default_disk_bytes = 2ull << 30;
  uint64_t default_disk_inodes = 0;
  uint64_t default_shm_bytes = 64ull << 20;
  uint64_t default_open_files = 16384;
  uint64_t default_output_bytes = 1ull << 20;
  uint64_t default_ttl_ms = 0;
  uint64_t default_idle_ms = 0;
  uint64_t default_exec_timeout_ms = 0;
  uint64_t max_memory_bytes = 4ull << 40;
  uint64_t max_disk_bytes = 16ull << 40;
  uint64_t max_output_bytes = 32ull << 20;

  uint64_t claim_grace_ms = 60'000;
  uint64_t disconnect_grace_ms = 5'000;
  uint64_t reconcile_period_ms = 60'000;
  uint64_t ended_records = 20'000;
  uint64_t ended_age_ms = 24ull * 3600 * 1000;
  uint64_t events_kept = 200'000;
  uint64_t iam_cache_max_ms = 12ull * 3600 * 1000;
  uint64_t audit_records = 100'000;

  std::string fn_types_dir;     // empty: share/dsec/fn_types beside this program, or the source's
  uint64_t fn_workers_max = 0;  // 0: four a core, at least 8
  uint64_t fn_makes_at_once = 4;
  uint64_t fn_queue_max = 4096;
  uint64_t fn_queue_bytes = 1ull << 30;
  uint64_t fn_attempts = 3;
  uint64_t fn_idle_ms = 60'000;
  uint64_t fn_ops_kept = 10'000;
  uint64_t fn_ops_kept_bytes = 256ull << 20;
  uint64_t fn_ops_kept_ms = 600'000;
  uint64_t fn_compile_cache = 10'000;
  uint64_t fn_artifact_bytes = 1ull << 30;
  uint64_t fn_artifact_max_bytes = 64ull << 20;
  uint64_t fn_fetch_bytes = 64ull << 20;
  uint64_t fn_default_wall_ms = 10'000;
  uint64_t fn_default_cpu_ms = 10'000;
  uint64_t fn_default_memory_bytes = 1ull << 30;
  uint64_t fn_default_processes = 128;
  uint64_t fn_default_output_bytes = 1ull << 20;
  uint64_t fn_default_file_bytes = 256ull << 20;
  uint64_t fn_default_disk_bytes = 256ull << 20;
  uint64_t fn_max_wall_ms = 3'600'000;
  uint64_t fn_max_memory_bytes = 4ull << 40;
  uint64_t fn_max_output_bytes = 64ull << 20;
  std::string fn_mig_profiles;
  uint64_t fn_gpu_shared_max = 4;

  // Of a cluster (`dsec edge`, `dsec apiserver`).
  std::string cluster_listen = "127.0.0.1:7979";
  std::string cluster_address;  // empty: cluster_listen
  std::string apiservers;       // HOST:PORT, ...
  std::string join_token;
  std::string node_pool;
  std::string node_labels;  // KEY=VALUE, ...
  std::string etcd;         // http://HOST:PORT, ...; empty: SQLite, in state_dir
  std::string etcd_prefix = "dsec/";
  std::string ca_dir = "/etc/dsec/ca";

  std::string log_level = "info";
  std::string log_format = "text";
};

// The items of a list in one key, between commas, without blanks around them; empty ones are none.
std::vector<std::string> SplitList(const std::string& text);

// Reads a TOML file over the defaults. kInvalidArgument "config.<rule>" names file, line, column,
// key and rule; an unknown key is an error.
Result<NodeConfig> LoadNodeConfig(const std::string& path);
// The same from text; `name` stands for the file in messages.
Result<NodeConfig> ParseNodeConfig(const std::string& text, const std::string& name);
// Checks what holds between keys and each key's bounds; called by the two above.
Result<void> CheckNodeConfig(const NodeConfig& config);
// The effective settings as TOML, in the order of the table.
std::string DumpNodeConfig(const NodeConfig& config);
// docs/config.md.
std::string NodeConfigReference();

}  // namespace dsec::config
