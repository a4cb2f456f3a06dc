// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "aether/tar.h"
#include "base/check.h"

namespace {

// What the reader promises its user, whatever the input.
struct Judge : dsec::aether::TarReader::Sink {
  dsec::aether::TarEntry entry;
  uint64_t data = 0;
  bool open = false;

  dsec::Result<void> OnEntry(const dsec::aether::TarEntry& next) override {
    DSEC_CHECK(!open);
    DSEC_CHECK(next.path.size() < dsec::aether::TarReader::kMaxPath);
    DSEC_CHECK(next.link.size() < dsec::aether::TarReader::kMaxPath);
    DSEC_CHECK(next.mode <= 07777);
    entry = next;
    data = 0;
    open = true;
    return dsec::Ok();
  }
  dsec::Result<void> OnData(uint64_t offset, std::string_view bytes) override {
    DSEC_CHECK(open && offset <= entry.size && bytes.size() <= entry.size - offset);
    data += bytes.size();
    return dsec::Ok();
  }
  dsec::Result<void> OnEntryEnd() override {
    DSEC_CHECK(open && data == entry.stored);
    open = false;
    return dsec::Ok();
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Judge judge;
  dsec::aether::TarReader reader(judge);
  std::string_view input(reinterpret_cast<const char*>(bytes), size);
  size_t step = size > 0 ? 1 + bytes[0] * 7u : 1;
  for (size_t i = 0; i < input.size(); i += step) {
    if (!reader.Feed(input.substr(i, step)).ok()) return 0;
  }
  if (!reader.Finish().ok()) return 0;
  return 0;
}
