// SPDX-License-Identifier: Apache-2.0
#include "rpc/wire.h"

namespace dsec::rpc {
namespace {

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

void AppendVarint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

}  // namespace

bool WireReader::Fail() {
  failed_ = true;
  rest_ = {};
  return false;
}

bool WireReader::ReadVarint(uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return Fail();
}

bool WireReader::Next() {
  if (rest_.empty()) return false;
  uint64_t tag = 0;
  if (!ReadVarint(tag)) return false;
  if (tag >> 3 == 0 || tag > UINT32_MAX) return Fail();
  field_ = static_cast<uint32_t>(tag >> 3);
  type_ = tag & 7;
  switch (type_) {
    case kVarint:
      return ReadVarint(number_);
    case kFixed64:
    case kFixed32: {
      const size_t size = type_ == kFixed64 ? 8 : 4;
      if (rest_.size() < size) return Fail();
      rest_.remove_prefix(size);
      return true;
    }
    case kLengthDelimited: {
      uint64_t size = 0;
      if (!ReadVarint(size)) return false;
      if (size > rest_.size()) return Fail();
      bytes_ = rest_.substr(0, size);
      rest_.remove_prefix(size);
      return true;
    }
    default:
      return Fail();
  }
}

uint64_t WireReader::Number() {
  if (type_ == kVarint) return number_;
  Fail();
  return 0;
}

std::string_view WireReader::Bytes() {
  if (type_ == kLengthDelimited) return bytes_;
  Fail();
  return {};
}

void AppendNumber(std::string& out, uint32_t field, uint64_t value) {
  if (value == 0) return;
  AppendVarint(out, field << 3 | kVarint);
  AppendVarint(out, value);
}

void AppendBytes(std::string& out, uint32_t field, std::string_view value) {
  if (value.empty()) return;
  AppendVarint(out, field << 3 | kLengthDelimited);
  AppendVarint(out, value.size());
  out += value;
}

}  // namespace dsec::rpc
