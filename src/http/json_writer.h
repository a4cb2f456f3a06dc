// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace dsec::http {

// Appends JSON to a string, compact and in the order of the calls; the caller keeps Begin and End
// in pairs. Text that is not UTF-8 has each bad byte replaced by U+FFFD, so that what is written is
// always valid.
class JsonWriter {
 public:
  explicit JsonWriter(std::string& out) : out_(out) {}

  void BeginObject() { Open('{'); }
  void BeginObject(std::string_view key) { Key(key), Open('{'); }
  void EndObject() { Close('}'); }
  void BeginArray() { Open('['); }
  void BeginArray(std::string_view key) { Key(key), Open('['); }
  void EndArray() { Close(']'); }

  void Key(std::string_view key);
  void Value(std::string_view text);
  void Value(const std::string& text) { Value(std::string_view(text)); }
  void Value(const char* text) { Value(std::string_view(text)); }
  void Value(bool value);
  void Value(double value);  // must be finite
  template <std::signed_integral T>
  void Value(T value) {
    Integer(static_cast<int64_t>(value));
  }
  template <std::unsigned_integral T>
    requires(!std::same_as<T, bool>)
  void Value(T value) {
    Unsigned(value);
  }
  void Null();

  template <typename T>
  void Field(std::string_view key, const T& value) {
    Key(key);
    Value(value);
  }
  // Ready-made members of the object under way, or nothing.
  void Members(std::string_view members);
  // `key` when the bytes are UTF-8, else `key`_b64.
  void Bytes(std::string_view key, std::string_view bytes);
  // `key`_b64, whatever the bytes are.
  void Base64(std::string_view key, std::string_view bytes);
  // Without a key: an element of an array.
  void Base64(std::string_view bytes);

 private:
  void Comma();
  void Open(char c);
  void Close(char c);
  void Integer(int64_t value);
  void Unsigned(uint64_t value);
  void Quoted(std::string_view text);

  std::string& out_;
  bool comma_ = false;  // before the next key or element
};

// "key":"text", as one member for Members.
std::string JsonMember(std::string_view key, std::string_view text);

}  // namespace dsec::http
