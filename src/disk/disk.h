// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "disk/layer.h"
#include "disk/upper.h"
#include "os/unique_fd.h"

namespace dsec::disk {

// A layer in the chain of a disk, as disk.json names it. Exactly one of the two.
struct LowerName {
  std::string file;       // in the folder of the disk, or an absolute path
  std::string published;  // hex of a published layer
};

// Finds published layers.
using FindPublished = std::function<Result<std::shared_ptr<const Layer>>(const std::string& hex)>;

struct DiskOptions {
  UpperOptions upper;  // without a boot id: that of this boot is taken
  FindPublished find_published;
};

// A disk: layers below, an upper on top (docs/design/disks.md). One process has the folder open.
// Thread-safe. Any number of reads and writes at once; a read does not wait for what hangs, nor
// does a seal. Errors: kInvalidArgument "disk.out_of_range", kResourceExhausted "disk.no_space",
// kInternal "disk.io", "disk.corrupt"; those of layers.
class Disk {
 public:
  // Makes the folder, which must not exist, and a disk over `lowers`, oldest first. Local layers
  // of another disk are linked into the folder where the file system can, else named by their
  // absolute path. kAlreadyExists "disk.exists".
  static Result<void> Create(const std::string& dir, uint64_t bytes,
                             const std::vector<LowerName>& lowers, const DiskOptions& options);
  // kConflict "disk.in_use": another process has it. Puts right what a death has left.
  static Result<std::unique_ptr<Disk>> Open(const std::string& dir, DiskOptions options);
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  uint64_t bytes() const { return bytes_; }
  const std::string& dir() const { return dir_; }

  using Done = LayerFile::Done;
  // Any bytes within the disk. `out` stays until `done`, which is called once: here, unless
  // something is read that does not lie here.
  void Read(uint64_t offset, std::span<uint8_t> out, Done done);
  Result<void> ReadNow(uint64_t offset, std::span<uint8_t> out);
  // Any bytes; there as a whole or not at all. May read around them (and so wait) when they do not
  // fill their sectors; `ReadsFirst` says so.
  Result<void> Write(uint64_t offset, std::span<const uint8_t> data);
  static bool ReadsFirst(uint64_t offset, uint64_t size) {
    return offset % kSectorBytes != 0 || size % kSectorBytes != 0;
  }
  // Reads as zero from now on, and its space comes back.
  Result<void> Zero(uint64_t offset, uint64_t size);
  // What was acknowledged before is on disk.
  Result<void> Flush();

  // Makes a layer of the upper, at one instant, and goes on with a new one. Its path.
  struct Sealed {
    std::string path;
    std::string uuid;
    uint64_t extents = 0;
    uint64_t data_bytes = 0;
  };
  Result<Sealed> Seal();
  // Makes one layer of `count` lowers from number `first` on (oldest 0), all of which must be there
  // to be read. kInvalidArgument "disk.out_of_range"; kConflict "disk.collapsing".
  Result<Sealed> Collapse(size_t first, size_t count);

  struct Info {
    uint64_t bytes = 0;
    std::vector<LowerName> lowers;
    std::vector<LayerInfo> layers;  // of them
    std::string upper_uuid;
    uint64_t extents = 0;  // of all lowers
    Upper::Usage upper;
  };
  Info info() const;

 private:
  // Replaced as a whole; who has one may read by it.
  struct State {
    std::vector<LowerName> names;
    std::vector<std::shared_ptr<const Layer>> layers;
    std::vector<Extent> merged;
    std::shared_ptr<Upper> upper;
  };
  struct Reading;
  Disk(std::string dir, DiskOptions options) : dir_(std::move(dir)), options_(std::move(options)) {}
  std::shared_ptr<const State> state() const;
  void SetState(std::shared_ptr<const State> state);
  Result<void> CheckRange(uint64_t offset, uint64_t size) const;
  void ReadFrom(const std::shared_ptr<const State>& state, uint64_t offset, std::span<uint8_t> out,
                Done done);
  Result<bool> TryWrite(uint64_t offset, std::span<const uint8_t> data);
  Result<void> Publish(const std::vector<LowerName>& names, const std::string& upper) const;
  void RemoveUnnamed() const;

  const std::string dir_;
  DiskOptions options_;
  os::UniqueFd folder_;
  os::UniqueFd lock_;
  uint64_t bytes_ = 0;
  std::shared_mutex gate_;          // shared: changes of the upper; alone: its replacement
  std::mutex chain_mutex_;          // changes of the chain, one at a time
  mutable std::mutex state_mutex_;  // of the pointer
  std::shared_ptr<const State> state_;
};

// What disk.json says.
struct DiskRecord {
  uint64_t bytes = 0;
  std::vector<LowerName> lowers;
  std::string upper;  // uuid
  std::string Encode() const;
  // kInternal "disk.corrupt".
  static Result<DiskRecord> Parse(std::string_view text);
};
inline constexpr char kRecordName[] = "disk.json";
inline constexpr char kLockName[] = "lock";

}  // namespace dsec::disk
