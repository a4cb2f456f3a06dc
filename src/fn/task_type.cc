// SPDX-License-Identifier: Apache-2.0
#include "fn/task_type.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

namespace dsec::fn {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using Strings = google::protobuf::RepeatedPtrField<std::string>;
using Pairs = google::protobuf::RepeatedPtrField<v1::KeyValue>;

constexpr int kMaxDepth = 8;

Error Bad(std::string_view reason, const std::string& field, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, fmt::format("{}: {}", field, rule)).WithField(field);
}

Error Malformed(std::string message) {
  return Error(Code::kInvalidArgument, "request.malformed", std::move(message));
}

// Finds a key that one object has twice: which of the values counts would be the parser's choice.
// Stops what nests too deep.
class Watch {
 public:
  bool See(int depth, json::parse_event_t event, const json& parsed) {
    too_deep_ |= depth > kMaxDepth;
    if (event == json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!open_.back().insert(key).second && !twice_) twice_ = key;
    }
    return !too_deep_;
  }
  bool too_deep() const { return too_deep_; }
  const std::optional<std::string>& twice() const { return twice_; }

 private:
  std::vector<std::set<std::string>> open_;
  std::optional<std::string> twice_;
  bool too_deep_ = false;
};

Result<json> ParseObject(std::string_view text) {
  if (text.size() > kMaxTypeBytes) {
    return Malformed(fmt::format("{} bytes are more than {}", text.size(), kMaxTypeBytes));
  }
  Watch watch;
  const json::parser_callback_t see = [&](int depth, json::parse_event_t event, json& parsed) {
    return watch.See(depth, event, parsed);
  };
  json value = json::parse(text, see, false);
  if (watch.too_deep()) return Malformed(fmt::format("nests deeper than {} levels", kMaxDepth));
  if (value.is_discarded()) return Malformed("is not valid JSON in UTF-8");
  if (!value.is_object()) return Malformed("must be a JSON object");
  if (watch.twice()) return Bad("request.duplicate", *watch.twice(), "is there twice");
  return value;
}

// Reads the members of one object; remembers the first error and what was asked for.
class Members {
 public:
  Members(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const json* Get(const char* key) {
    asked_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  void Text(const char* key, std::string* out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_string()) return Fail(key, "must be a string");
    *out = value->get_ref<const std::string&>();
  }
  template <typename T>
  void Number(const char* key, T* out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_number_unsigned() || value->get<uint64_t>() > std::numeric_limits<T>::max()) {
      return Fail(key,
                  fmt::format("must be an integer from 0 to {}", std::numeric_limits<T>::max()));
    }
    *out = value->get<T>();
  }
  void List(const char* key, Strings* out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_array()) return Fail(key, "must be a list of strings");
    for (const json& item : *value) {
      if (!item.is_string()) return Fail(key, "must be a list of strings");
      *out->Add() = item.get_ref<const std::string&>();
    }
  }
  void Map(const char* key, Pairs* out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_object()) return Fail(key, "must be an object of strings");
    for (const auto& [name, text] : value->items()) {
      if (!text.is_string()) return Fail(key, "must be an object of strings");
      v1::KeyValue& pair = *out->Add();
      pair.set_key(name);
      pair.set_value(text.get_ref<const std::string&>());
    }
  }
  // Reads the object of `key` by `read(Members&)`; false when it is not there.
  template <typename F>
  bool Object(const char* key, F read) {
    const json* value = Get(key);
    if (value == nullptr) return false;
    if (!value->is_object()) return Fail(key, "must be an object"), false;
    Members inner(*value, prefix_ + key + ".");
    read(inner);
    Take(inner.Finish());
    return true;
  }
  Result<void> Finish() {
    for (const auto& [key, value] : object_.items()) {
      if (!asked_.contains(key)) {
        Take(Bad("request.unknown_field", prefix_ + key, "there is no such field"));
      }
    }
    return std::move(status_);
  }

 private:
  void Fail(const char* key, std::string_view rule) {
    Take(Bad("request.wrong_type", prefix_ + key, rule));
  }
  void Take(Result<void> other) {
    if (status_.ok()) status_ = std::move(other);
  }

  const json& object_;
  const std::string prefix_;
  std::set<std::string, std::less<>> asked_;
  Result<void> status_;
};

void ReadLimits(Members& in, v1::FnLimits* limits) {
  uint64_t value = 0;
  const auto read = [&](const char* key, void (v1::FnLimits::*set)(uint64_t)) {
    value = 0;
    in.Number(key, &value);
    (limits->*set)(value);
  };
  read("wall_ms", &v1::FnLimits::set_wall_ms);
  read("cpu_ms", &v1::FnLimits::set_cpu_ms);
  read("memory_bytes", &v1::FnLimits::set_memory_bytes);
  read("processes", &v1::FnLimits::set_processes);
  read("output_bytes", &v1::FnLimits::set_output_bytes);
  read("file_bytes", &v1::FnLimits::set_file_bytes);
  read("disk_bytes", &v1::FnLimits::set_disk_bytes);
  read("disk_inodes", &v1::FnLimits::set_disk_inodes);
}

