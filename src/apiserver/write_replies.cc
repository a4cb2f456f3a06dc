// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>

#include "apiserver/convert.h"
#include "base/utf8.h"
#include "model/lifecycle.h"

namespace dsec::apiserver {
namespace {

using http::JsonWriter;

// `key` when all items are UTF-8, else `key`_b64.
void WriteBytesList(JsonWriter& json, std::string_view key,
                    const google::protobuf::RepeatedPtrField<std::string>& items) {
  const bool text =
      std::all_of(items.begin(), items.end(), [](const std::string& item) { return IsUtf8(item); });
  json.BeginArray(text ? std::string(key) : std::string(key) + "_b64");
  for (const std::string& item : items) {
    if (text) {
      json.Value(item);
    } else {
      json.Base64(item);
    }
  }
  json.EndArray();
}

void WriteStrings(JsonWriter& json, std::string_view key,
                  const google::protobuf::RepeatedPtrField<std::string>& items) {
  json.BeginArray(key);
  for (const std::string& item : items) json.Value(item);
  json.EndArray();
}

void WriteUsage(JsonWriter& json, const v1::Usage& usage) {
  json.BeginObject("usage");
  json.Field("cpu_usec", usage.cpu_usec());
  json.Field("throttled_usec", usage.throttled_usec());
  json.Field("memory_bytes", usage.memory_bytes());
  json.Field("memory_peak_bytes", usage.memory_peak_bytes());
  json.Field("pids", usage.pids());
  json.Field("disk_bytes", usage.disk_bytes());
  json.Field("disk_inodes", usage.disk_inodes());
  json.Field("oom_kills", usage.oom_kills());
  json.Field("pids_denied", usage.pids_denied());
  json.Field("output_dropped_bytes", usage.output_dropped_bytes());
  json.EndObject();
}

void WriteLimits(JsonWriter& json, const v1::Limits& limits) {
  json.BeginObject("limits");
  json.Field("memory_bytes", limits.memory_bytes());
  json.Field("cpu_millis", limits.cpu_millis());
  json.Field("pids", limits.pids());
  json.Field("disk_bytes", limits.disk_bytes());
  json.Field("disk_inodes", limits.disk_inodes());
  json.Field("shm_bytes", limits.shm_bytes());
  json.Field("open_files", limits.open_files());
  json.Field("output_bytes", limits.output_bytes());
  json.EndObject();
}

// In the order of their keys: protobuf's maps have none.
void WriteLabels(JsonWriter& json, const google::protobuf::Map<std::string, std::string>& labels) {
  json.BeginObject("labels");
  for (const auto& [key, value] :
       std::map<std::string, std::string>(labels.begin(), labels.end())) {
    json.Field(key, value);
  }
  json.EndObject();
}

void WriteSpec(JsonWriter& json, const v1::SandboxSpec& spec) {
  json.Field("name", spec.name());
  json.Field("backend", model::BackendName(spec.backend()));
  json.Field("base", spec.base());
  json.Field("workspace", spec.workspace());
  WriteStrings(json, "toolkits", spec.toolkits());
  WriteLimits(json, spec.limits());
  json.BeginObject("network");
  json.Field("mode", spec.network().mode());
  json.EndObject();
  json.Field("ttl_ms", spec.ttl_ms());
  json.Field("idle_ms", spec.idle_ms());
  json.BeginObject("ttl_policy");
  json.Field("wait_for_exec", spec.ttl_waits_for_exec());
  json.Field("max_extension_ms", spec.ttl_extension_ms());
  json.EndObject();
  WriteLabels(json, spec.labels());
  json.BeginArray("env_keys");
  for (const v1::KeyValue& item : spec.env()) json.Value(item.key());
  json.EndArray();
  json.Field("workdir", spec.workdir());
  json.Field("user", spec.user());
  json.Field("hostname", spec.hostname());
  if (!spec.entrypoint().empty()) WriteBytesList(json, "entrypoint", spec.entrypoint());
}

std::string_view EndKindName(v1::EndKind kind) {
  switch (kind) {
    case v1::END_EXITED:
      return "exited";
    case v1::END_SIGNALED:
      return "signaled";
    case v1::END_TIMEOUT:
      return "timeout";
    case v1::END_OOM_KILLED:
      return "oom_killed";
    case v1::END_SPAWN_ERROR:
      return "spawn_error";
    case v1::END_KILLED:
      return "killed";
    default:
      // What an agent says that we do not know is no verdict on the command.
      return "sandbox_ended";
  }
}

// NaN and infinity have no JSON form; a node that reports them has measured nothing.
double Finite(double value) { return std::isfinite(value) ? value : 0; }

}  // namespace

std::string FormatMode(uint32_t mode) { return fmt::format("0{:03o}", mode & 07777); }

void WriteTermination(JsonWriter& json, const v1::Termination& termination) {
  json.BeginObject();
  json.Field("cause", termination.cause());
  json.Field("fault", model::FaultName(termination.fault()));
  json.Field("message", termination.message());
  json.Field("who", termination.who());
  json.Field("at_unix_ms", termination.at_unix_ms());
  json.Field("limit", termination.limit());
  json.Field("exit_code", termination.exit_code());
  json.Field("reason", termination.reason());
  json.EndObject();
}

void WriteSandbox(JsonWriter& json, const v1::SandboxRecord& record,
                  std::optional<uint64_t> execs_running) {
  json.BeginObject();
  json.Field("id", record.id());
  json.Field("request_id", record.request_id());
  json.Field("state", model::StateName(record.state()));
  WriteSpec(json, record.spec());
  WriteStrings(json, "layer_ids", record.layer_ids());
  json.Field("created_unix_ms", record.created_unix_ms());
  json.Field("expires_unix_ms", record.expires_unix_ms());
  json.Field("last_activity_unix_ms", record.last_activity_unix_ms());
  json.Field("ended_unix_ms", record.ended_unix_ms());
  json.BeginArray("phases");
  for (const v1::PhaseTime& phase : record.phases()) {
    json.BeginObject();
    json.Field("phase", phase.phase());
    json.Field("micros", phase.micros());
    json.EndObject();
  }
  json.EndArray();
  if (execs_running) json.Field("execs_running", *execs_running);
  json.Key("termination");
  if (record.has_termination()) {
    WriteTermination(json, record.termination());
  } else {
    json.Null();
  }
  if (record.has_stop()) {
    json.Key("stopping");
    WriteTermination(json, record.stop());
  }
  if (!record.stuck().empty()) json.Field("stuck", record.stuck());
  if (record.claim_until_unix_ms() != 0)
    json.Field("claim_until_unix_ms", record.claim_until_unix_ms());
  if (record.has_final_usage()) WriteUsage(json, record.final_usage());
  json.EndObject();
}

void WriteStats(JsonWriter& json, const v1::SandboxRecord& record, const v1::Usage& usage) {
  json.BeginObject();
  json.Field("id", record.id());
  json.Field("state", model::StateName(record.state()));
  WriteUsage(json, usage);
  WriteLimits(json, record.spec().limits());
  json.EndObject();
}

void WriteEvent(JsonWriter& json, const v1::Event& event) {
  json.BeginObject();
  json.Field("type", event.type());
  json.Field("sandbox_id", event.sandbox_id());
  json.Field("seq", event.seq());
  json.Field("node_seq", event.node_seq());
  json.Field("at_unix_ms", event.at_unix_ms());
  json.Field("state", model::StateName(event.state()));
  if (!event.op_id().empty()) json.Field("op_id", event.op_id());
  if (!event.detail().empty()) json.Field("detail", event.detail());
  if (event.has_termination()) {
    json.Key("termination");
    WriteTermination(json, event.termination());
  }
  json.EndObject();
}

void WriteExecResult(JsonWriter& json, const v1::ExecResult& result) {
  json.BeginObject();
  json.Field("kind", EndKindName(result.kind()));
  switch (result.kind()) {
    case v1::END_EXITED:
      json.Field("exit_code", result.exit_code());
      break;
    case v1::END_SIGNALED:
      json.Field("signal", result.signal());
      break;
    case v1::END_SPAWN_ERROR:
      json.Field("errno", result.sys_errno());
      if (const char* name = strerrorname_np(result.sys_errno()); name != nullptr)
        json.Field("errno_name", name);
      json.Field("step", result.spawn_step());
      break;
    case v1::END_TIMEOUT:
    case v1::END_OOM_KILLED:
      json.Field("limit", result.limit());
      break;
    default:
      json.Field("killed_by", result.killed_by());
      break;
  }
  json.Field("wall_usec", result.wall_usec());
  json.Field("user_usec", result.user_usec());
  json.Field("system_usec", result.system_usec());
  json.Field("throttled_usec", result.throttled_usec());
  json.Field("peak_memory_bytes", result.peak_memory_bytes());
  json.Field("oom_events", result.oom_events());
  if (!result.oom_victim().empty()) json.Field("oom_victim", result.oom_victim());
  json.Field("pids_limit_hit", result.pids_limit_hit());
  json.Field("left_processes", result.left_processes());
  json.Field("started_unix_ms", result.started_unix_ms());
  json.Field("ended_unix_ms", result.ended_unix_ms());
  if (!result.message().empty()) json.Field("message", result.message());
  json.EndObject();
}

void WriteExecStatus(JsonWriter& json, const v1::ExecSummary& summary) {
  json.BeginObject();
  json.Field("op_id", summary.op_id());
  json.Field("running", summary.running());
  json.Field("pid", summary.pid());
  json.Field("session", summary.session());
  json.Field("on_disconnect", summary.detached() ? "keep" : "kill");
  json.Field("started_unix_ms", summary.started_unix_ms());
  if (!summary.argv().empty()) WriteBytesList(json, "argv", summary.argv());
  if (!summary.running()) {
    json.Key("result");
    WriteExecResult(json, summary.result());
  }
  json.EndObject();
}

void WriteStreamTotals(JsonWriter& json, const v1::StreamState& state) {
  json.BeginObject();
  json.Field("total", state.total());
  json.Field("dropped", state.dropped());
  json.EndObject();
}

void WriteSession(JsonWriter& json, const v1::SessionInfo& session) {
  json.BeginObject();
  json.Field("name", session.name());
  json.Field("started_unix_ms", session.started_unix_ms());
  json.Field("execs", session.execs());
  json.Field("busy", session.busy());
  json.EndObject();
}

void WriteFileStat(JsonWriter& json, const v1::FileInfo& info) {
  json.BeginObject();
  json.Bytes("name", info.name());
  json.Field("type", info.type());
  json.Field("mode", FormatMode(info.mode()));
  json.Field("uid", info.uid());
  json.Field("gid", info.gid());
  json.Field("size", info.size());
  json.Field("blocks_bytes", info.blocks_bytes());
  json.Field("mtime_ns", info.mtime_ns());
  if (!info.target().empty()) json.Bytes("target", info.target());
  json.Field("inode", info.inode());
  json.Field("nlink", info.nlink());
  json.EndObject();
}

void WriteNode(JsonWriter& json, const v1::NodeInfo& node) {
  json.BeginObject();
  json.Field("node_id", node.node_id());
  json.Field("version", node.version());
  json.BeginArray("capabilities");
  for (const v1::Capability& capability : node.capabilities()) {
    json.BeginObject();
    json.Field("name", capability.name());
    json.Field("used", capability.used());
    json.Field("ok", capability.ok());
    json.Field("detail", capability.detail());
    json.EndObject();
  }
  json.EndArray();
  json.Field("live", node.live());
  json.Field("capacity", node.capacity());
  json.Field("cpus", node.cpus());
  json.Field("memory_total_bytes", node.memory_total_bytes());
  json.Field("memory_available_bytes", node.memory_available_bytes());
  json.Field("scratch_free_bytes", node.scratch_free_bytes());
  json.Field("psi_memory_some_avg10", Finite(node.psi_memory_some_avg10()));
  json.Field("psi_cpu_some_avg10", Finite(node.psi_cpu_some_avg10()));
  json.EndObject();
}

void WriteLayer(JsonWriter& json, const LayerView& layer) {
  json.BeginObject();
  json.Field("id", layer.id);
  json.Field("kind", layer.kind);
  json.BeginArray("names");
  for (const std::string& name : layer.names) json.Value(name);
  json.EndArray();
  json.Field("meta_bytes", layer.meta_bytes);
  json.Field("blob_bytes", layer.blob_bytes);
  json.Field("entries", layer.entries);
  json.Field("content_bytes", layer.content_bytes);
  json.Field("created_unix_ms", layer.created_unix_ms);
  json.Field("source", layer.source);
  json.BeginObject("labels");
  for (const auto& [key, value] : layer.labels) json.Field(key, value);
  json.EndObject();
  json.EndObject();
}

}  // namespace dsec::apiserver
