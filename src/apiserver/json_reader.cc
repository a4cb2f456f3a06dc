// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "http/base64.h"

namespace dsec::apiserver {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;

Error Malformed(std::string message) {
  return Error(Code::kInvalidArgument, "request.malformed", std::move(message));
}

// Builds the tree and keeps the rules that nlohmann's own builder does not have.
class Builder final : public nlohmann::json_sax<json> {
 public:
  explicit Builder(json& root) : root_(root) {}
  std::optional<Error>& error() { return error_; }

  bool null() override { return Put(json(nullptr)); }
  bool boolean(bool value) override { return Put(json(value)); }
  bool number_integer(int64_t value) override { return Put(json(value)); }
  bool number_unsigned(uint64_t value) override { return Put(json(value)); }
  bool number_float(double value, const std::string&) override { return Put(json(value)); }
  bool string(std::string& value) override { return Put(json(std::move(value))); }
  bool binary(json::binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(std::string& name) override {
    if (open_.back()->contains(name)) {
      error_ = Error(Code::kInvalidArgument, "request.duplicate",
                     fmt::format("\"{}\" is given twice", name))
                   .WithField(name);
      return false;
    }
    key_ = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    error_ = Malformed(fmt::format("the body is not JSON in UTF-8 (byte {})", position));
    return false;
  }

 private:
  json* Place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[std::move(key_)] = std::move(value));
  }
  bool Put(json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(json value) {
    if (open_.size() >= kMaxDepth) {
      error_ = Malformed(fmt::format("the body is nested deeper than {} levels", kMaxDepth));
      return false;
    }
    open_.push_back(Place(std::move(value)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  json& root_;
  std::vector<json*> open_;
  std::string key_;
  std::optional<Error> error_;
};

std::string TwinOf(std::string_view key) { return std::string(key) + "_b64"; }

}  // namespace

JsonDocument::JsonDocument(std::unique_ptr<json> root) : root_(std::move(root)) {}
JsonDocument::JsonDocument(JsonDocument&&) noexcept = default;
JsonDocument::~JsonDocument() = default;

Result<JsonDocument> JsonDocument::Parse(std::string_view text) {
  auto root = std::make_unique<json>(json::object());
  if (!text.empty()) {
    Builder builder(*root);
    if (!json::sax_parse(text, &builder))
      return builder.error().value_or(Malformed("the body is not JSON"));
    if (!root->is_object()) return Malformed("the body must be a JSON object");
  }
  return JsonDocument(std::move(root));
}

JsonObject::JsonObject(const JsonDocument& document)
    : JsonObject(&document.root(), "", std::make_shared<Slot>()) {}

JsonObject::JsonObject(const json* object, std::string prefix, std::shared_ptr<Slot> slot)
    : object_(object), prefix_(std::move(prefix)), slot_(std::move(slot)) {}

const json* JsonObject::Find(std::string_view key) {
  asked_.emplace(key);
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

void JsonObject::Fail(std::string_view key, std::string_view reason, std::string rule) {
  if (slot_->error) return;
  std::string path = Path(key);
  std::string message = fmt::format("{}: {}", path, rule);
  slot_->error =
      Error(Code::kInvalidArgument, reason, std::move(message)).WithField(std::move(path));
}

bool JsonObject::Has(std::string_view key) { return Find(key) != nullptr; }

std::string JsonObject::String(std::string_view key) {
  const json* value = Find(key);
  if (value == nullptr) return "";
  if (!value->is_string()) {
    Fail(key, "request.wrong_type", "must be a string");
    return "";
  }
  return value->get_ref<const std::string&>();
}

std::string JsonObject::RequiredString(std::string_view key) {
  if (!Has(key)) Fail(key, "request.missing", "is required");
  return String(key);
}

bool JsonObject::Bool(std::string_view key, bool fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Fail(key, "request.wrong_type", "must be true or false");
  return fallback;
}

std::optional<uint64_t> JsonObject::OptionalUint(std::string_view key, uint64_t min, uint64_t max) {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) {
    // Integers beyond 64 bits come as floats too.
    Fail(key, "request.wrong_type", fmt::format("must be an integer from {} to {}", min, max));
    return std::nullopt;
  }
  const bool negative = !value->is_number_unsigned() && value->get<int64_t>() < 0;
  const uint64_t number = negative ? 0 : value->get<uint64_t>();
  if (negative || number < min || number > max) {
    Fail(key, "request.out_of_range",
         fmt::format("{} is not from {} to {}", value->dump(), min, max));
    return std::nullopt;
  }
  return number;
}

uint64_t JsonObject::Uint(std::string_view key, uint64_t fallback, uint64_t min, uint64_t max) {
  return OptionalUint(key, min, max).value_or(fallback);
}

std::string JsonObject::Word(std::string_view key, std::string_view fallback,
                             std::initializer_list<std::string_view> words) {
  if (!Has(key)) return std::string(fallback);
  std::string word = String(key);
  if (std::find(words.begin(), words.end(), word) == words.end()) {
    Fail(key, "request.invalid", fmt::format("must be one of {}", fmt::join(words, ", ")));
  }
  return word;
}

std::vector<std::string> JsonObject::Strings(std::string_view key) {
  std::vector<std::string> items;
  const json* value = Find(key);
  if (value == nullptr) return items;
  if (!value->is_array()) {
    Fail(key, "request.wrong_type", "must be an array of strings");
    return items;
  }
  for (size_t i = 0; i < value->size(); ++i) {
    if (!(*value)[i].is_string()) {
      Fail(fmt::format("{}[{}]", key, i), "request.wrong_type", "must be a string");
      return items;
    }
    items.push_back((*value)[i].get_ref<const std::string&>());
  }
  return items;
}

std::map<std::string, std::string> JsonObject::StringMap(std::string_view key) {
  std::map<std::string, std::string> items;
  const json* value = Find(key);
  if (value == nullptr) return items;
  if (!value->is_object()) {
    Fail(key, "request.wrong_type", "must be an object of strings");
    return items;
  }
  for (const auto& [name, text] : value->items()) {
    if (!text.is_string()) {
      Fail(fmt::format("{}.{}", key, name), "request.wrong_type", "must be a string");
      return items;
    }
    items.emplace(name, text.get_ref<const std::string&>());
  }
  return items;
}

std::optional<std::variant<std::string, uint64_t>> JsonObject::StringOrUint(std::string_view key) {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get_ref<const std::string&>();
  const auto number = OptionalUint(key);
  if (!number) return std::nullopt;
  return *number;
}

bool JsonObject::IsContradiction(std::string_view key) {
  const bool both = Has(key) & Has(TwinOf(key));  // both are asked for
  if (both)
    Fail(key, "request.contradiction", fmt::format("give {} or {}_b64, not both", key, key));
  return both;
}

std::optional<std::string> JsonObject::Decode(std::string_view key, const json& value) {
  if (value.is_string()) {
    if (auto bytes = http::DecodeBase64(value.get_ref<const std::string&>())) return bytes;
    Fail(key, "request.invalid", "must be standard base64 with padding");
  } else {
    Fail(key, "request.wrong_type", "must be a string of base64");
  }
  return std::nullopt;
}

std::optional<std::string> JsonObject::Bytes(std::string_view key) {
  if (IsContradiction(key)) return std::nullopt;
  const std::string twin = TwinOf(key);
  if (const json* value = Find(twin); value != nullptr) return Decode(twin, *value);
  if (!Has(key)) return std::nullopt;
  return String(key);
}

std::string JsonObject::RequiredBytes(std::string_view key) {
  auto bytes = Bytes(key);
  if (!bytes) Fail(key, "request.missing", "is required");
  return std::move(bytes).value_or("");
}

std::optional<std::vector<std::string>> JsonObject::BytesList(std::string_view key) {
  if (IsContradiction(key)) return std::nullopt;
  const std::string twin = TwinOf(key);
  const json* value = Find(twin);
  if (value == nullptr) {
    if (!Has(key)) return std::nullopt;
    return Strings(key);
  }
  if (!value->is_array()) {
    Fail(twin, "request.wrong_type", "must be an array of base64 strings");
    return std::nullopt;
  }
  std::vector<std::string> items;
  for (size_t i = 0; i < value->size(); ++i) {
    auto item = Decode(fmt::format("{}[{}]", twin, i), (*value)[i]);
    if (!item) return std::nullopt;
    items.push_back(*std::move(item));
  }
  return items;
}

void JsonObject::BytesMap(std::string_view key,
                          google::protobuf::RepeatedPtrField<v1::KeyValue>* out) {
  const auto add = [out](std::string name, std::string value) {
    v1::KeyValue& entry = *out->Add();
    entry.set_key(std::move(name));
    entry.set_value(std::move(value));
  };
  const auto plain = StringMap(key);
  const std::string twin = TwinOf(key);
  for (const auto& [name, text] : StringMap(twin)) {
    auto bytes = http::DecodeBase64(text);
    if (!bytes) {
      Fail(fmt::format("{}.{}", twin, name), "request.invalid",
           "must be standard base64 with padding");
      return;
    }
    if (plain.contains(name)) {
      Fail(fmt::format("{}.{}", key, name), "request.contradiction",
           fmt::format("is in {} and in {}", key, twin));
      return;
    }
    add(name, *std::move(bytes));
  }
  for (const auto& [name, text] : plain) add(name, text);
}

std::optional<uint32_t> JsonObject::Mode(std::string_view key) {
  if (!Has(key)) return std::nullopt;
  const auto mode = ParseMode(String(key));
  if (!mode) Fail(key, "request.invalid", std::string(kModeRule));
  return mode;
}

std::optional<JsonObject> JsonObject::Object(std::string_view key) {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) {
    Fail(key, "request.wrong_type", "must be an object");
    return std::nullopt;
  }
  return JsonObject(value, Path(key) + ".", slot_);
}

Result<void> JsonObject::Finish() {
  for (const auto& [key, value] : object_->items()) {
    if (!asked_.contains(key)) Fail(key, "request.unknown_field", "there is no such field");
  }
  if (slot_->error) return *slot_->error;
  return Ok();
}

std::optional<uint32_t> ParseMode(std::string_view text) {
  if (text.size() < 2 || text.size() > 5 || text[0] != '0') return std::nullopt;
  uint32_t mode = 0;
  for (const char c : text) {
    if (c < '0' || c > '7') return std::nullopt;
    mode = mode << 3 | static_cast<uint32_t>(c - '0');
  }
  return mode;
}

}  // namespace dsec::apiserver
