// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_in.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/id.h"
#include "http/base64.h"

namespace dsec::apiserver {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 32;
constexpr uint64_t kMaxInteger =
    (1ull << 53) - 1;  // beyond it JSON numbers are not exact everywhere
constexpr uint64_t kMaxGraceMs = 300'000;
constexpr uint64_t kMaxTimeoutMs = 600'000;

Error Bad(std::string_view reason, const std::string& field, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, fmt::format("{}: {}", field, rule)).WithField(field);
}

// Nesting beyond any request of ours is refused before a parser allocates for it.
bool TooDeep(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxDepth) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

// Finds a key that one object has twice: which of the values counts would be the parser's choice.
class KeyCheck {
 public:
  void See(json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == json::parse_event_t::key) {
      open_.back().key = parsed.get_ref<const std::string&>();
      if (!open_.back().seen.insert(open_.back().key).second && !twice_) twice_ = Path();
    }
  }
  const std::optional<std::string>& twice() const { return twice_; }

 private:
  struct Open {
    std::set<std::string> seen;
    std::string key;  // the last one
  };
  std::string Path() const {
    std::string path;
    for (const Open& object : open_) path += (path.empty() ? "" : ".") + object.key;
    return path;
  }
  std::vector<Open> open_;  // from the outermost object inwards
  std::optional<std::string> twice_;
};

// An empty text is {}.
Result<json> ParseObject(std::string_view text) {
  if (text.empty()) return json::object();
  if (TooDeep(text)) {
    return Error(Code::kInvalidArgument, "request.malformed",
                 fmt::format("the body nests deeper than {} levels", kMaxDepth));
  }
  KeyCheck keys;
  const json::parser_callback_t see = [&](int, json::parse_event_t event, json& parsed) {
    keys.See(event, parsed);
    return true;
  };
  json value = json::parse(text, see, false);
  if (value.is_discarded()) {
    return Error(Code::kInvalidArgument, "request.malformed",
                 "the body is not valid JSON in UTF-8");
  }
  if (!value.is_object())
    return Error(Code::kInvalidArgument, "request.malformed", "the body must be a JSON object");
  if (keys.twice()) return Bad("request.duplicate", *keys.twice(), "is there twice");
  return value;
}

