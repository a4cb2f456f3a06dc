// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace dsec::http {

// Names and values of a message that we write. Values must hold no CR or LF: they are literals,
// numbers or checked text.
using Headers = std::vector<std::pair<std::string, std::string>>;

// Case-insensitive for ASCII letters, as header names are.
bool EqualsIgnoreCase(std::string_view a, std::string_view b);

// Header fields of a message that was read, in one buffer that is used again for the next message.
class Fields {
 public:
  void Clear();
  void Add(std::string_view name, std::string_view value);
  size_t size() const { return entries_.size(); }
  std::string_view name(size_t i) const { return At(entries_[i].name, entries_[i].name_size); }
  std::string_view value(size_t i) const { return At(entries_[i].value, entries_[i].value_size); }
  // The first field of that name.
  std::optional<std::string_view> Find(std::string_view name) const;
  size_t Count(std::string_view name) const;

 private:
  struct Entry {
    uint32_t name;
    uint32_t name_size;
    uint32_t value;
    uint32_t value_size;
  };
  std::string_view At(uint32_t start, uint32_t size) const {
    return std::string_view(text_).substr(start, size);
  }

  std::string text_;
  std::vector<Entry> entries_;
};

// How the body of a message is delimited.
struct Framing {
  std::optional<uint64_t> length;  // Content-Length, 0 when a request has no body
  bool chunked = false;
  bool until_close = false;  // replies only
};

struct RequestHead {
  std::string method;
  std::string target;
  Fields fields;
  Framing framing;
  bool http11 = true;
  bool keep_alive = true;
  bool expect_continue = false;
};

struct ResponseHead {
  int status = 0;
  Fields fields;
  Framing framing;
  bool keep_alive = true;
};

// "Sun, 06 Nov 1994 08:49:37 GMT" (RFC 9110 section 5.6.7).
std::string HttpDate(WallTime time);

std::string_view StatusText(int status);
// The status of an error reply: that of the code, or what HTTP itself has for the reason (405, 408,
// 416, 431 ...).
int StatusOf(const Error& error);

}  // namespace dsec::http
