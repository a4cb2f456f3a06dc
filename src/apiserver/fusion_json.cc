// SPDX-License-Identifier: Apache-2.0
#include "apiserver/fusion_json.h"

#include <algorithm>

#include "apiserver/json_members.h"

namespace dsec::apiserver {
namespace {

using http::JsonWriter;
using nlohmann::json;

constexpr double kDefaultSeconds = 10;
constexpr double kMaxSeconds = 3600;
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kCpuPerWall = 64;  // cores
constexpr size_t kMaxTests = 4096;
constexpr int kKilled = -9;  // return code of a program that a limit other than time has ended

void ReadSeconds(Members& members, std::string_view key, uint64_t max_cpu_ms,
                 v1::FnLimits* limits) {
  double seconds = kDefaultSeconds;
  if (const json* value = members.Get(key)) {
    if (!value->is_number()) return members.Fail(key, "must be a number of seconds");
    seconds = value->get<double>();
    if (!(seconds > 0 && seconds <= kMaxSeconds)) {
      return members.Fail(key, fmt::format("must be above 0 and at most {}", kMaxSeconds),
                          "request.out_of_range");
    }
  }
  const auto millis = static_cast<uint64_t>(std::max(1.0, std::round(seconds * 1000)));
  limits->set_wall_ms(millis);
  limits->set_cpu_ms(std::max(millis, std::min(millis * kCpuPerWall, max_cpu_ms)));
}

// What run_code and the config of submit share.
void ReadLimits(Members& members, uint64_t max_cpu_ms, v1::FnCall& call) {
  ReadSeconds(members, "compile_timeout", max_cpu_ms, call.mutable_compile_limits());
  ReadSeconds(members, "run_timeout", max_cpu_ms, call.mutable_limits());
  const json* memory = members.Get("memory_limit_MB");
  if (memory == nullptr) return;
  if (!memory->is_number_integer()) return members.Fail("memory_limit_MB", "must be an integer");
  const auto megabytes = memory->get<int64_t>();  // -1: no bound of the caller's
  if (megabytes > static_cast<int64_t>(kMaxInteger / kMiB))
    return members.Fail("memory_limit_MB", "is too large", "request.out_of_range");
  if (megabytes > 0)
    call.mutable_limits()->set_memory_bytes(static_cast<uint64_t>(megabytes) * kMiB);
}

std::string_view Trimmed(std::string_view line) {
  while (!line.empty() && (line.back() == ' ' || line.back() == '\t' || line.back() == '\r'))
    line.remove_suffix(1);
  return line;
}

std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return Trimmed(line);
}

// The code in a completion: the first fenced block that names the language, else the first one,
// else (with no fence at all) everything.
void Extract(std::string_view completion, std::string_view language, FusionSubmission& out) {
  constexpr std::string_view kFence = "```";
  bool found = false;
  for (size_t at = completion.find(kFence); at != std::string_view::npos;) {
    std::string_view rest = completion.substr(at + kFence.size());
    const std::string_view label = TakeLine(rest);
    const size_t close = rest.find(kFence);
    const bool whole = close != std::string_view::npos;
    const bool named = label == language;
    if (!found || named) {
      out.code = rest.substr(0, close);
      out.taken = whole ? "fenced" : "incomplete_fenced";
      found = true;
    }
    if (named || !whole) return;
    const size_t next =
        static_cast<size_t>(rest.data() - completion.data()) + close + kFence.size();
    at = completion.find(kFence, next);
  }
  if (found) return;
  out.code = completion;
  out.taken = out.code.empty() ? "empty" : "heuristic";
}

Result<FusionTest> ReadTest(const json& object, const std::string& name) {
  if (!object.is_object()) return Bad("request.wrong_type", name, "must be an object");
  FusionTest test;
  Members members(object, name + ".");
  members.Map("input", false, [&](const std::string& key, std::string value) {
    if (key == "stdin") return test.call.set_stdin(std::move(value));
    v1::FnFile* file = test.call.add_files();
    file->set_path(key);
    file->set_content(std::move(value));
  });
  members.Map("output", false, [&](const std::string& key, std::string value) {
    if (key == "stdout") {
      test.has_stdout = true;
      test.stdout = std::move(value);
      return;
    }
    test.call.add_fetch(key);
    test.files.emplace_back(key, std::move(value));
  });
  DSEC_TRY_VOID(members.status());
  if (!test.has_stdout && test.files.empty())
    return Bad("request.missing", name + ".output", "must say what to expect");
  test.info = object.dump(-1, ' ', false, json::error_handler_t::replace);
  return test;
}

std::string_view StatusOf(const v1::FnStep& step) {
  if (step.verdict() == v1::FN_INFRASTRUCTURE) return "Error";
  const bool time =
      step.verdict() == v1::FN_TIME_LIMIT ||
      (step.verdict() == v1::FN_COMPILE_ERROR && (step.limit() == "wall" || step.limit() == "cpu"));
  return time ? "TimeLimitExceeded" : "Finished";
}

int ReturnCode(const v1::FnStep& step) {
  if (step.signal() != 0) return -step.signal();
  if (step.verdict() == v1::FN_OK) return 0;
  return step.exit_code() != 0 ? step.exit_code() : kKilled;
}

void WriteStep(JsonWriter& json, std::string_view key, bool there, const v1::FnStep& step) {
  json.Key(key);
  if (!there) return json.Null();
  const std::string_view status = StatusOf(step);
  json.BeginObject();
  json.Field("status", status);
  json.Field("execution_time", static_cast<double>(step.wall_usec()) / 1e6);
  json.Key("return_code");
  if (status == "Finished") {
    json.Value(ReturnCode(step));
  } else {
    json.Null();
  }
  json.Field("stdout", step.stdout().data());
  json.Field("stderr", step.stderr().data());
  json.EndObject();
}

}  // namespace

