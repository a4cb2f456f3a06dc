// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "image/layer.h"

namespace dsec::image {

// Bounds of one import. What exceeds them is refused, whatever the archive says about itself.
struct ImportLimits {
  uint64_t max_bytes = uint64_t{64} << 30;  // sum of file sizes, holes included: "layer.too_large"
  uint64_t max_entries = 2'000'000;         // "layer.too_many_entries"
  uint64_t max_metadata_bytes = uint64_t{512}
                                << 20;  // names, link targets and xattrs: "layer.too_large"
  uint64_t max_depth = 256;             // folders above an entry: "layer.bad_path"
  uint64_t max_ratio = 100;             // of expansion, once over ratio_free_bytes: "layer.bomb"
  uint64_t ratio_free_bytes = uint64_t{1} << 30;
};

enum class EntryType { kFile, kDirectory, kSymlink, kHardlink, kCharDevice, kBlockDevice, kFifo };

// One member of an archive or folder. All strings are bytes as found and not to be trusted.
struct Entry {
  std::string path;
  EntryType type = EntryType::kFile;
  uint32_t mode = 0;  // permission bits with setuid, setgid and sticky
  uint32_t uid = 0;
  uint32_t gid = 0;
  int64_t mtime_sec = 0;
  uint32_t mtime_nsec = 0;
  uint32_t dev_major = 0;
  uint32_t dev_minor = 0;
  uint64_t size = 0;    // of a file
  std::string target;   // of a link
  bool opaque = false;  // a folder that hides what lower layers put into it
  std::vector<std::pair<std::string, std::string>> xattrs;
};

// A run of content; what no run covers is a hole. Empty at the end of the entry.
struct DataRun {
  uint64_t offset = 0;
  std::span<const uint8_t> bytes;  // valid until the next call on the source
};

// A stream of entries in the order of the archive. Single-threaded, blocking.
class EntrySource {
 public:
  virtual ~EntrySource() = default;
  // False at the end. What was not read of the entry before is skipped.
  virtual Result<bool> Next(Entry& entry) = 0;
  // Content of the file that Next gave last, in ascending order.
  virtual Result<DataRun> ReadData() = 0;
};

// An image to be imported: one or more layers, lowest first, each a stream of changes to those
// below.
class ImageReader {
 public:
  virtual ~ImageReader() = default;
  virtual size_t layer_count() const = 0;
  // Layers are opened and read one after the other.
  virtual Result<std::unique_ptr<EntrySource>> OpenLayer(size_t index) = 0;
  virtual const ImageConfig& config() const { return config_; }
  // Least space that the content will need once unpacked, for the check before the work; 0 when
  // nothing is known.
  virtual uint64_t least_bytes() const = 0;
  // Whether names that start with .wh. are whiteouts, as the OCI image specification has it.
  virtual bool has_whiteouts() const = 0;

 protected:
  ImageConfig config_;
};

// Things that were left out of a layer and why; bounded, for the report of the build.
class Warnings {
 public:
  void Add(std::string text) {
    if (list_.size() < kKept) list_.push_back(std::move(text));
    ++count_;
  }
  const std::vector<std::string>& list() const { return list_; }
  uint64_t count() const { return count_; }

 private:
  static constexpr size_t kKept = 100;
  std::vector<std::string> list_;
  uint64_t count_ = 0;
};

}  // namespace dsec::image
