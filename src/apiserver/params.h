// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apiserver/json_reader.h"
#include "base/result.h"
#include "http/target.h"

namespace dsec::apiserver {

// Reads the parameters of a query by name, with the rules and errors of JsonObject; the field of an
// error is the parameter's name.
class Params {
 public:
  Params() = default;
  explicit Params(http::QueryPairs pairs)
      : pairs_(std::move(pairs)), asked_(pairs_.size(), false) {}

  // Bytes, as they were percent-encoded.
  std::optional<std::string> Bytes(std::string_view key);
  std::string RequiredBytes(std::string_view key);
  // Must be UTF-8.
  std::string Text(std::string_view key);
  std::vector<std::string> Texts(std::string_view key);
  bool Bool(std::string_view key, bool fallback);
  std::optional<uint64_t> OptionalUint(std::string_view key, uint64_t min = 0,
                                       uint64_t max = kMaxJsonInteger);
  uint64_t Uint(std::string_view key, uint64_t fallback, uint64_t min = 0,
                uint64_t max = kMaxJsonInteger);
  std::optional<uint32_t> Mode(std::string_view key);

  void Fail(std::string_view key, std::string_view reason, std::string_view rule);
  Result<void> Finish();

 private:
  http::QueryPairs pairs_;
  std::vector<bool> asked_;
  std::optional<Error> error_;
};

}  // namespace dsec::apiserver
