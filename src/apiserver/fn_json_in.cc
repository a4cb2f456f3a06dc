// SPDX-License-Identifier: Apache-2.0
#include "apiserver/fn_json.h"
#include "apiserver/json_in.h"
#include "apiserver/json_members.h"
#include "base/id.h"

namespace dsec::apiserver {
namespace {

using nlohmann::json;

void ReadFnLimits(Members& members, std::string_view key, v1::FnLimits* limits) {
  const json* object = members.Object(key);
  if (object == nullptr) return;
  Members inner(*object, members.Name(key) + ".");
  static constexpr std::pair<const char*, void (v1::FnLimits::*)(uint64_t)> kFields[] = {
      {"wall_ms", &v1::FnLimits::set_wall_ms},
      {"cpu_ms", &v1::FnLimits::set_cpu_ms},
      {"memory_bytes", &v1::FnLimits::set_memory_bytes},
      {"processes", &v1::FnLimits::set_processes},
      {"output_bytes", &v1::FnLimits::set_output_bytes},
      {"file_bytes", &v1::FnLimits::set_file_bytes},
      {"disk_bytes", &v1::FnLimits::set_disk_bytes},
      {"disk_inodes", &v1::FnLimits::set_disk_inodes}};
  for (const auto& [name, set] : kFields) {
    uint64_t value = 0;
    if (inner.Number(name, &value)) (limits->*set)(value);
  }
  members.Take(inner.Finish());
}

void ReadEnvironment(Members& members, v1::FnEnvironment* environment) {
  const json* object = members.Object("environment");
  if (object == nullptr) return;
  Members inner(*object, members.Name("environment."));
  inner.Text("base", environment->mutable_base(), true);
  inner.Text("workspace", environment->mutable_workspace());
  inner.Strings("toolkits", false,
                [&](std::string text) { environment->add_toolkits(std::move(text)); });
  members.Take(inner.Finish());
}

uint32_t ReadCount(Members& members, std::string_view key) {
  uint64_t number = 0;
  members.Number(key, &number, 0, UINT32_MAX);
  return static_cast<uint32_t>(number);
}

bool ReadFlag(Members& members, std::string_view key) {
  bool flag = false;
  members.Flag(key, &flag);
  return flag;
}

void ReadFile(Members& members, v1::FnFile& file) {
  members.Text("path", file.mutable_path(), true);
  const bool content = members.Bytes("content", file.mutable_content());
  const bool artifact = members.Text("artifact", file.mutable_artifact());
  if (content && artifact)
    members.Fail("artifact", "is there beside content", "request.contradiction");
  if (!content && !artifact)
    members.Fail("content", "give either content or artifact", "request.missing");
  std::string mode;
  if (members.Text("mode", &mode)) {
    auto parsed = ParseMode(mode, members.Name("mode"));
    if (parsed.ok()) {
      file.set_mode(*parsed);
    } else {
      members.Take(std::move(parsed).error());
    }
  }
}

// The items of an array of objects, each with its own Members.
template <typename Read>
void ReadObjects(Members& members, std::string_view key, const Read& read) {
  const json* array = members.Get(key);
  if (array == nullptr) return;
  if (!array->is_array()) return members.Fail(key, "must be an array of objects");
  for (size_t i = 0; i < array->size(); ++i) {
    const std::string name = fmt::format("{}[{}]", key, i);
    if (!(*array)[i].is_object()) return members.Fail(name, "must be an object");
    Members inner((*array)[i], members.Name(name) + ".");
    read(inner);
    members.Take(inner.Finish());
  }
}

v1::FnCall ReadCall(Members& members) {
  v1::FnCall call;
  if (members.Text("op_id", call.mutable_op_id())) {
    auto id = ParseOpId(call.op_id(), members.Name("op_id"));
    if (!id.ok()) members.Take(std::move(id).error());
  }
  members.Text("type", call.mutable_type(), true);
  members.Bytes("code", call.mutable_code());
  ReadObjects(members, "files", [&](Members& file) { ReadFile(file, *call.add_files()); });
  members.Bytes("stdin", call.mutable_stdin());
  members.Strings("args", false, [&](std::string text) { call.add_args(std::move(text)); });
  ReadFnLimits(members, "limits", call.mutable_limits());
  ReadFnLimits(members, "compile_limits", call.mutable_compile_limits());
  members.Strings("fetch", false, [&](std::string text) { call.add_fetch(std::move(text)); });
  call.set_keep_artifacts(ReadFlag(members, "keep_artifacts"));
  call.set_compile_only(ReadFlag(members, "compile_only"));
  v1::FnEnvironment environment;
  ReadEnvironment(members, &environment);
  if (!environment.base().empty()) *call.mutable_environment() = std::move(environment);
  if (const json* object = members.Object("gpu")) {
    Members gpu(*object, members.Name("gpu."));
    call.mutable_gpu()->set_count(ReadCount(gpu, "count"));
    gpu.Text("kind", call.mutable_gpu()->mutable_kind());
    call.mutable_gpu()->set_shared(ReadFlag(gpu, "shared"));
    members.Take(gpu.Finish());
  }
  ReadEnv(members, call.mutable_env());
  return call;
}

}  // namespace

Result<v1::FnCall> ReadFnCall(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  v1::FnCall call = ReadCall(members);
  DSEC_TRY_VOID(members.Finish());
  return call;
}

Result<FnCallsBody> ReadFnCalls(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  FnCallsBody out;
  Members members(object, "");
  const json* array = members.Get("calls");
  if (array == nullptr) members.Fail("calls", "is required", "request.missing");
  if (array != nullptr && array->is_array() && (array->empty() || array->size() > kMaxFnCalls)) {
    members.Fail("calls", fmt::format("must have from 1 to {} items", kMaxFnCalls),
                 "request.out_of_range");
  } else {
    ReadObjects(members, "calls", [&](Members& call) { out.calls.push_back(ReadCall(call)); });
  }
  members.Number("concurrency", &out.concurrency, 1, kMaxFnConcurrency);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

}  // namespace dsec::apiserver
