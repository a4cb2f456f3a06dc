// SPDX-License-Identifier: Apache-2.0
#include "apiserver/params.h"

#include <charconv>

#include "base/utf8.h"

namespace dsec::apiserver {

void Params::Fail(std::string_view key, std::string_view reason, std::string_view rule) {
  if (error_) return;
  error_ = Error(Code::kInvalidArgument, reason, fmt::format("{}: {}", key, rule))
               .WithField(std::string(key));
}

std::optional<std::string> Params::Bytes(std::string_view key) {
  std::optional<std::string> value;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    if (pairs_[i].first != key) continue;
    asked_[i] = true;
    if (value) Fail(key, "request.duplicate", "is given twice");
    value = pairs_[i].second;
  }
  return value;
}

std::string Params::RequiredBytes(std::string_view key) {
  auto value = Bytes(key);
  if (!value) Fail(key, "request.missing", "is required");
  return std::move(value).value_or("");
}

std::string Params::Text(std::string_view key) {
  std::string value = Bytes(key).value_or("");
  if (!IsUtf8(value)) Fail(key, "request.invalid", "must be UTF-8");
  return value;
}

std::vector<std::string> Params::Texts(std::string_view key) {
  std::vector<std::string> values;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    if (pairs_[i].first != key) continue;
    asked_[i] = true;
    if (!IsUtf8(pairs_[i].second)) Fail(key, "request.invalid", "must be UTF-8");
    values.push_back(pairs_[i].second);
  }
  return values;
}

bool Params::Bool(std::string_view key, bool fallback) {
  const auto value = Bytes(key);
  if (!value) return fallback;
  if (*value == "true" || *value == "1") return true;
  if (*value != "false" && *value != "0") Fail(key, "request.wrong_type", "must be true or false");
  return false;
}

std::optional<uint64_t> Params::OptionalUint(std::string_view key, uint64_t min, uint64_t max) {
  const auto text = Bytes(key);
  if (!text) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (text->empty() || error == std::errc::invalid_argument || end != text->data() + text->size()) {
    Fail(key, "request.wrong_type", fmt::format("must be an integer from {} to {}", min, max));
  } else if (error != std::errc() || value < min || value > max) {
    Fail(key, "request.out_of_range", fmt::format("{} is not from {} to {}", *text, min, max));
  } else {
    return value;
  }
  return std::nullopt;
}

uint64_t Params::Uint(std::string_view key, uint64_t fallback, uint64_t min, uint64_t max) {
  return OptionalUint(key, min, max).value_or(fallback);
}

std::optional<uint32_t> Params::Mode(std::string_view key) {
  const auto text = Bytes(key);
  if (!text) return std::nullopt;
  const auto mode = ParseMode(*text);
  if (!mode) Fail(key, "request.invalid", kModeRule);
  return mode;
}

Result<void> Params::Finish() {
  for (size_t i = 0; i < pairs_.size(); ++i) {
    if (!asked_[i]) Fail(pairs_[i].first, "request.unknown_field", "there is no such parameter");
  }
  if (error_) return *error_;
  return Ok();
}

}  // namespace dsec::apiserver
