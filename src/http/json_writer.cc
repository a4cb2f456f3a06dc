// SPDX-License-Identifier: Apache-2.0
#include "http/json_writer.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"
#include "http/base64.h"

namespace dsec::http {
namespace {

constexpr bool IsPlain(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x20 && byte < 0x80 && c != '"' && c != '\\';
}

}  // namespace

void JsonWriter::Comma() {
  if (comma_) out_ += ',';
  comma_ = true;
}

void JsonWriter::Open(char c) {
  Comma();
  out_ += c;
  comma_ = false;
}

void JsonWriter::Close(char c) {
  out_ += c;
  comma_ = true;
}

void JsonWriter::Key(std::string_view key) {
  Comma();
  Quoted(key);
  out_ += ':';
  comma_ = false;
}

void JsonWriter::Value(std::string_view text) {
  Comma();
  Quoted(text);
}

void JsonWriter::Value(bool value) {
  Comma();
  out_ += value ? "true" : "false";
}

void JsonWriter::Value(double value) {
  DSEC_CHECK(std::isfinite(value));
  Comma();
  fmt::format_to(std::back_inserter(out_), "{}", value);
}

void JsonWriter::Null() {
  Comma();
  out_ += "null";
}

void JsonWriter::Integer(int64_t value) {
  Comma();
  const fmt::format_int text(value);
  out_.append(text.data(), text.size());
}

void JsonWriter::Unsigned(uint64_t value) {
  Comma();
  const fmt::format_int text(value);
  out_.append(text.data(), text.size());
}

void JsonWriter::Members(std::string_view members) {
  if (members.empty()) return;
  Comma();
  out_ += members;
}

void JsonWriter::Bytes(std::string_view key, std::string_view bytes) {
  if (IsUtf8(bytes)) {
    Field(key, bytes);
  } else {
    Base64(key, bytes);
  }
}

void JsonWriter::Base64(std::string_view key, std::string_view bytes) {
  Comma();
  out_ += '"';
  out_ += key;  // keys with this suffix are literals of ours
  out_ += "_b64\":";
  comma_ = false;
  Base64(bytes);
}

void JsonWriter::Base64(std::string_view bytes) {
  Comma();
  out_ += '"';
  AppendBase64(bytes, out_);
  out_ += '"';
}

void JsonWriter::Quoted(std::string_view text) {
  out_ += '"';
  while (!text.empty()) {
    size_t plain = 0;
    while (plain < text.size() && IsPlain(text[plain])) ++plain;
    out_.append(text.substr(0, plain));
    text.remove_prefix(plain);
    if (text.empty()) break;
    const char c = text[0];
    size_t length = 1;
    if (c == '"' || c == '\\') {
      out_ += '\\';
      out_ += c;
    } else if (c == '\n') {
      out_ += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(out_), "\\u{:04x}", static_cast<unsigned char>(c));
    } else if (length = Utf8SequenceLength(text); length == 0) {
      out_ += "\\ufffd";
      length = 1;
    } else {
      out_.append(text.substr(0, length));
    }
    text.remove_prefix(length);
  }
  out_ += '"';
}

std::string JsonMember(std::string_view key, std::string_view text) {
  std::string member;
  JsonWriter(member).Field(key, text);
  return member;
}

}  // namespace dsec::http
