// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <mutex>

#include "base/metrics.h"
#include "base/utf8.h"

namespace dsec::log {
namespace {

constexpr size_t kMaxValueBytes = 4096;
// Event names are literals; the bound holds even where one is made up at run time.
constexpr size_t kMaxEvents = 1024;

std::string_view LevelName(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarn:
      return "warn";
    case Level::kError:
      return "error";
  }
  return "error";
}

std::string Timestamp(WallTime time) {
  const int64_t millis = UnixMillis(time);
  const time_t seconds = static_cast<time_t>(millis / 1000);
  tm parts = {};
  gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     millis % 1000);
}

// Escapes for a JSON string and, in text format, for a quoted value: the same rules, except that a
// byte that is not UTF-8 becomes U+FFFD in JSON and \xNN in text. Controls of ISO 6429's second set
// (U+0080..U+009F) are escaped too, because terminals obey them.
void AppendEscaped(std::string& out, std::string_view text, Format format) {
  const size_t cut = text.size() > kMaxValueBytes ? text.size() - kMaxValueBytes : 0;
  text = text.substr(0, kMaxValueBytes);
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const unsigned char c = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      if (format == Format::kJson) {
        out += "\\ufffd";
      } else {
        out += fmt::format("\\x{:02x}", c);
      }
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += text[0];
    } else if (c == '\n') {
      out += "\\n";
    } else if (c < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04x}", c);
    } else if (length == 2 && c == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(text[1]));
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  if (cut > 0) out += fmt::format("...[{} bytes more]", cut);
}

bool NeedsQuotes(std::string_view text) {
  return text.empty() || text.size() > kMaxValueBytes ||
         !std::all_of(text.begin(), text.end(), [](char c) {
           return c > 0x20 && c < 0x7f && c != '"' && c != '\\' && c != '=';
         });
}

void AppendText(std::string& out, std::string_view text, Format format) {
  if (format == Format::kText && !NeedsQuotes(text)) {
    out += text;
    return;
  }
  out += '"';
  AppendEscaped(out, text, format);
  out += '"';
}

void AppendValue(std::string& out, const Value& value, Format format) {
  std::visit(
      [&](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_convertible_v<T, std::string_view>) {
          AppendText(out, held, format);
        } else if constexpr (std::is_same_v<T, double>) {
          out += std::isfinite(held) ? fmt::format("{}", held) : "null";
        } else {
          out += fmt::format("{}", held);
        }
      },
      value.variant());
}

void AppendField(std::string& out, std::string_view key, const Value& value, Format format) {
  if (format == Format::kJson) {
    out += ",\"";
    AppendEscaped(out, key, format);
    out += "\":";
  } else {
    out += ' ';
    AppendEscaped(out, key, format);
    out += '=';
  }
  AppendValue(out, value, format);
}

std::string Render(WallTime time, Level level, std::string_view event, Fields fields,
                   uint64_t suppressed, Format format) {
  std::string out;
  if (format == Format::kJson) {
    out = fmt::format("{{\"ts\":\"{}\",\"level\":\"{}\",\"event\":", Timestamp(time),
                      LevelName(level));
  } else {
    out = fmt::format("{} {:<5} ", Timestamp(time), LevelName(level));
  }
  AppendText(out, event, format);
  for (const Field& field : fields) AppendField(out, field.key, field.value, format);
  if (suppressed > 0) AppendField(out, "suppressed", suppressed, format);
  if (format == Format::kJson) out += '}';
  return out;
}

class Logger {
 public:
  Logger() : stderr_(std::make_shared<spdlog::sinks::stderr_sink_st>()), logger_("dsec", stderr_) {
    logger_.set_formatter(std::make_unique<spdlog::pattern_formatter>("%v"));
    logger_.set_level(spdlog::level::trace);
    logger_.flush_on(spdlog::level::trace);
  }

  void Configure(Options options) {
    const std::lock_guard lock(mutex_);
    options_ = std::move(options);
    buckets_.clear();
  }

  void Write(Level level, std::string_view event, Fields fields) {
    const std::lock_guard lock(mutex_);
    if (level < options_.level) return;
    const Clock& clock = options_.clock != nullptr ? *options_.clock : Clock::System();
    uint64_t suppressed = 0;
    if (!Admit(event, clock.Mono(), suppressed)) return;
    const std::string line =
        Render(clock.Wall(), level, event, fields, suppressed, options_.format);
    if (options_.sink) {
      options_.sink(line);
    } else {
      logger_.log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
    }
  }

 private:
  struct Bucket {
    double tokens;
    MonoTime refilled;
    uint64_t suppressed = 0;
  };

  bool Admit(std::string_view event, MonoTime now, uint64_t& suppressed) {
    auto found = buckets_.find(event);
    if (found == buckets_.end()) {
      if (buckets_.size() >= kMaxEvents) event = "other";
      found = buckets_.try_emplace(std::string(event), Bucket{double(options_.burst), now}).first;
    }
    Bucket& bucket = found->second;
    const double seconds = std::chrono::duration<double>(now - bucket.refilled).count();
    bucket.tokens = std::min(double(options_.burst), bucket.tokens + seconds * options_.per_second);
    bucket.refilled = now;
    if (bucket.tokens < 1) {
      ++bucket.suppressed;
      metrics::Registry::Global()
          .GetCounter("dsec_log_suppressed_total", "Log lines dropped by the rate limit.",
                      {{"event", std::string(event)}})
          .Add();
      return false;
    }
    bucket.tokens -= 1;
    suppressed = std::exchange(bucket.suppressed, 0);
    return true;
  }

  std::mutex mutex_;
  Options options_;
  std::map<std::string, Bucket, std::less<>> buckets_;
  // Under mutex_, hence without a lock of its own.
  std::shared_ptr<spdlog::sinks::stderr_sink_st> stderr_;
  spdlog::logger logger_;
};

Logger& Instance() {
  // Never destroyed: threads may still log while static objects go.
  static Logger* const kLogger = new Logger();
  return *kLogger;
}

dsec::Error Invalid(std::string_view what, std::string_view text, std::string_view rule) {
  return dsec::Error(Code::kInvalidArgument, "config.invalid",
                     fmt::format("{} is \"{}\"; must be {}", what, text, rule));
}

}  // namespace

void Write(Level level, std::string_view event, Fields fields) noexcept {
  try {
    Instance().Write(level, event, fields);
  } catch (...) {
    // Out of memory or a broken sink: the caller's work matters more than this line.
    std::fputs("dsec: a log line was lost\n", stderr);
  }
}

void Configure(Options options) { Instance().Configure(std::move(options)); }

Result<Format> ParseFormat(std::string_view text) {
  if (text == "text") return Format::kText;
  if (text == "json") return Format::kJson;
  return Invalid("log format", text, "text or json");
}

Result<Level> ParseLevel(std::string_view text) {
  for (Level level : {Level::kDebug, Level::kInfo, Level::kWarn, Level::kError}) {
    if (text == LevelName(level)) return level;
  }
  return Invalid("log level", text, "debug, info, warn or error");
}

}  // namespace dsec::log
