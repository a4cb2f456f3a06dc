// SPDX-License-Identifier: Apache-2.0
#include "apiserver/fn_json.h"
#include "apiserver/json_out.h"

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
  // How a program ended that the platform has ended says nothing.
  const bool by_itself =
      step.verdict() == v1::FN_OK || step.verdict() == v1::FN_WRONG_EXIT ||
      step.verdict() == v1::FN_SIGNALED ||
      (step.verdict() == v1::FN_COMPILE_ERROR &&
       (step.limit().empty() || step.limit() == "disk" || step.limit() == "file"));
  if (by_itself && step.signal() != 0) json.Field("signal", step.signal());
  if (by_itself && step.signal() == 0) json.Field("exit_code", step.exit_code());
  if (!step.limit().empty()) json.Field("limit", step.limit());
  WriteOutput(json, "stdout", step.stdout());
  WriteOutput(json, "stderr", step.stderr());
  json.Field("wall_usec", step.wall_usec());
  json.Field("cpu_usec", step.cpu_usec());
  json.Field("memory_peak_bytes", step.memory_peak_bytes());
  if (step.cached()) json.Field("cached", true);
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
