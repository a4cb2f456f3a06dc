// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <utility>

#include "apiserver/convert.h"
#include "apiserver/json_reader.h"
#include "model/lifecycle.h"

namespace dsec::apiserver {
namespace {

constexpr uint64_t kMaxRequestId = 128;
constexpr uint64_t kMaxBatchId = 120;  // room for ".4095"

void ReadLimits(JsonObject& in, v1::Limits& limits) {
  limits.set_memory_bytes(in.Uint("memory_bytes"));
  limits.set_cpu_millis(in.Uint("cpu_millis"));
  limits.set_pids(in.Uint("pids"));
  limits.set_disk_bytes(in.Uint("disk_bytes"));
  limits.set_disk_inodes(in.Uint("disk_inodes"));
  limits.set_shm_bytes(in.Uint("shm_bytes"));
  limits.set_open_files(in.Uint("open_files"));
  limits.set_output_bytes(in.Uint("output_bytes"));
}

void ReadSpec(JsonObject& in, v1::SandboxSpec& spec) {
  spec.set_base(in.RequiredString("base"));
  spec.set_workspace(in.String("workspace"));
  for (std::string& toolkit : in.Strings("toolkits")) spec.add_toolkits(std::move(toolkit));
  if (in.Has("backend")) {
    const auto backend = model::ParseBackend(in.String("backend"));
    if (!backend)
      in.Fail("backend", "request.invalid", "must be container, fncall, microvm or fullvm");
    spec.set_backend(backend.value_or(v1::BACKEND_UNSPECIFIED));
  }
  if (auto limits = in.Object("limits")) {
    ReadLimits(*limits, *spec.mutable_limits());
    (void)limits->Finish();  // told by the outer Finish
  }
  if (auto network = in.Object("network")) {
    spec.mutable_network()->set_mode(network->RequiredString("mode"));
    (void)network->Finish();
  }
  spec.set_ttl_ms(in.Uint("ttl_ms"));
  spec.set_idle_ms(in.Uint("idle_ms"));
  if (auto policy = in.Object("ttl_policy")) {
    spec.set_ttl_waits_for_exec(policy->Bool("wait_for_exec", false));
    spec.set_ttl_extension_ms(policy->Uint("max_extension_ms"));
    (void)policy->Finish();
  }
  in.BytesMap("env", spec.mutable_env());
  spec.set_workdir(in.String("workdir"));
  spec.set_user(in.String("user"));
  spec.set_hostname(in.String("hostname"));
  for (auto& [key, value] : in.StringMap("labels")) (*spec.mutable_labels())[key] = value;
  spec.set_name(in.String("name"));
  for (std::string& item : in.BytesList("entrypoint").value_or(std::vector<std::string>())) {
    spec.add_entrypoint(std::move(item));
  }
}

void ReadRequestId(JsonObject& in, uint64_t max, std::string& out) {
  out = in.RequiredString("request_id");
  if (out.empty() || out.size() > max) {
    in.Fail("request_id", "request.out_of_range", fmt::format("must have 1 to {} bytes", max));
  }
}

// What a create and the template of a batch have in common.
void ReadTemplate(JsonObject& in, CreateCall& call, bool wait_for_room) {
  ReadSpec(in, *call.request.mutable_spec());
  call.timeout = std::chrono::milliseconds(
      in.Uint("timeout_ms", static_cast<uint64_t>(kDefaultTimeout.count()), 1, kMaxTimeoutMs));
  const auto timeout = static_cast<uint64_t>(call.timeout.count());
  const uint64_t wait = in.Uint("capacity_wait_ms", wait_for_room ? timeout : 0, 0, kMaxTimeoutMs);
  call.request.set_capacity_wait_ms(std::min(wait, timeout));
}

// Names as kill(1) takes them.
std::optional<int> SignalNumber(std::string_view name) {
  static constexpr std::pair<std::string_view, int> kNames[] = {
      {"HUP", SIGHUP},       {"INT", SIGINT},   {"QUIT", SIGQUIT},   {"ILL", SIGILL},
      {"TRAP", SIGTRAP},     {"ABRT", SIGABRT}, {"BUS", SIGBUS},     {"FPE", SIGFPE},
      {"KILL", SIGKILL},     {"USR1", SIGUSR1}, {"SEGV", SIGSEGV},   {"USR2", SIGUSR2},
      {"PIPE", SIGPIPE},     {"ALRM", SIGALRM}, {"TERM", SIGTERM},   {"CHLD", SIGCHLD},
      {"CONT", SIGCONT},     {"STOP", SIGSTOP}, {"TSTP", SIGTSTP},   {"TTIN", SIGTTIN},
      {"TTOU", SIGTTOU},     {"URG", SIGURG},   {"XCPU", SIGXCPU},   {"XFSZ", SIGXFSZ},
      {"VTALRM", SIGVTALRM}, {"PROF", SIGPROF}, {"WINCH", SIGWINCH}, {"IO", SIGIO},
      {"PWR", SIGPWR},       {"SYS", SIGSYS},
  };
  if (name.starts_with("SIG")) name.remove_prefix(3);
  for (const auto& [known, number] : kNames) {
    if (known == name) return number;
  }
  return std::nullopt;
}

void ReadSize(JsonObject& in, v1::Tty& tty) {
  constexpr uint64_t kMax = 65535;
  for (const char* key : {"rows", "cols"}) {
    if (!in.Has(key)) in.Fail(key, "request.missing", "is required");
  }
  tty.set_rows(static_cast<uint32_t>(in.Uint("rows", 1, 1, kMax)));
  tty.set_cols(static_cast<uint32_t>(in.Uint("cols", 1, 1, kMax)));
}

}  // namespace

Result<CreateCall> ReadCreate(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  CreateCall call;
  ReadRequestId(in, kMaxRequestId, *call.request.mutable_request_id());
  ReadTemplate(in, call, /*wait_for_room=*/false);
  DSEC_TRY_VOID(in.Finish());
  return call;
}

Result<BatchCall> ReadBatch(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  BatchCall call;
  ReadRequestId(in, kMaxBatchId, call.request_id);
  if (!in.Has("count")) in.Fail("count", "request.missing", "is required");
  call.count = in.Uint("count", 0, 1, kMaxBatch);
  auto sandbox = in.Object("sandbox");
  if (sandbox) {
    ReadTemplate(*sandbox, call.item, /*wait_for_room=*/true);
    (void)sandbox->Finish();
  } else {
    in.Fail("sandbox", "request.missing", "is required");
  }
  if (call.count > 1 && !call.item.request.spec().name().empty()) {
    in.Fail("sandbox.name", "request.contradiction", "a name is unique, count is above 1");
  }
  DSEC_TRY_VOID(in.Finish());
  return call;
}

Result<DeleteManyCall> ReadDeleteMany(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  DeleteManyCall call;
  call.ids = in.Strings("ids");
  call.labels = in.StringMap("labels");
  call.grace_ms = in.Uint("grace_ms", 0, 0, kMaxGraceMs);
  if (in.Has("ids") && in.Has("labels")) {
    in.Fail("labels", "request.contradiction", "give ids or labels, not both");
  } else if (call.ids.empty() && call.labels.empty()) {
    in.Fail("ids", "request.missing", "ids or labels must name what to end, and not be empty");
  } else if (call.ids.size() > kMaxDeletes) {
    in.Fail("ids", "request.out_of_range",
            fmt::format("{} ids, at most {}", call.ids.size(), kMaxDeletes));
  }
  DSEC_TRY_VOID(in.Finish());
  return call;
}

Result<v1::RenewRequest> ReadRenew(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::RenewRequest request;
  if (const auto ttl = in.OptionalUint("ttl_ms")) request.set_ttl_ms(*ttl);
  if (const auto idle = in.OptionalUint("idle_ms")) request.set_idle_ms(*idle);
  if (!in.Has("ttl_ms") && !in.Has("idle_ms"))
    in.Fail("ttl_ms", "request.missing", "ttl_ms or idle_ms is required");
  DSEC_TRY_VOID(in.Finish());
  return request;
}

Result<ExecCall> ReadExec(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  ExecCall call;
  v1::ExecRequest& request = call.request;
  request.set_op_id(in.String("op_id"));
  auto argv = in.BytesList("argv");
  auto script = in.Bytes("script");
  if (argv.has_value() == script.has_value()) {
    in.Fail("argv", argv ? "request.contradiction" : "request.missing",
            "give argv or script, one of them");
  } else if (argv && argv->empty()) {
    in.Fail("argv", "request.out_of_range", "must name a program");
  }
  for (std::string& item : argv.value_or(std::vector<std::string>()))
    request.add_argv(std::move(item));
  if (script) request.set_script(*std::move(script));
  request.set_cwd(in.Bytes("cwd").value_or(""));
  in.BytesMap("env", request.mutable_env());
  request.set_user(in.String("user"));
  request.set_stdin(in.Bytes("stdin").value_or(""));
  request.set_stdin_open(in.Bool("stdin_open", false));
  if (auto tty = in.Object("tty")) {
    ReadSize(*tty, *request.mutable_tty());
    (void)tty->Finish();
  }
  request.set_timeout_ms(in.Uint("timeout_ms"));
  request.set_output_bytes(in.Uint("output_bytes"));
  request.set_merged(in.Bool("merged", false));
  request.set_session(in.String("session"));
  call.detached = in.Bool("detached", false);
  request.set_group_kill(in.Bool("group_kill", false));
  request.set_shell(in.String("shell"));
  const bool keep = in.Word("on_disconnect", "kill", {"kill", "keep"}) == "keep" || call.detached;
  call.rule = keep ? edge::OnDisconnect::kKeep : edge::OnDisconnect::kKill;
  request.set_detached(keep);
  call.stream = in.Bool("stream", true);
  if (call.detached && !call.stream)
    in.Fail("stream", "request.contradiction", "a detached exec answers at once");
  if (!call.stream && request.stdin_open()) {
    in.Fail("stdin_open", "request.contradiction",
            "without stream the reply comes only after the end");
  }
  DSEC_TRY_VOID(in.Finish());
  return call;
}

Result<v1::SignalRequest> ReadSignal(std::string_view body) {
  constexpr uint64_t kMaxSignal = 64;
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::SignalRequest request;
  const auto signal = in.StringOrUint("signal");
  if (!in.Has("signal")) in.Fail("signal", "request.missing", "is required");
  if (signal) {
    const auto* name = std::get_if<std::string>(&*signal);
    const auto number = name != nullptr ? SignalNumber(*name) : std::optional<int>();
    if (name != nullptr && !number) {
      in.Fail("signal", "request.invalid", "is not the name of a signal");
    } else if (name == nullptr &&
               (std::get<uint64_t>(*signal) < 1 || std::get<uint64_t>(*signal) > kMaxSignal)) {
      in.Fail("signal", "request.out_of_range", "must be from 1 to 64");
    } else {
      request.set_signal(number ? *number : static_cast<int>(std::get<uint64_t>(*signal)));
    }
  }
  request.set_tree(in.Bool("tree", false));
  DSEC_TRY_VOID(in.Finish());
  return request;
}

Result<v1::Tty> ReadResize(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::Tty tty;
  ReadSize(in, tty);
  DSEC_TRY_VOID(in.Finish());
  return tty;
}

Result<uint64_t> ReadCancel(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  const uint64_t grace = in.Uint("grace_ms", 0, 0, kMaxGraceMs);
  DSEC_TRY_VOID(in.Finish());
  return grace;
}

Result<void> ReadEmpty(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  return JsonObject(document).Finish();
}

Result<v1::MkdirRequest> ReadMkdir(std::string_view body) {
  constexpr uint32_t kDefaultMode = 0755;
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::MkdirRequest request;
  request.set_path(in.RequiredBytes("path"));
  request.set_mode(in.Mode("mode").value_or(kDefaultMode));
  request.set_parents(in.Bool("parents", false));
  request.set_user(in.String("user"));
  DSEC_TRY_VOID(in.Finish());
  return request;
}

Result<v1::MoveRequest> ReadMove(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::MoveRequest request;
  request.set_from(in.RequiredBytes("from"));
  request.set_to(in.RequiredBytes("to"));
  request.set_overwrite(in.Bool("overwrite", false));
  DSEC_TRY_VOID(in.Finish());
  return request;
}

Result<v1::ChmodRequest> ReadChmod(std::string_view body) {
  DSEC_TRY(const JsonDocument document, JsonDocument::Parse(body));
  JsonObject in(document);
  v1::ChmodRequest request;
  request.set_path(in.RequiredBytes("path"));
  if (const auto mode = in.Mode("mode")) request.set_mode(*mode);
  request.set_user(in.String("user"));
  if (!in.Has("mode") && request.user().empty())
    in.Fail("mode", "request.missing", "mode or user is required");
  DSEC_TRY_VOID(in.Finish());
  return request;
}

}  // namespace dsec::apiserver
