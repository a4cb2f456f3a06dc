// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/repeated_field.h>

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "dsec/v1/model.pb.h"

namespace dsec::apiserver {

// Integers of a request end here: the largest that every JSON reader keeps exact.
inline constexpr uint64_t kMaxJsonInteger = (uint64_t{1} << 53) - 1;

// A JSON text as a tree. Stricter than nlohmann: a key given twice is "request.duplicate", more
// than 32 levels, bad UTF-8, NaN and all else that is not JSON "request.malformed". Empty text is
// an empty object.
class JsonDocument {
 public:
  static Result<JsonDocument> Parse(std::string_view text);
  JsonDocument(JsonDocument&&) noexcept;
  ~JsonDocument();
  const nlohmann::json& root() const { return *root_; }

 private:
  explicit JsonDocument(std::unique_ptr<nlohmann::json> root);
  std::unique_ptr<nlohmann::json> root_;
};

// Reads the members of one JSON object by name and notes which it was asked for. The first fault is
// kept and the reader goes on with defaults; Finish tells it, or names a member that nobody asked
// for. A member that is null is as one left out. Every fault is kInvalidArgument with the field's
// full path: request.wrong_type, request.out_of_range, request.missing, request.invalid,
// request.contradiction (x and x_b64), request.unknown_field.
class JsonObject {
 public:
  // The root of a document, which must outlive this.
  explicit JsonObject(const JsonDocument& document);

  bool Has(std::string_view key);
  std::string String(std::string_view key);
  std::string RequiredString(std::string_view key);
  bool Bool(std::string_view key, bool fallback);
  uint64_t Uint(std::string_view key, uint64_t fallback = 0, uint64_t min = 0,
                uint64_t max = kMaxJsonInteger);
  std::optional<uint64_t> OptionalUint(std::string_view key, uint64_t min = 0,
                                       uint64_t max = kMaxJsonInteger);
  // A word out of `words`.
  std::string Word(std::string_view key, std::string_view fallback,
                   std::initializer_list<std::string_view> words);
  std::vector<std::string> Strings(std::string_view key);
  std::map<std::string, std::string> StringMap(std::string_view key);
  std::optional<std::variant<std::string, uint64_t>> StringOrUint(std::string_view key);
  // `key` or its twin `key`_b64.
  std::optional<std::string> Bytes(std::string_view key);
  std::string RequiredBytes(std::string_view key);
  std::optional<std::vector<std::string>> BytesList(std::string_view key);
  // The members of `key` and `key`_b64 together.
  void BytesMap(std::string_view key, google::protobuf::RepeatedPtrField<v1::KeyValue>* out);
  // Octal text with a leading 0, as "0755".
  std::optional<uint32_t> Mode(std::string_view key);
  // Reports into the same place; call Finish of it as well.
  std::optional<JsonObject> Object(std::string_view key);

  // For rules of the caller's own.
  void Fail(std::string_view key, std::string_view reason, std::string rule);
  Result<void> Finish();

 private:
  struct Slot {
    std::optional<Error> error;
  };
  JsonObject(const nlohmann::json* object, std::string prefix, std::shared_ptr<Slot> slot);
  const nlohmann::json* Find(std::string_view key);
  std::optional<std::string> Decode(std::string_view key, const nlohmann::json& value);
  std::string Path(std::string_view key) const { return prefix_ + std::string(key); }
  bool IsContradiction(std::string_view key);

  const nlohmann::json* object_;
  const std::string prefix_;
  const std::shared_ptr<Slot> slot_;
  std::set<std::string, std::less<>> asked_;
};

// "0755" -> 0755; nullopt unless it is 0 followed by 1..4 octal digits.
std::optional<uint32_t> ParseMode(std::string_view text);
inline constexpr std::string_view kModeRule = "must be octal with a leading 0, as 0755";

}  // namespace dsec::apiserver
