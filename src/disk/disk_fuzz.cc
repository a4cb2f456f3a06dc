// SPDX-License-Identifier: Apache-2.0
// Layers, journals and records that somebody else has written. The first byte picks the reader.
#include <cstring>
#include <memory>
#include <string_view>

#include "base/check.h"
#include "disk/disk.h"
#include "disk/journal.h"
#include "disk/layer.h"

namespace {

using namespace dsec;
using namespace dsec::disk;

class Memory : public LayerFile {
 public:
  explicit Memory(std::span<const uint8_t> bytes) : bytes_(bytes.begin(), bytes.end()) {}
  uint64_t size() const override { return bytes_.size(); }
  void Read(uint64_t offset, std::span<uint8_t> out, Done done) override {
    // What has been checked never leads past the end.
    DSEC_CHECK(offset <= bytes_.size() && out.size() <= bytes_.size() - offset);
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    done(Ok());
  }

 private:
  const std::vector<uint8_t> bytes_;
};

void CheckExtents(std::span<const Extent> extents, uint64_t sectors) {
  uint64_t done = 0;
  for (const Extent& extent : extents) {
    DSEC_CHECK(extent.count > 0 && extent.first >= done && extent.end() <= sectors);
    done = extent.end();
  }
}

// Both ends of a layer take 8 KiB, which a fuzzer would spend its time on: header and trailer are
// given by what of them is not fixed.
void FuzzLayer(std::span<const uint8_t> bytes) {
  constexpr size_t kSaid = 28;
  if (bytes.size() < kSaid) return;
  LayerInfo info;
  std::memcpy(&info.flags, bytes.data(), 4);
  std::memcpy(&info.index_offset, bytes.data() + 4, 8);
  std::memcpy(&info.index_entries, bytes.data() + 12, 8);
  std::memcpy(&info.virtual_bytes, bytes.data() + 20, 8);
  bytes = bytes.subspan(kSaid);
  LayerInfo header;
  header.flags = kIsHeader | kIsData;
  const auto front = EncodeHeader(header), back = EncodeHeader(info);
  std::vector<uint8_t> file(front.begin(), front.end());
  file.insert(file.end(), bytes.begin(), bytes.end());
  file.insert(file.end(), back.begin(), back.end());
  const auto layer = OpenLayer(std::make_shared<Memory>(file));
  if (!layer.ok()) return;
  const auto index = (*layer)->ReadIndex();
  if (!index.ok()) return;
  CheckExtents(*index, (*layer)->info.virtual_bytes / kSectorBytes);
  uint64_t budget = 1 << 20;
  for (const Extent& extent : *index) {
    const uint64_t size = std::min<uint64_t>(uint64_t{extent.count} * kSectorBytes, budget);
    budget -= size;
    std::vector<uint8_t> out(size);
    if (!extent.zero) DSEC_CHECK((*layer)->file->ReadNow(extent.place * kSectorBytes, out).ok());
  }
  const auto again = EncodeIndex(*index);
  LayerInfo copy = (*layer)->info;
  copy.index_entries = again.size() / kEntryBytes;
  const auto parsed = ParseIndex(again, copy);
  DSEC_CHECK(parsed.ok() && *parsed == *index);
  const auto merged = Overlay(*index, *index);
  DSEC_CHECK(merged == *index);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const uint8_t> bytes(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      FuzzLayer(bytes);
      break;
    case 1: {
      const auto layer = OpenLayer(std::make_shared<Memory>(bytes));
      if (layer.ok()) static_cast<void>((*layer)->ReadIndex());
      break;
    }
    case 2: {
      const auto all = Journal::Parse(bytes, "fuzz", "boot");
      DSEC_CHECK(all.end <= bytes.size() && all.numbers.size() == all.writes.size());
      break;
    }
    default: {
      const auto record =
          DiskRecord::Parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      DSEC_CHECK(!record.ok() || DiskRecord::Parse(record->Encode()).ok());
    }
  }
  return 0;
}
