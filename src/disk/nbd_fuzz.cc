// SPDX-License-Identifier: Apache-2.0
// A client that says anything: the handshake is given unless the first byte is odd.
#include <array>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "disk/nbd.h"

namespace {

using namespace dsec;
using namespace dsec::disk;

class Memory : public NbdTarget {
 public:
  uint64_t size() const override { return bytes_.size(); }
  void Read(uint64_t offset, std::span<uint8_t> out, Done done) override {
    Check(offset, out.size());
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    done(Ok());
  }
  Result<void> Write(uint64_t offset, std::span<const uint8_t> data) override {
    Check(offset, data.size());
    std::memcpy(bytes_.data() + offset, data.data(), data.size());
    return Ok();
  }
  Result<void> Zero(uint64_t offset, uint64_t size) override {
    Check(offset, size);
    return Ok();
  }
  Result<void> Flush() override { return Ok(); }

 private:
  void Check(uint64_t offset, uint64_t size) const {
    DSEC_CHECK(offset <= bytes_.size() && size <= bytes_.size() - offset);
  }
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(64 << 10);
};

class Stream : public NbdStream {
 public:
  explicit Stream(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {}
  bool ReadExact(std::span<uint8_t> out) override {
    if (out.size() > bytes_.size() - at_) return false;
    if (out.empty()) return true;
    std::memcpy(out.data(), bytes_.data() + at_, out.size());
    at_ += out.size();
    return true;
  }
  bool Write(std::span<const std::span<const uint8_t>>) override { return true; }

 private:
  const std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<uint8_t> bytes;
  if (data[0] % 2 == 0) {
    constexpr std::array<uint8_t, 20> kHello = {0,   0,   0, 3, 'I', 'H', 'A', 'V', 'E', 'O',
                                                'P', 'T', 0, 0, 0,   1,   0,   0,   0,   0};
    bytes.assign(kHello.begin(), kHello.end());
  }
  bytes.insert(bytes.end(), data + 1, data + size);
  Memory memory;
  static_cast<void>(ServeNbd(std::make_shared<Stream>(std::move(bytes)), memory));
  return 0;
}
