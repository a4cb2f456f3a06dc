// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_out.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "base/utf8.h"

namespace dsec::apiserver {
namespace {

using http::JsonWriter;

struct StateText {
  v1::State state;
  std::string_view text;
};
constexpr std::array kStates = {
    StateText{v1::STATE_PENDING, "pending"},   StateText{v1::STATE_STARTING, "starting"},
    StateText{v1::STATE_RUNNING, "running"},   StateText{v1::STATE_PAUSED, "paused"},
    StateText{v1::STATE_STOPPING, "stopping"}, StateText{v1::STATE_STOPPED, "stopped"},
    StateText{v1::STATE_FAILED, "failed"},     StateText{v1::STATE_LOST, "lost"}};

std::string_view FaultName(v1::FaultClass fault) {
  if (fault == v1::FAULT_WORKLOAD) return "workload";
  if (fault == v1::FAULT_INFRASTRUCTURE) return "infrastructure";
  return "none";
}

std::string_view BackendName(v1::Backend backend) {
  switch (backend) {
    case v1::BACKEND_FNCALL:
      return "fncall";
    case v1::BACKEND_MICROVM:
      return "microvm";
    case v1::BACKEND_FULLVM:
      return "fullvm";
    default:
      return "container";
  }
}

std::string_view KindName(v1::EndKind kind) {
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
    case v1::END_SANDBOX_ENDED:
      return "sandbox_ended";
    default:
      return "killed";
  }
}

template <typename Strings>
void WriteStrings(JsonWriter& json, std::string_view key, const Strings& values) {
  json.BeginArray(key);
  for (const auto& value : values) json.Value(value);
  json.EndArray();
}

// Sorted, so that equal content gives equal text.
template <typename Map>
void WriteMap(JsonWriter& json, std::string_view key, const Map& map) {
  const std::map<std::string, std::string> sorted(map.begin(), map.end());
  json.BeginObject(key);
  for (const auto& [name, value] : sorted) json.Field(name, value);
  json.EndObject();
}

// `key` as strings when all are UTF-8, else `key`_b64.
template <typename Bytes>
void WriteByteStrings(JsonWriter& json, std::string_view key, const Bytes& values) {
  const bool text = std::all_of(values.begin(), values.end(),
                                [](const std::string& value) { return IsUtf8(value); });
  if (text) return WriteStrings(json, key, values);
  json.BeginArray(std::string(key) + "_b64");
  for (const auto& value : values) json.Base64(value);
  json.EndArray();
}

void AppendChunks(std::string& out, std::string_view type,
                  const google::protobuf::RepeatedPtrField<v1::StreamChunk>& chunks) {
  for (const v1::StreamChunk& chunk : chunks) {
    JsonWriter json(out);
    json.BeginObject();
    json.Field("type", type);
    json.Field("offset", chunk.offset());
    json.Base64("data", chunk.data());
    json.Field("skipped", chunk.skipped());
    json.EndObject();
    out += '\n';
  }
}

void WriteTotals(JsonWriter& json, std::string_view key, const v1::StreamState& state) {
  json.BeginObject(key);
  json.Field("total", state.total());
  json.Field("dropped", state.dropped());
  json.EndObject();
}

}  // namespace

std::string_view StateName(v1::State state) {
  for (const StateText& known : kStates) {
    if (known.state == state) return known.text;
  }
  return "pending";
}

Result<v1::State> ParseState(std::string_view text, std::string_view field) {
  for (const StateText& known : kStates) {
    if (known.text == text) return known.state;
  }
  return Error(Code::kInvalidArgument, "request.invalid",
               fmt::format("{}: {} is not a state (pending, starting, running, paused, stopping, "
                           "stopped, failed, lost)",
                           field, text))
      .WithField(std::string(field));
}

std::string ModeText(uint32_t mode) { return fmt::format("0{:03o}", mode & 07777); }

void WriteTermination(JsonWriter& json, const v1::Termination& termination) {
  json.BeginObject();
  json.Field("cause", termination.cause());
  json.Field("fault", FaultName(termination.fault()));
  json.Field("message", termination.message());
  json.Field("who", termination.who());
  json.Field("at_unix_ms", termination.at_unix_ms());
  json.Field("limit", termination.limit());
  json.Field("exit_code", termination.exit_code());
  json.Field("reason", termination.reason());
  json.EndObject();
}