void ReadCommand(Members& in, v1::FnCommand* command, bool artifacts) {
  in.List("argv", command->mutable_argv());
  in.Map("env", command->mutable_env());
  in.Object("limits", [&](Members& limits) { ReadLimits(limits, command->mutable_limits()); });
  if (artifacts) in.List("artifacts", command->mutable_artifacts());
}

void Put(ordered_json& out, const char* key, const std::string& text) {
  if (!text.empty()) out[key] = text;
}
void Put(ordered_json& out, const char* key, uint64_t number) {
  if (number != 0) out[key] = number;
}
void Put(ordered_json& out, const char* key, const Strings& list) {
  if (list.empty()) return;
  out[key] = ordered_json::array();
  for (const std::string& item : list) out[key].push_back(item);
}
void Put(ordered_json& out, const char* key, const Pairs& pairs) {
  for (const v1::KeyValue& pair : pairs) out[key][pair.key()] = pair.value();
}
void Put(ordered_json& out, const char* key, ordered_json object) {
  if (!object.empty()) out[key] = std::move(object);
}

ordered_json LimitsJson(const v1::FnLimits& limits) {
  ordered_json out = ordered_json::object();
  Put(out, "wall_ms", limits.wall_ms());
  Put(out, "cpu_ms", limits.cpu_ms());
  Put(out, "memory_bytes", limits.memory_bytes());
  Put(out, "processes", limits.processes());
  Put(out, "output_bytes", limits.output_bytes());
  Put(out, "file_bytes", limits.file_bytes());
  Put(out, "disk_bytes", limits.disk_bytes());
  Put(out, "disk_inodes", limits.disk_inodes());
  return out;
}

ordered_json CommandJson(const v1::FnCommand& command) {
  ordered_json out = ordered_json::object();
  Put(out, "argv", command.argv());
  Put(out, "env", command.env());
  Put(out, "limits", LimitsJson(command.limits()));
  Put(out, "artifacts", command.artifacts());
  return out;
}

}  // namespace

Result<v1::FnTaskType> ParseTaskType(std::string_view text) {
  DSEC_TRY(const json value, ParseObject(text));
  v1::FnTaskType type;
  Members in(value, "");
  in.Text("name", type.mutable_name());
  in.List("aliases", type.mutable_aliases());
  in.Text("description", type.mutable_description());
  in.Object("environment", [&](Members& environment) {
    environment.Text("base", type.mutable_environment()->mutable_base());
    environment.Text("workspace", type.mutable_environment()->mutable_workspace());
    environment.List("toolkits", type.mutable_environment()->mutable_toolkits());
  });
  in.Text("source", type.mutable_source());
  in.Object("compile",
            [&](Members& compile) { ReadCommand(compile, type.mutable_compile(), true); });
  in.Object("run", [&](Members& run) { ReadCommand(run, type.mutable_run(), false); });
  in.Object("pool", [&](Members& pool) {
    uint32_t min = 0;
    uint32_t max = 0;
    uint64_t idle_ms = 0;
    pool.Number("min", &min);
    pool.Number("max", &max);
    pool.Number("idle_ms", &idle_ms);
    type.mutable_pool()->set_min(min);
    type.mutable_pool()->set_max(max);
    type.mutable_pool()->set_idle_ms(idle_ms);
  });
  in.Object("warm", [&](Members& warm) {
    warm.Text("kind", type.mutable_warm()->mutable_kind());
    warm.List("argv", type.mutable_warm()->mutable_argv());
    warm.List("imports", type.mutable_warm()->mutable_imports());
  });
  DSEC_TRY_VOID(in.Finish());
  return type;
}

std::string FormatTaskType(const v1::FnTaskType& type) {
  ordered_json out = ordered_json::object();
  Put(out, "name", type.name());
  Put(out, "aliases", type.aliases());
  Put(out, "description", type.description());
  ordered_json environment = ordered_json::object();
  Put(environment, "base", type.environment().base());
  Put(environment, "workspace", type.environment().workspace());
  Put(environment, "toolkits", type.environment().toolkits());
  Put(out, "environment", std::move(environment));
  Put(out, "source", type.source());
  Put(out, "compile", CommandJson(type.compile()));
  Put(out, "run", CommandJson(type.run()));
  ordered_json pool = ordered_json::object();
  Put(pool, "min", type.pool().min());
  Put(pool, "max", type.pool().max());
  Put(pool, "idle_ms", type.pool().idle_ms());
  Put(out, "pool", std::move(pool));
  ordered_json warm = ordered_json::object();
  Put(warm, "kind", type.warm().kind());
  Put(warm, "argv", type.warm().argv());
  Put(warm, "imports", type.warm().imports());
  Put(out, "warm", std::move(warm));
  // Bytes that are no UTF-8 cannot stand in JSON; CheckTaskType and the parser admit none but in
  // values of env, and those are replaced.
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace dsec::fn
