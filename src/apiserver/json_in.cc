// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_in.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>

#include "apiserver/json_members.h"
#include "base/id.h"

namespace dsec::apiserver {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxGraceMs = 300'000;
constexpr uint64_t kMaxTimeoutMs = 600'000;

void ReadLimits(Members& members, v1::Limits* limits) {
  const json* object = members.Object("limits");
  if (object == nullptr) return;
  Members inner(*object, members.Name("limits."));
  static constexpr std::pair<const char*, void (v1::Limits::*)(uint64_t)> kFields[] = {
      {"memory_bytes", &v1::Limits::set_memory_bytes},
      {"cpu_millis", &v1::Limits::set_cpu_millis},
      {"pids", &v1::Limits::set_pids},
      {"disk_bytes", &v1::Limits::set_disk_bytes},
      {"disk_inodes", &v1::Limits::set_disk_inodes},
      {"shm_bytes", &v1::Limits::set_shm_bytes},
      {"open_files", &v1::Limits::set_open_files},
      {"output_bytes", &v1::Limits::set_output_bytes}};
  for (const auto& [key, set] : kFields) {
    uint64_t value = 0;
    if (inner.Number(key, &value)) (limits->*set)(value);
  }
  members.Take(inner.Finish());
}

// The fields that create and batch share.
void ReadSandboxFields(Members& members, CreateBody& out) {
  v1::SandboxSpec& spec = *out.request.mutable_spec();
  spec.set_backend(v1::BACKEND_CONTAINER);
  members.Text("base", spec.mutable_base(), true);
  members.Text("project", out.request.mutable_project());
  members.Text("workspace", spec.mutable_workspace());
  members.Strings("toolkits", false, [&](std::string text) { spec.add_toolkits(std::move(text)); });
  std::string backend;
  if (members.Text("backend", &backend)) {
    if (backend == "fncall") {
      spec.set_backend(v1::BACKEND_FNCALL);
    } else if (backend == "microvm") {
      spec.set_backend(v1::BACKEND_MICROVM);
    } else if (backend == "fullvm") {
      spec.set_backend(v1::BACKEND_FULLVM);
    } else if (backend != "container") {
      members.Fail("backend", "must be container, fncall, microvm or fullvm", "request.invalid");
    }
  }
  ReadLimits(members, spec.mutable_limits());
  if (const json* network = members.Object("network")) {
    Members inner(*network, members.Name("network."));
    inner.Text("mode", spec.mutable_network()->mutable_mode(), true);
    members.Take(inner.Finish());
  }
  uint64_t number = 0;
  if (members.Number("ttl_ms", &number)) spec.set_ttl_ms(number);
  if (members.Number("idle_ms", &number)) spec.set_idle_ms(number);
  if (const json* policy = members.Object("ttl_policy")) {
    Members inner(*policy, members.Name("ttl_policy."));
    bool wait = false;
    inner.Flag("wait_for_exec", &wait);
    spec.set_ttl_waits_for_exec(wait);
    if (inner.Number("max_extension_ms", &number)) spec.set_ttl_extension_ms(number);
    members.Take(inner.Finish());
  }
  ReadEnv(members, spec.mutable_env());
  bool record = false;
  members.Flag("record_first_touch", &record);
  spec.set_record_first_touch(record);
  members.Text("workdir", spec.mutable_workdir());
  members.Text("user", spec.mutable_user());
  members.Text("hostname", spec.mutable_hostname());
  members.Map("labels", false, [&](const std::string& key, std::string value) {
    (*spec.mutable_labels())[key] = std::move(value);
  });
  members.Text("name", spec.mutable_name());
  members.Strings("entrypoint", true,
                  [&](std::string text) { spec.add_entrypoint(std::move(text)); });
  members.Number("timeout_ms", &out.timeout_ms, 1, kMaxTimeoutMs);
  if (members.Number("capacity_wait_ms", &number, 0, kMaxTimeoutMs)) {
    out.has_capacity_wait = true;
    out.request.set_capacity_wait_ms(std::min(number, out.timeout_ms));
  }
}

void ReadRequestId(Members& members, std::string* out, size_t max) {
  if (!members.Text("request_id", out, true)) return;
  auto id = ParseOpId(*out, "request_id");
  if (!id.ok()) return members.Take(std::move(id).error());
  if (out->size() > max)
    members.Fail("request_id", fmt::format("must have at most {} characters", max),
                 "request.out_of_range");
}

struct SignalName {
  std::string_view name;
  int number;
};
constexpr std::array kSignals = {
    SignalName{"HUP", SIGHUP},     SignalName{"INT", SIGINT},   SignalName{"QUIT", SIGQUIT},
    SignalName{"ILL", SIGILL},     SignalName{"TRAP", SIGTRAP}, SignalName{"ABRT", SIGABRT},
    SignalName{"BUS", SIGBUS},     SignalName{"FPE", SIGFPE},   SignalName{"KILL", SIGKILL},
    SignalName{"USR1", SIGUSR1},   SignalName{"SEGV", SIGSEGV}, SignalName{"USR2", SIGUSR2},
    SignalName{"PIPE", SIGPIPE},   SignalName{"ALRM", SIGALRM}, SignalName{"TERM", SIGTERM},
    SignalName{"CHLD", SIGCHLD},   SignalName{"CONT", SIGCONT}, SignalName{"STOP", SIGSTOP},
    SignalName{"TSTP", SIGTSTP},   SignalName{"TTIN", SIGTTIN}, SignalName{"TTOU", SIGTTOU},
    SignalName{"URG", SIGURG},     SignalName{"XCPU", SIGXCPU}, SignalName{"XFSZ", SIGXFSZ},
    SignalName{"WINCH", SIGWINCH}, SignalName{"IO", SIGIO},     SignalName{"PWR", SIGPWR},
    SignalName{"SYS", SIGSYS}};

}  // namespace