// Reads the members of one object; remembers the first error and what was asked for.
class Members {
 public:
  Members(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  std::string Name(std::string_view key) const { return prefix_ + std::string(key); }
  void Fail(std::string_view key, std::string_view rule,
            std::string_view reason = "request.wrong_type") {
    if (status_.ok()) status_ = Bad(reason, Name(key), rule);
  }
  void Take(Result<void> other) {
    if (status_.ok()) status_ = std::move(other);
  }

  // Null when missing or null.
  const json* Get(std::string_view key) {
    asked_.insert(std::string(key));
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool Text(std::string_view key, std::string* out, bool required = false) {
    const json* value = Get(key);
    if (value == nullptr) {
      if (required) Fail(key, "is required", "request.missing");
      return false;
    }
    if (!value->is_string()) return Fail(key, "must be a string"), false;
    *out = value->get_ref<const std::string&>();
    return true;
  }
  bool Number(std::string_view key, uint64_t* out, uint64_t min = 0, uint64_t max = kMaxInteger) {
    const json* value = Get(key);
    if (value == nullptr) return false;
    // The parser makes a float of an integer that fits no 64 bits.
    const bool huge = value->is_number_float() &&
                      std::abs(value->get<double>()) > static_cast<double>(kMaxInteger);
    if (!value->is_number_integer() && !huge) return Fail(key, "must be an integer"), false;
    const uint64_t number = value->is_number_unsigned() ? value->get<uint64_t>() : 0;
    if (!value->is_number_unsigned() || number < min || number > max) {
      return Fail(key, fmt::format("must be from {} to {}", min, max), "request.out_of_range"),
             false;
    }
    *out = number;
    return true;
  }
  void Flag(std::string_view key, bool* out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_boolean()) return Fail(key, "must be true or false");
    *out = value->get<bool>();
  }
  // `key`, or the bytes of `key`_b64; both at once are refused. False when neither is there.
  bool Bytes(std::string_view key, std::string* out, bool required = false) {
    const std::string twin = std::string(key) + "_b64";
    const bool plain = Text(key, out);
    std::string encoded;
    if (Text(twin, &encoded)) {
      if (plain) return Fail(twin, "is there beside its twin", "request.contradiction"), false;
      auto decoded = http::DecodeBase64(encoded);
      if (!decoded) return Fail(twin, "is not base64", "request.invalid"), false;
      *out = std::move(*decoded);
      return true;
    }
    if (!plain && required) Fail(key, "is required", "request.missing");
    return plain;
  }
  // An array of strings, or of bytes as `key`_b64. False when neither is there.
  template <typename Add>
  bool Strings(std::string_view key, bool twin_allowed, const Add& add) {
    const std::string twin = std::string(key) + "_b64";
    const json* plain = Get(key);
    const json* encoded = twin_allowed ? Get(twin) : nullptr;
    if (plain != nullptr && encoded != nullptr)
      return Fail(twin, "is there beside its twin", "request.contradiction"), false;
    const json* value = plain != nullptr ? plain : encoded;
    if (value == nullptr) return false;
    const std::string name = plain != nullptr ? std::string(key) : twin;
    if (!value->is_array()) return Fail(name, "must be an array of strings"), false;
    for (size_t i = 0; i < value->size(); ++i) {
      const json& item = (*value)[i];
      if (!item.is_string()) return Fail(fmt::format("{}[{}]", name, i), "must be a string"), false;
      std::string text = item.get<std::string>();
      if (encoded != nullptr) {
        auto decoded = http::DecodeBase64(text);
        if (!decoded)
          return Fail(fmt::format("{}[{}]", name, i), "is not base64", "request.invalid"), false;
        text = std::move(*decoded);
      }
      add(std::move(text));
    }
    return true;
  }
  // An object of strings.
  template <typename Add>
  bool Map(std::string_view key, bool base64, const Add& add) {
    const json* value = Get(key);
    if (value == nullptr) return false;
    if (!value->is_object()) return Fail(key, "must be an object of strings"), false;
    for (const auto& [name, item] : value->items()) {
      if (!item.is_string())
        return Fail(fmt::format("{}.{}", key, name), "must be a string"), false;
      std::string text = item.get<std::string>();
      if (base64) {
        auto decoded = http::DecodeBase64(text);
        if (!decoded)
          return Fail(fmt::format("{}.{}", key, name), "is not base64", "request.invalid"), false;
        text = std::move(*decoded);
      }
      add(name, std::move(text));
    }
    return true;
  }
  // A member object; null when missing.
  const json* Object(std::string_view key) {
    const json* value = Get(key);
    if (value != nullptr && !value->is_object()) return Fail(key, "must be an object"), nullptr;
    return value;
  }
  Result<void> Finish() {
    if (status_.ok()) {
      for (const auto& [key, value] : object_.items()) {
        if (!asked_.contains(key)) {
          Fail(key, "is not a field of this request", "request.unknown_field");
          break;
        }
      }
    }
    return std::move(status_);
  }

 private:
  const json& object_;
  const std::string prefix_;
  std::set<std::string, std::less<>> asked_;
  Result<void> status_;
};

void ReadEnv(Members& members, google::protobuf::RepeatedPtrField<v1::KeyValue>* out) {
  std::set<std::string> seen;
  for (const auto& [key, base64] : {std::pair{"env", false}, std::pair{"env_b64", true}}) {
    members.Map(key, base64, [&](const std::string& name, std::string value) {
      if (!seen.insert(name).second)
        members.Fail(fmt::format("{}.{}", key, name), "is there beside its twin",
                     "request.contradiction");
      v1::KeyValue* pair = out->Add();
      pair->set_key(name);
      pair->set_value(std::move(value));
    });
  }
}

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
