// SPDX-License-Identifier: Apache-2.0
#include "http/message.h"

#include <algorithm>
#include <ctime>

namespace dsec::http {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; }

}  // namespace

bool EqualsIgnoreCase(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return Lower(x) == Lower(y); });
}

void Fields::Clear() {
  text_.clear();
  entries_.clear();
}

void Fields::Add(std::string_view name, std::string_view value) {
  Entry entry;
  entry.name = static_cast<uint32_t>(text_.size());
  entry.name_size = static_cast<uint32_t>(name.size());
  text_ += name;
  entry.value = static_cast<uint32_t>(text_.size());
  entry.value_size = static_cast<uint32_t>(value.size());
  text_ += value;
  entries_.push_back(entry);
}

std::optional<std::string_view> Fields::Find(std::string_view name) const {
  for (size_t i = 0; i < size(); ++i) {
    if (EqualsIgnoreCase(this->name(i), name)) return value(i);
  }
  return std::nullopt;
}

size_t Fields::Count(std::string_view name) const {
  size_t count = 0;
  for (size_t i = 0; i < size(); ++i) count += EqualsIgnoreCase(this->name(i), name) ? 1 : 0;
  return count;
}

std::string HttpDate(WallTime time) {
  // Not strftime: its names follow the locale.
  static constexpr std::string_view kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr std::string_view kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                 "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const time_t seconds = std::chrono::system_clock::to_time_t(time);
  tm parts{};
  if (gmtime_r(&seconds, &parts) == nullptr) return "Thu, 01 Jan 1970 00:00:00 GMT";
  return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[parts.tm_wday], parts.tm_mday,
                     kMonths[parts.tm_mon], parts.tm_year + 1900, parts.tm_hour, parts.tm_min,
                     parts.tm_sec);
}

std::string_view StatusText(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 201:
      return "Created";
    case 202:
      return "Accepted";
    case 204:
      return "No Content";
    case 206:
      return "Partial Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 410:
      return "Gone";
    case 412:
      return "Precondition Failed";
    case 413:
      return "Content Too Large";
    case 416:
      return "Range Not Satisfiable";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 499:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Unknown";
  }
}

int StatusOf(const Error& error) {
  static constexpr std::pair<std::string_view, int> kOfReason[] = {
      {"request.method", 405},
      {"request.timeout", 408},
      {"file.range", 416},
      {"request.expectation", 417},
      {"request.head_too_large", 431},
      {"request.transfer_coding", 501},
      {"request.version", 505},
  };
  for (const auto& [reason, status] : kOfReason) {
    if (error.reason() == reason) return status;
  }
  return HttpStatus(error.code());
}

}  // namespace dsec::http