Result<CreateBody> ReadCreate(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  CreateBody out;
  Members members(object, "");
  ReadRequestId(members, out.request.mutable_request_id(), 128);
  ReadSandboxFields(members, out);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<BatchBody> ReadBatch(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  BatchBody out;
  Members members(object, "");
  ReadRequestId(members, out.item.request.mutable_request_id(), 120);
  if (!members.Number("count", &out.count, 1, 4096))
    members.Fail("count", "is required", "request.missing");
  if (const json* sandbox = members.Object("sandbox")) {
    Members inner(*sandbox, "sandbox.");
    ReadSandboxFields(inner, out.item);
    members.Take(inner.Finish());
  } else {
    members.Fail("sandbox", "is required", "request.missing");
  }
  DSEC_TRY_VOID(members.Finish());
  if (!out.item.has_capacity_wait) out.item.request.set_capacity_wait_ms(out.item.timeout_ms);
  return out;
}

Result<ExecBody> ReadExec(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  ExecBody out;
  v1::ExecRequest& request = out.request;
  Members members(object, "");
  if (members.Text("op_id", request.mutable_op_id())) {
    auto id = ParseOpId(request.op_id(), "op_id");
    if (!id.ok()) members.Take(std::move(id).error());
  }
  const bool argv =
      members.Strings("argv", true, [&](std::string text) { request.add_argv(std::move(text)); });
  std::string text;
  const bool script = members.Bytes("script", &text);
  if (script) request.set_script(std::move(text));
  if (argv && script) members.Fail("script", "is there beside argv", "request.contradiction");
  if (!argv && !script) members.Fail("argv", "give either argv or script", "request.missing");
  if (argv && request.argv().empty())
    members.Fail("argv", "must have a program", "request.invalid");
  members.Bytes("cwd", request.mutable_cwd());
  ReadEnv(members, request.mutable_env());
  members.Text("user", request.mutable_user());
  members.Bytes("stdin", request.mutable_stdin());
  bool flag = false;
  members.Flag("stdin_open", &flag);
  request.set_stdin_open(flag);
  if (const json* tty = members.Object("tty")) {
    Members inner(*tty, "tty.");
    uint64_t rows = 0;
    uint64_t cols = 0;
    if (!inner.Number("rows", &rows, 1, 65535))
      inner.Fail("rows", "is required", "request.missing");
    if (!inner.Number("cols", &cols, 1, 65535))
      inner.Fail("cols", "is required", "request.missing");
    request.mutable_tty()->set_rows(static_cast<uint32_t>(rows));
    request.mutable_tty()->set_cols(static_cast<uint32_t>(cols));
    members.Take(inner.Finish());
  }
  uint64_t number = 0;
  if (members.Number("timeout_ms", &number)) request.set_timeout_ms(number);
  if (members.Number("output_bytes", &number)) request.set_output_bytes(number);
  flag = false;
  members.Flag("merged", &flag);
  request.set_merged(flag);
  members.Text("session", request.mutable_session());
  flag = false;
  members.Flag("detached", &flag);
  request.set_detached(flag);
  flag = false;
  members.Flag("group_kill", &flag);
  request.set_group_kill(flag);
  members.Bytes("shell", request.mutable_shell());
  std::string rule;
  if (members.Text("on_disconnect", &rule)) {
    if (rule != "kill" && rule != "keep")
      members.Fail("on_disconnect", "must be kill or keep", "request.invalid");
    out.keep_on_disconnect = rule == "keep";
  }
  members.Flag("stream", &out.stream);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<DeleteManyBody> ReadDeleteMany(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  DeleteManyBody out;
  Members members(object, "");
  const bool ids =
      members.Strings("ids", false, [&](std::string id) { out.ids.push_back(std::move(id)); });
  const bool labels = members.Map("labels", false, [&](const std::string& key, std::string value) {
    out.labels.emplace_back(key, std::move(value));
  });
  if (ids && labels) members.Fail("labels", "is there beside ids", "request.contradiction");
  if (!ids && !labels) members.Fail("ids", "give either ids or labels", "request.missing");
  if (ids && out.ids.empty()) members.Fail("ids", "must not be empty", "request.invalid");
  if (labels && out.labels.empty()) members.Fail("labels", "must not be empty", "request.invalid");
  if (out.ids.size() > 10'000)
    members.Fail("ids", "must have at most 10000 items", "request.out_of_range");
  members.Number("grace_ms", &out.grace_ms, 0, kMaxGraceMs);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<v1::RenewRequest> ReadRenew(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::RenewRequest out;
  Members members(object, "");
  uint64_t number = 0;
  if (members.Number("ttl_ms", &number)) out.set_ttl_ms(number);
  if (members.Number("idle_ms", &number)) out.set_idle_ms(number);
  if (!out.has_ttl_ms() && !out.has_idle_ms())
    members.Fail("ttl_ms", "give ttl_ms, idle_ms or both", "request.missing");
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<CollectOrder> ReadCollect(std::string_view body) {
  constexpr uint64_t kMostMs = uint64_t{3650} * 24 * 3600 * 1000;
  constexpr uint64_t kMostTimeMs = 86'400'000;
  DSEC_TRY(const json object, ParseObject(body));
  CollectOrder out;
  Members members(object, "");
  members.Number("unnamed_for_ms", &out.unnamed_for_ms, 0, kMostMs);
  members.Number("grace_ms", &out.grace_ms, 0, kMostMs);
  members.Flag("dry_run", &out.dry_run);
  members.Number("timeout_ms", &out.timeout_ms, 1, kMostTimeMs);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<v1::SignalRequest> ReadSignal(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::SignalRequest out;
  Members members(object, "");
  const json* signal = members.Get("signal");
  if (signal == nullptr) {
    members.Fail("signal", "is required", "request.missing");
  } else if (signal->is_string() || signal->is_number_unsigned()) {
    const std::string text =
        signal->is_string() ? signal->get<std::string>() : std::to_string(signal->get<uint64_t>());
    auto number = ParseSignal(text, "signal");
    if (number.ok()) {
      out.set_signal(*number);
    } else {
      members.Take(std::move(number).error());
    }
  } else {
    members.Fail("signal", "must be a name or a number from 1 to 64");
  }
  bool tree = false;
  members.Flag("tree", &tree);
  out.set_tree(tree);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<v1::Tty> ReadTerminalSize(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::Tty out;
  Members members(object, "");
  uint64_t rows = 0;
  uint64_t cols = 0;
  if (!members.Number("rows", &rows, 1, 65535))
    members.Fail("rows", "is required", "request.missing");
  if (!members.Number("cols", &cols, 1, 65535))
    members.Fail("cols", "is required", "request.missing");
  out.set_rows(static_cast<uint32_t>(rows));
  out.set_cols(static_cast<uint32_t>(cols));
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<uint64_t> ReadCancel(std::string_view body) {
  uint64_t grace = 0;
  DSEC_TRY(const json object, ParseObject(body));
  Members members(object, "");
  members.Number("grace_ms", &grace, 0, kMaxGraceMs);
  DSEC_TRY_VOID(members.Finish());
  return grace;
}

Result<void> ReadEmpty(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  return Members(object, "").Finish();
}

Result<v1::MkdirRequest> ReadMkdir(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::MkdirRequest out;
  out.set_mode(0755);
  Members members(object, "");
  members.Bytes("path", out.mutable_path(), true);
  std::string mode;
  if (members.Text("mode", &mode)) {
    auto parsed = ParseMode(mode, "mode");
    if (parsed.ok()) {
      out.set_mode(*parsed);
    } else {
      members.Take(std::move(parsed).error());
    }
  }
  bool parents = false;
  members.Flag("parents", &parents);
  out.set_parents(parents);
  members.Text("user", out.mutable_user());
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<v1::MoveRequest> ReadMove(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::MoveRequest out;
  Members members(object, "");
  members.Bytes("from", out.mutable_from(), true);
  members.Bytes("to", out.mutable_to(), true);
  bool overwrite = false;
  members.Flag("overwrite", &overwrite);
  out.set_overwrite(overwrite);
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<v1::ChmodRequest> ReadChmod(std::string_view body) {
  DSEC_TRY(const json object, ParseObject(body));
  v1::ChmodRequest out;
  Members members(object, "");
  members.Bytes("path", out.mutable_path(), true);
  std::string mode;
  if (members.Text("mode", &mode)) {
    auto parsed = ParseMode(mode, "mode");
    if (parsed.ok()) {
      out.set_mode(*parsed);
    } else {
      members.Take(std::move(parsed).error());
    }
  }
  members.Text("user", out.mutable_user());
  if (!out.has_mode() && out.user().empty())
    members.Fail("mode", "give mode, user or both", "request.missing");
  DSEC_TRY_VOID(members.Finish());
  return out;
}

Result<uint32_t> ParseMode(std::string_view text, std::string_view field) {
  uint32_t mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (text.size() < 2 || text.size() > 5 || text[0] != '0' || error != std::errc() ||
      end != text.data() + text.size()) {
    return Bad("request.invalid", std::string(field), "must be octal with a leading 0, as 0755");
  }
  return mode;
}

Result<int32_t> ParseSignal(std::string_view text, std::string_view field) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= 1 && number <= 64)
    return number;
  std::string_view name = text;
  if (name.starts_with("SIG")) name.remove_prefix(3);
  for (const SignalName& known : kSignals) {
    if (known.name == name) return known.number;
  }
  return Bad("request.invalid", std::string(field),
             "must be a signal name or a number from 1 to 64");
}

Query::Query(std::string_view encoded) {
  auto parsed = http::ParseQuery(encoded);
  if (parsed.ok()) {
    pairs_ = std::move(*parsed);
  } else {
    status_ = std::move(parsed).error();
  }
}

void Query::Fail(std::string_view name, std::string_view rule, std::string_view reason) {
  if (status_.ok()) status_ = Bad(reason, std::string(name), rule);
}

bool Query::Has(std::string_view name) const {
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [&](const auto& pair) { return pair.first == name; });
}

std::vector<std::string> Query::Texts(std::string_view name) {
  asked_.insert(std::string(name));
  std::vector<std::string> out;
  for (const auto& [key, value] : pairs_) {
    if (key == name) out.push_back(value);
  }
  return out;
}

std::map<std::string, std::string> Query::Labels(std::string_view name) {
  std::map<std::string, std::string> labels;
  for (const std::string& label : Texts(name)) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) {
      Fail(name, "must be key=value", "request.invalid");
      continue;
    }
    const std::string value = label.substr(equals + 1);
    const auto [known, fresh] = labels.insert({label.substr(0, equals), value});
    if (!fresh && known->second != value)
      Fail(name, "a label cannot have two values", "request.contradiction");
  }
  return labels;
}

std::string Query::Text(std::string_view name, bool required) {
  auto all = Texts(name);
  if (all.size() > 1) Fail(name, "is given more than once", "request.duplicate");
  if (all.empty() && required) Fail(name, "is required", "request.missing");
  return all.empty() ? std::string() : std::move(all.front());
}

uint64_t Query::Number(std::string_view name, uint64_t fallback, uint64_t min, uint64_t max) {
  const bool given = Has(name);
  const std::string text = Text(name);
  if (!given) return fallback;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool integer = end != text.data() && end == text.data() + text.size();
  if (!integer || error != std::errc() || value < min || value > max) {
    Fail(name, fmt::format("must be an integer from {} to {}", min, max),
         integer ? "request.out_of_range" : "request.wrong_type");
    return fallback;
  }
  return value;
}

bool Query::Flag(std::string_view name, bool fallback) {
  const bool given = Has(name);
  const std::string text = Text(name);
  if (!given) return fallback;
  if (text != "true" && text != "false") Fail(name, "must be true or false", "request.wrong_type");
  return text == "true";
}

Result<void> Query::Finish() {
  for (const auto& [key, value] : pairs_) {
    if (!asked_.contains(key)) {
      Fail(key, "is not a parameter of this request", "request.unknown_field");
    }
  }
  return status_;
}

}  // namespace dsec::apiserver
