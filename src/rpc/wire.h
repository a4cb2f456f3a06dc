// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

// The protobuf wire format (protobuf.dev/programming-guides/encoding), as much as the envelopes of
// ttrpc need. By hand because the generated code allocates an object for each element of a repeated
// field: a frame of empty elements would take some forty times its size.
namespace dsec::rpc {

// Walks the fields of one message without copying. Fails for what is no message.
class WireReader {
 public:
  explicit WireReader(std::string_view message) : rest_(message) {}
  // Steps to the next field; false at the end and on failure.
  bool Next();
  bool failed() const { return failed_; }

  uint32_t field() const { return field_; }
  // The two accessors fail the reader when the field has another type.
  uint64_t Number();
  std::string_view Bytes();

 private:
  bool ReadVarint(uint64_t& value);
  bool Fail();

  std::string_view rest_;
  uint32_t field_ = 0;
  uint32_t type_ = 0;
  uint64_t number_ = 0;
  std::string_view bytes_;
  bool failed_ = false;
};

// Append one field; nothing when the value is the default.
void AppendNumber(std::string& out, uint32_t field, uint64_t value);
void AppendBytes(std::string& out, uint32_t field, std::string_view value);

}  // namespace dsec::rpc
