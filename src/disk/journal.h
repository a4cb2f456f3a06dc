// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "disk/extent.h"
#include "os/unique_fd.h"

namespace dsec::disk {

// What a journal says when it is read after a death.
struct Recovered {
  std::vector<Extent> writes;     // in their order; those that count
  std::vector<uint64_t> numbers;  // of the records of `writes`
  uint64_t last = 0;              // number of the last record that counts
  uint64_t flushed = 0;           // up to this record all data are on disk
  uint64_t end = 0;               // bytes of the file that hold whole records
  bool same_boot = false;         // all whole records count, else those up to `flushed`
};

// The journal of an upper: a file of records, each with a checksum, a number (one more than the one
// in front of it) and what it says:
//   entries   where the sectors of one write are, as entries of an index
//   flushed   the data of all records up to a number are on disk
//   opened    in which boot of the machine the records from here on were written
//   broken    data that records name may have been lost: as if the boot had ended
// Not thread-safe. Blocks on local disk.
class Journal {
 public:
  // `uuid` makes the records of one upper those of no other.
  static Result<Journal> Create(int dirfd, const std::string& name, std::string_view uuid);
  static Result<Journal> Open(int dirfd, const std::string& name, std::string_view uuid);

  // Of any content; what is not a whole record ends it. `boot_id`: of this boot.
  static Recovered Parse(std::span<const uint8_t> bytes, std::string_view uuid,
                         std::string_view boot_id);
  Result<Recovered> Recover(std::string_view boot_id);

  // Each returns the number of the record; on failure nothing has been added. Not synced.
  Result<uint64_t> AddEntries(std::span<const Extent> extents);
  Result<uint64_t> AddFlushed(uint64_t upto);
  Result<uint64_t> AddOpened(std::string_view boot_id);
  Result<uint64_t> AddBroken();
  Result<void> Sync();
  uint64_t bytes() const { return end_; }
  uint64_t last() const { return last_; }
  // What follows `recovered` is cut off.
  Result<void> Continue(const Recovered& recovered);

 private:
  Journal(os::UniqueFd fd, std::string_view uuid);
  Result<uint64_t> Add(uint16_t kind, uint64_t value, std::span<const uint8_t> payload);

  os::UniqueFd fd_;
  std::string uuid_;
  uint64_t seed_ = 0;
  uint64_t end_ = 0;
  uint64_t last_ = 0;
  bool damaged_ = false;  // an addition failed and could not be cut off
};

}  // namespace dsec::disk