void WriteLimits(JsonWriter& json, const v1::Limits& limits) {
  json.BeginObject();
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

void WriteUsage(JsonWriter& json, const v1::Usage& usage) {
  json.BeginObject();
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

void WriteSandbox(JsonWriter& json, const v1::SandboxRecord& record, int64_t execs_running) {
  const v1::SandboxSpec& spec = record.spec();
  json.BeginObject();
  json.Field("id", record.id());
  json.Field("request_id", record.request_id());
  json.Field("name", spec.name());
  json.Field("project", record.project().empty() ? std::string("root") : record.project());
  json.Field("state", StateName(record.state()));
  json.Field("backend", BackendName(spec.backend()));
  json.Field("base", spec.base());
  json.Field("workspace", spec.workspace());
  WriteStrings(json, "toolkits", spec.toolkits());
  WriteStrings(json, "layer_ids", record.layer_ids());
  if (record.emulated()) json.Field("emulated", true);
  json.Key("limits");
  WriteLimits(json, spec.limits());
  json.BeginObject("network");
  json.Field("mode", spec.network().mode().empty() ? std::string("none") : spec.network().mode());
  json.EndObject();
  json.Field("ttl_ms", spec.ttl_ms());
  json.Field("idle_ms", spec.idle_ms());
  json.BeginObject("ttl_policy");
  json.Field("wait_for_exec", spec.ttl_waits_for_exec());
  json.Field("max_extension_ms", spec.ttl_extension_ms());
  json.EndObject();
  json.Field("record_first_touch", spec.record_first_touch());
  json.Field("created_unix_ms", record.created_unix_ms());
  json.Field("expires_unix_ms", record.expires_unix_ms());
  json.Field("last_activity_unix_ms", record.last_activity_unix_ms());
  json.Field("ended_unix_ms", record.ended_unix_ms());
  WriteMap(json, "labels", spec.labels());
  json.BeginArray("env_keys");
  for (const v1::KeyValue& pair : spec.env()) json.Value(pair.key());
  json.EndArray();
  json.Field("workdir", spec.workdir());
  json.Field("user", spec.user());
  json.Field("hostname", spec.hostname());
  if (!spec.entrypoint().empty()) WriteByteStrings(json, "entrypoint", spec.entrypoint());
  json.BeginArray("phases");
  for (const v1::PhaseTime& phase : record.phases()) {
    json.BeginObject();
    json.Field("phase", phase.phase());
    json.Field("micros", phase.micros());
    json.EndObject();
  }
  json.EndArray();
  if (execs_running >= 0) json.Field("execs_running", execs_running);
  const bool ended = record.state() == v1::STATE_STOPPED || record.state() == v1::STATE_FAILED ||
                     record.state() == v1::STATE_LOST;
  json.Key("termination");
  if (ended && record.has_termination()) {
    WriteTermination(json, record.termination());
  } else {
    json.Null();
  }
  if (!ended && record.has_stop()) {
    json.Key("stopping");
    WriteTermination(json, record.stop());
  }
  if (!record.stuck().empty()) json.Field("stuck", record.stuck());
  if (record.claim_until_unix_ms() != 0)
    json.Field("claim_until_unix_ms", record.claim_until_unix_ms());
  if (ended && record.has_final_usage()) {
    json.Key("usage");
    WriteUsage(json, record.final_usage());
  }
  json.EndObject();
}

void WriteEvent(JsonWriter& json, const v1::Event& event) {
  json.BeginObject();
  json.Field("type", event.type());
  json.Field("sandbox_id", event.sandbox_id());
  json.Field("seq", event.seq());
  json.Field("node_seq", event.node_seq());
  json.Field("at_unix_ms", event.at_unix_ms());
  json.Field("state", StateName(event.state()));
  if (!event.op_id().empty()) json.Field("op_id", event.op_id());
  if (!event.detail().empty()) json.Field("detail", event.detail());
  if (event.has_termination()) {
    json.Key("termination");
    WriteTermination(json, event.termination());
  }
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
  json.Field("psi_memory_some_avg10", node.psi_memory_some_avg10());
  json.Field("psi_cpu_some_avg10", node.psi_cpu_some_avg10());
  json.EndObject();
}

void WriteResult(JsonWriter& json, const v1::ExecResult& result) {
  json.BeginObject();
  json.Field("kind", KindName(result.kind()));
  if (result.kind() == v1::END_EXITED) json.Field("exit_code", result.exit_code());
  if (result.kind() == v1::END_SIGNALED) json.Field("signal", result.signal());
  if (result.kind() == v1::END_SPAWN_ERROR) {
    json.Field("errno", result.sys_errno());
    const char* name = strerrorname_np(result.sys_errno());
    json.Field("errno_name", std::string(name == nullptr ? "" : name));
    json.Field("step", result.spawn_step());
  }
  if (!result.killed_by().empty()) json.Field("killed_by", result.killed_by());
  if (result.kind() == v1::END_TIMEOUT || result.kind() == v1::END_OOM_KILLED)
    json.Field("limit", result.limit());
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

void WriteExecSummary(JsonWriter& json, const v1::ExecSummary& exec) {
  json.BeginObject();
  json.Field("op_id", exec.op_id());
  json.Field("running", exec.running());
  json.Field("pid", exec.pid());
  json.Field("session", exec.session());
  json.Field("on_disconnect", std::string_view(exec.detached() ? "keep" : "kill"));
  json.Field("started_unix_ms", exec.started_unix_ms());
  if (!exec.argv().empty()) WriteByteStrings(json, "argv", exec.argv());
  if (!exec.running() && exec.has_result()) {
    json.Key("result");
    WriteResult(json, exec.result());
  }
  json.EndObject();
}

void WriteFile(JsonWriter& json, const v1::FileInfo& info) {
  json.BeginObject();
  json.Bytes("name", info.name());
  json.Field("type", info.type());
  json.Field("mode", ModeText(info.mode()));
  json.Field("uid", info.uid());
  json.Field("gid", info.gid());
  json.Field("size", info.size());
  json.Field("blocks_bytes", info.blocks_bytes());
  json.Field("mtime_ns", info.mtime_ns());
  if (info.type() == "symlink") json.Bytes("target", info.target());
  json.Field("inode", info.inode());
  json.Field("nlink", info.nlink());
  json.EndObject();
}

void WriteLayer(JsonWriter& json, const LayerView& layer) {
  json.BeginObject();
  json.Field("id", layer.id);
  json.Field("kind", layer.kind);
  WriteStrings(json, "names", layer.names);
  json.Field("meta_bytes", layer.meta_bytes);
  json.Field("blob_bytes", layer.blob_bytes);
  json.Field("entries", layer.entries);
  json.Field("content_bytes", layer.content_bytes);
  json.Field("created_unix_ms", layer.created_unix_ms);
  json.Field("source", layer.source);
  WriteMap(json, "labels", layer.labels);
  if (!layer.lower.empty()) WriteStrings(json, "lower", layer.lower);
  json.EndObject();
}

void AppendStarted(std::string& out, const v1::ExecReply& reply) {
  JsonWriter json(out);
  json.BeginObject();
  json.Field("type", std::string_view("started"));
  json.Field("op_id", reply.op_id());
  json.Field("pid", reply.pid());
  json.Field("known", reply.known());
  json.EndObject();
  out += '\n';
}

void AppendOutput(std::string& out, const v1::ExecReply& reply) {
  AppendChunks(out, "stdout", reply.stdout_chunks());
  AppendChunks(out, "stderr", reply.stderr_chunks());
}

void AppendExit(std::string& out, const v1::ExecReply& reply) {
  JsonWriter json(out);
  json.BeginObject();
  json.Field("type", std::string_view("exit"));
  json.Key("result");
  WriteResult(json, reply.result());
  WriteTotals(json, "stdout", reply.stdout_state());
  WriteTotals(json, "stderr", reply.stderr_state());
  json.EndObject();
  out += '\n';
}

void AppendMore(std::string& out, const v1::ExecReply& reply) {
  JsonWriter json(out);
  json.BeginObject();
  json.Field("type", std::string_view("more"));
  json.Field("stdout_offset", reply.stdout_next());
  json.Field("stderr_offset", reply.stderr_next());
  json.EndObject();
  out += '\n';
}

}  // namespace dsec::apiserver
