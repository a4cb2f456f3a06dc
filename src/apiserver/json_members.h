// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/result.h"
#include "dsec/v1/model.pb.h"
#include "http/base64.h"

// How the readers of requests read JSON (json_in.h holds the rules). Only for their .cc files.
namespace dsec::apiserver {

// Beyond it JSON numbers are not exact everywhere.
inline constexpr uint64_t kMaxInteger = (1ull << 53) - 1;

Error Bad(std::string_view reason, const std::string& field, std::string_view rule);
// An empty text is {}.
Result<nlohmann::json> ParseObject(std::string_view text);

// Reads the members of one object; remembers the first error and what was asked for.
class Members {
 public:
  Members(const nlohmann::json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  std::string Name(std::string_view key) const { return prefix_ + std::string(key); }
  void Fail(std::string_view key, std::string_view rule,
            std::string_view reason = "request.wrong_type") {
    if (status_.ok()) status_ = Bad(reason, Name(key), rule);
  }
  void Take(Result<void> other) {
    if (status_.ok()) status_ = std::move(other);
  }

  // Null when missing or null.
  const nlohmann::json* Get(std::string_view key) {
    asked_.insert(std::string(key));
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool Text(std::string_view key, std::string* out, bool required = false) {
    const nlohmann::json* value = Get(key);
    if (value == nullptr) {
      if (required) Fail(key, "is required", "request.missing");
      return false;
    }
    if (!value->is_string()) return Fail(key, "must be a string"), false;
    *out = value->get_ref<const std::string&>();
    return true;
  }
  bool Number(std::string_view key, uint64_t* out, uint64_t min = 0, uint64_t max = kMaxInteger) {
    const nlohmann::json* value = Get(key);
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
    const nlohmann::json* value = Get(key);
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
    const nlohmann::json* plain = Get(key);
    const nlohmann::json* encoded = twin_allowed ? Get(twin) : nullptr;
    if (plain != nullptr && encoded != nullptr)
      return Fail(twin, "is there beside its twin", "request.contradiction"), false;
    const nlohmann::json* value = plain != nullptr ? plain : encoded;
    if (value == nullptr) return false;
    const std::string name = plain != nullptr ? std::string(key) : twin;
    if (!value->is_array()) return Fail(name, "must be an array of strings"), false;
    for (size_t i = 0; i < value->size(); ++i) {
      const nlohmann::json& item = (*value)[i];
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
    const nlohmann::json* value = Get(key);
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
  const nlohmann::json* Object(std::string_view key) {
    const nlohmann::json* value = Get(key);
    if (value != nullptr && !value->is_object()) return Fail(key, "must be an object"), nullptr;
    return value;
  }
  // The first error so far.
  const Result<void>& status() const { return status_; }
  // The same, or that of a member that nobody asked for.
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
  const nlohmann::json& object_;
  const std::string prefix_;
  std::set<std::string, std::less<>> asked_;
  Result<void> status_;
};

// env and env_b64.
void ReadEnv(Members& members, google::protobuf::RepeatedPtrField<v1::KeyValue>* out);

}  // namespace dsec::apiserver