Result<v1::FnCall> ReadFusionRun(std::string_view body, uint64_t max_cpu_ms) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::FnCall call;
  Members members(object, "");
  ReadLimits(members, max_cpu_ms, call);
  members.Text("code", call.mutable_code(), true);
  members.Text("language", call.mutable_type(), true);
  members.Text("stdin", call.mutable_stdin());
  if (const json* files = members.Object("files")) {
    for (const auto& [path, content] : files->items()) {
      if (content.is_null()) continue;
      const std::string name = "files." + path;
      if (!content.is_string()) return Bad("request.wrong_type", name, "must be a string");
      auto bytes = http::DecodeBase64(content.get_ref<const std::string&>());
      if (!bytes) return Bad("request.invalid", name, "is not base64");
      v1::FnFile* file = call.add_files();
      file->set_path(path);
      file->set_content(*std::move(bytes));
    }
  }
  members.Strings("fetch_files", false, [&](std::string text) { call.add_fetch(std::move(text)); });
  members.Strings("args", false, [&](std::string text) { call.add_args(std::move(text)); });
  DSEC_TRY_VOID(members.status());
  return call;
}

Result<FusionSubmission> ReadFusionSubmission(std::string_view body, uint64_t max_cpu_ms) {
  DSEC_TRY(const json object, ParseObject(body));
  FusionSubmission out;
  Members members(object, "");
  const json* id = members.Get("id");
  if (id == nullptr || !(id->is_string() || id->is_number_integer()))
    members.Fail("id", "must be a number or a string");
  std::string completion;
  members.Text("completion", &completion, true);
  const json* config = members.Object("config");
  if (config == nullptr) members.Fail("config", "is required", "request.missing");
  DSEC_TRY_VOID(members.status());
  out.id = id->dump(-1, ' ', false, json::error_handler_t::replace);

  Members settings(*config, "config.");
  v1::FnCall common;
  ReadLimits(settings, max_cpu_ms, common);
  settings.Text("language", common.mutable_type(), true);
  std::string kind = "CommonOJDataset";
  settings.Text("dataset_type", &kind);
  const json* data = settings.Get("provided_data");
  const json* extra = settings.Object("extra");
  DSEC_TRY_VOID(settings.status());
  if (extra != nullptr) {
    Members more(*extra, "config.extra.");
    more.Flag("run_all_cases", &out.run_all);
    DSEC_TRY_VOID(more.status());
  }
  if (kind != "CommonOJDataset" || data == nullptr || !data->is_object()) {
    return Error(Code::kNotFound, "fusion.no_dataset",
                 "only CommonOJDataset with config.provided_data of one row is judged here");
  }
  const auto tests = data->find("test");
  if (tests == data->end() || !tests->is_array() || tests->empty() || tests->size() > kMaxTests) {
    return Bad("request.invalid", "config.provided_data.test",
               fmt::format("must be an array of 1 to {} tests", kMaxTests));
  }
  Extract(completion, common.type(), out);
  for (size_t i = 0; i < tests->size(); ++i) {
    DSEC_TRY(FusionTest test,
             ReadTest((*tests)[i], fmt::format("config.provided_data.test[{}]", i)));
    test.call.MergeFrom(common);
    test.call.set_code(out.code);
    out.tests.push_back(std::move(test));
  }
  return out;
}

bool SameText(std::string_view written, std::string_view expected) {
  while (!written.empty() || !expected.empty()) {
    if (TakeLine(written) != TakeLine(expected)) return false;
  }
  return true;
}

void WriteFusionResult(JsonWriter& json, const v1::FnResult& result) {
  const bool infrastructure = result.verdict() == v1::FN_INFRASTRUCTURE;
  json.BeginObject();
  json.Field("status", std::string_view(infrastructure                  ? "SandboxError"
                                        : result.verdict() == v1::FN_OK ? "Success"
                                                                        : "Failed"));
  json.Field("message",
             infrastructure ? fmt::format("{}: {}", result.reason(), result.message()) : "");
  WriteStep(json, "compile_result", result.has_compile(), result.compile());
  WriteStep(json, "run_result", result.has_run(), result.run());
  json.Key("executor_pod_name");
  json.Null();
  json.BeginObject("files");
  for (const v1::FnFile& file : result.files()) {
    json.Key(file.path());
    json.Base64(file.content());
  }
  json.EndObject();
  json.EndObject();
}

std::string FusionRefusal(const Error& error) {
  std::string out;
  JsonWriter json(out);
  json.BeginObject();
  json.BeginArray("detail");
  json.BeginObject();
  json.BeginArray("loc");
  json.Value("body");
  if (!error.field().empty()) json.Value(error.field());
  json.EndArray();
  json.Field("msg", error.message());
  json.Field("type", error.reason());
  json.EndObject();
  json.EndArray();
  json.EndObject();
  return out;
}

}  // namespace dsec::apiserver
