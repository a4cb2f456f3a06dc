// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_members.h"

#include <optional>
#include <vector>

namespace dsec::apiserver {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 32;

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

}  // namespace

Error Bad(std::string_view reason, const std::string& field, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, fmt::format("{}: {}", field, rule)).WithField(field);
}

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

}  // namespace dsec::apiserver
