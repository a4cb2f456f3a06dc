// SPDX-License-Identifier: Apache-2.0
#include "apiserver/fn_json.h"
#include "apiserver/json_out.h"
#include "base/utf8.h"

namespace dsec::apiserver {
namespace {

using http::JsonWriter;

template <typename Strings>
void WriteStrings(JsonWriter& json, std::string_view key, const Strings& values) {
  json.BeginArray(key);
  for (const auto& value : values) json.Value(value);
  json.EndArray();
}

void WriteOutput(JsonWriter& json, std::string_view key, const v1::FnOutput& output) {
  json.BeginObject(key);
  json.Bytes("data", output.data());
  json.Field("total", output.total());
  json.EndObject();
}

void WriteStep(JsonWriter& json, std::string_view key, const v1::FnStep& step) {
  json.BeginObject(key);
  json.Field("verdict", FnVerdictName(step.verdict()));
  const bool exited = step.verdict() == v1::FN_OK || step.verdict() == v1::FN_WRONG_EXIT ||
                      step.verdict() == v1::FN_COMPILE_ERROR;
  if (step.signal() != 0) {
    json.Field("signal", step.signal());
  } else if (exited && step.limit().empty()) {
    json.Field("exit_code", step.exit_code());
  }
  if (!step.limit().empty()) json.Field("limit", step.limit());
  WriteOutput(json, "stdout", step.stdout());
  WriteOutput(json, "stderr", step.stderr());
  json.Field("wall_usec", step.wall_usec());
  json.Field("cpu_usec", step.cpu_usec());
  json.Field("memory_peak_bytes", step.memory_peak_bytes());
  if (step.cached()) json.Field("cached", true);
  json.EndObject();
}

void WriteLimits(JsonWriter& json, const v1::FnLimits& limits) {
  const std::pair<const char*, uint64_t> fields[] = {
      {"wall_ms", limits.wall_ms()},           {"cpu_ms", limits.cpu_ms()},
      {"memory_bytes", limits.memory_bytes()}, {"processes", limits.processes()},
      {"output_bytes", limits.output_bytes()}, {"file_bytes", limits.file_bytes()},
      {"disk_bytes", limits.disk_bytes()},     {"disk_inodes", limits.disk_inodes()}};
  json.BeginObject("limits");
  for (const auto& [key, value] : fields) {
    if (value != 0) json.Field(key, value);
  }
  json.EndObject();
}

void WriteEnv(JsonWriter& json, const google::protobuf::RepeatedPtrField<v1::KeyValue>& env) {
  for (const bool text : {true, false}) {
    bool open = false;
    for (const v1::KeyValue& pair : env) {
      if (IsUtf8(pair.value()) != text) continue;
      if (!open) json.BeginObject(text ? "env" : "env_b64");
      open = true;
      json.Key(pair.key());
      if (text) {
        json.Value(pair.value());
      } else {
        json.Base64(pair.value());
      }
    }
    if (open) json.EndObject();
  }
}

void WriteCommand(JsonWriter& json, std::string_view key, const v1::FnCommand& command) {
  json.BeginObject(key);
  WriteStrings(json, "argv", command.argv());
  WriteEnv(json, command.env());
  WriteLimits(json, command.limits());
  if (!command.artifacts().empty()) WriteStrings(json, "artifacts", command.artifacts());
  json.EndObject();
}

void WriteEnvironment(JsonWriter& json, const v1::FnEnvironment& environment) {
  json.BeginObject("environment");
  json.Field("base", environment.base());
  if (!environment.workspace().empty()) json.Field("workspace", environment.workspace());
  if (!environment.toolkits().empty()) WriteStrings(json, "toolkits", environment.toolkits());
  json.EndObject();
}

}  // namespace

std::string_view FnVerdictName(v1::FnVerdict verdict) {
  switch (verdict) {
    case v1::FN_OK:
      return "OK";
    case v1::FN_COMPILE_ERROR:
      return "COMPILE_ERROR";
    case v1::FN_WRONG_EXIT:
      return "WRONG_EXIT";
    case v1::FN_SIGNALED:
      return "SIGNALED";
    case v1::FN_TIME_LIMIT:
      return "TIME_LIMIT";
    case v1::FN_MEMORY_LIMIT:
      return "MEMORY_LIMIT";
    case v1::FN_OUTPUT_LIMIT:
      return "OUTPUT_LIMIT";
    case v1::FN_PROCESS_LIMIT:
      return "PROCESS_LIMIT";
    default:
      return "INFRASTRUCTURE";
  }
}

void WriteFnResult(JsonWriter& json, const v1::FnResult& result) {
  json.BeginObject();
  json.Field("op_id", result.op_id());
  json.Field("verdict", FnVerdictName(result.verdict()));
  if (result.has_compile()) WriteStep(json, "compile", result.compile());
  if (result.has_run()) WriteStep(json, "run", result.run());
  json.BeginArray("files");
  for (const v1::FnFile& file : result.files()) {
    json.BeginObject();
    json.Field("path", file.path());
    if (file.artifact().empty()) {
      json.Bytes("content", file.content());
    } else {
      json.Field("artifact", file.artifact());
    }
    json.Field("mode", ModeText(file.mode()));
    json.EndObject();
  }
  json.EndArray();
  WriteStrings(json, "missing", result.missing());
  json.Field("queue_usec", result.queue_usec());
  json.Field("attempts", result.attempts());
  json.Field("existed", result.existed());
  if (result.verdict() == v1::FN_INFRASTRUCTURE) {
    json.Field("message", result.message());
    json.Field("reason", result.reason());
    json.Field("retriable", result.retriable());
  }
  json.EndObject();
}

void WriteFnTaskType(JsonWriter& json, const v1::FnTaskType& type) {
  json.BeginObject();
  json.Field("name", type.name());
  WriteStrings(json, "aliases", type.aliases());
  json.Field("description", type.description());
  WriteEnvironment(json, type.environment());
  json.Field("source", type.source());
  if (!type.compile().argv().empty()) WriteCommand(json, "compile", type.compile());
  WriteCommand(json, "run", type.run());
  json.BeginObject("pool");
  json.Field("min", type.pool().min());
  json.Field("max", type.pool().max());
  json.Field("idle_ms", type.pool().idle_ms());
  json.EndObject();
  if (!type.warm().kind().empty()) {
    json.BeginObject("warm");
    json.Field("kind", type.warm().kind());
    WriteStrings(json, "argv", type.warm().argv());
    WriteStrings(json, "imports", type.warm().imports());
    json.EndObject();
  }
  json.EndObject();
}

void WriteFnPool(JsonWriter& json, const v1::FnPoolInfo& pool) {
  json.BeginObject();
  json.Field("key", pool.key());
  WriteEnvironment(json, pool.environment());
  json.Field("warm", pool.warm());
  json.Field("workers", pool.workers());
  json.Field("idle", pool.idle());
  json.Field("queued", pool.queued());
  json.Field("min", pool.min());
  json.Field("max", pool.max());
  json.Field("calls", pool.calls());
  json.Field("replaced", pool.replaced());
  json.EndObject();
}

}  // namespace dsec::apiserver
