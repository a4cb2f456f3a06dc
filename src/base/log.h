// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

#include "base/clock.h"
#include "base/error.h"
#include "base/id.h"
#include "base/result.h"

// Structured log of a daemon: an event name and key=value fields, one line each on stderr.
//
//   log::Info("sandbox.created", {{"sandbox_id", id}, {"ms", elapsed_ms}});
//
// Thread-safe and never throws. Each event name has a token bucket: lines beyond it are dropped and
// counted, in the metric dsec_log_suppressed_total{event} and in the field `suppressed` of the next
// line of that event. Values are escaped and cut to 4 KiB, so that hostile bytes can neither forge
// a line nor reach a terminal. Output of sandboxes never belongs here.
namespace dsec::log {

enum class Level { kDebug, kInfo, kWarn, kError };
enum class Format { kText, kJson };

// One value. Text is not copied and must outlive the call; an Error is rendered.
class Value {
 public:
  Value(bool value) : value_(value) {}              // NOLINT(google-explicit-constructor)
  Value(std::string_view value) : value_(value) {}  // NOLINT(google-explicit-constructor)
  Value(const std::string& value)
      : value_(std::string_view(value)) {}  // NOLINT(google-explicit-constructor)
  Value(const char* value)
      : value_(std::string_view(value)) {}  // NOLINT(google-explicit-constructor)
  Value(const dsec::Error& error)
      : value_(error.ToString()) {}  // NOLINT(google-explicit-constructor)
  template <typename Tag>
  Value(const StrongId<Tag>& id)
      : value_(std::string_view(id.str())) {}  // NOLINT(google-explicit-constructor)
  template <std::signed_integral T>
  Value(T value) : value_(static_cast<int64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  template <std::unsigned_integral T>
  Value(T value) : value_(static_cast<uint64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  template <std::floating_point T>
  Value(T value) : value_(static_cast<double>(value)) {}  // NOLINT(google-explicit-constructor)

  using Variant = std::variant<bool, int64_t, uint64_t, double, std::string_view, std::string>;
  const Variant& variant() const { return value_; }

 private:
  Variant value_;
};

struct Field {
  std::string_view key;  // [a-z0-9_]+, a literal
  Value value;
};
using Fields = std::initializer_list<Field>;

void Write(Level level, std::string_view event, Fields fields = {}) noexcept;
inline void Debug(std::string_view event, Fields fields = {}) noexcept {
  Write(Level::kDebug, event, fields);
}
inline void Info(std::string_view event, Fields fields = {}) noexcept {
  Write(Level::kInfo, event, fields);
}
inline void Warn(std::string_view event, Fields fields = {}) noexcept {
  Write(Level::kWarn, event, fields);
}
inline void Error(std::string_view event, Fields fields = {}) noexcept {
  Write(Level::kError, event, fields);
}

struct Options {
  Format format = Format::kText;
  Level level = Level::kInfo;
  // Token bucket of each event name: `burst` lines at once, refilled at `per_second`.
  uint32_t burst = 200;
  uint32_t per_second = 20;
  // Receives each line without its newline in place of stderr; called with a lock held.
  std::function<void(std::string_view)> sink;
  // Null: the system's.
  const Clock* clock = nullptr;
};

// May be called at any time; forgets the state of the rate limits.
void Configure(Options options);

// kInvalidArgument "config.invalid" for another word than text/json and debug/info/warn/error.
Result<Format> ParseFormat(std::string_view text);
Result<Level> ParseLevel(std::string_view text);

}  // namespace dsec::log
