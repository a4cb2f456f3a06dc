// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "disk/extent.h"
#include "disk/journal.h"
#include "disk/lsmt.h"
#include "os/unique_fd.h"

namespace dsec::disk {

struct UpperOptions {
  std::string boot_id;                   // of this boot of the machine
  uint64_t max_dead_bytes = 256 << 20;   // more of it makes a write flush
  uint64_t min_journal_bytes = 1 << 20;  // smaller ones are not written anew
};

// The writable layer of a disk: a data file that grows and a journal (docs/design/disks.md, 4). One
// process has it open. Thread-safe; blocks on local disk. Errors: kResourceExhausted
// "disk.no_space", kInternal "disk.io".
class Upper {
 public:
  // Makes and syncs <uuid>.lsmt and <uuid>.journal in the folder; `info`: uuid, parent, size.
  static Result<std::unique_ptr<Upper>> Create(int dirfd, const LayerInfo& info,
                                               UpperOptions options);
  // What counts of it, see the design. kInternal "disk.corrupt".
  static Result<std::unique_ptr<Upper>> Open(int dirfd, const std::string& uuid,
                                             UpperOptions options);
  Upper(const Upper&) = delete;
  Upper& operator=(const Upper&) = delete;

  // What of the sectors [first, end) is here. The data may be read as long as the plan lives.
  class Plan {
   public:
    Plan(Upper* upper, uint64_t reader, std::vector<Extent> parts)
        : parts(std::move(parts)), upper_(upper), reader_(reader) {}
    Plan(Plan&& other) noexcept
        : parts(std::move(other.parts)),
          upper_(std::exchange(other.upper_, nullptr)),
          reader_(other.reader_) {}
    Plan& operator=(Plan&&) = delete;
    ~Plan() {
      if (upper_ != nullptr) upper_->EndRead(reader_);
    }
    const std::vector<Extent> parts;

   private:
    Upper* upper_;
    uint64_t reader_;
  };
  Plan Find(uint64_t first, uint64_t end);
  Result<void> ReadData(uint64_t offset, std::span<uint8_t> out) const;  // of the data file

  // Whole sectors from `first` on. False: [first, first + count) was not `expected` any more, and
  // nothing is changed.
  using Expected = std::vector<std::pair<std::pair<uint64_t, uint64_t>, std::vector<Extent>>>;
  Result<bool> Write(uint64_t first, std::span<const uint8_t> data, const Expected& expected);
  Result<void> Zero(uint64_t first, uint64_t count);
  Result<void> Flush();

  // Nobody writes meanwhile. The data file is a sealed layer then, as long as nothing is written.
  Result<void> Seal();

  const LayerInfo& info() const { return info_; }
  struct Usage {
    uint64_t live_bytes = 0;
    uint64_t dead_bytes = 0;  // not punched out yet
    uint64_t file_bytes = 0;
    uint64_t journal_bytes = 0;
    uint64_t extents = 0;
  };
  Usage usage() const;

 private:
  struct Dead {
    uint64_t place = 0;  // sectors
    uint64_t count = 0;
    uint64_t number = 0;  // record that made it dead
    uint64_t reader = 0;  // readers from this one on do not know it
  };
  Upper(int dirfd, LayerInfo info, UpperOptions options, os::UniqueFd data, Journal journal);
  void EndRead(uint64_t reader);
  Result<void> Record(const Extent& extent);
  void Kill(uint64_t place, uint64_t count, uint64_t number);
  void Punch();
  Result<void> Rewrite();
  Result<void> CheckUsable() const;
  std::string JournalName() const { return info_.uuid + ".journal"; }

  os::UniqueFd dir_;
  const LayerInfo info_;
  const UpperOptions options_;
  const os::UniqueFd data_;
  std::mutex flush_mutex_;    // one flush at a time
  mutable std::mutex mutex_;  // of all below
  Journal journal_;
  ExtentMap map_;
  uint64_t end_ = 0;      // of the data file, bytes
  uint64_t flushed_ = 0;  // last record whose data are on disk
  std::vector<Dead> dead_;
  uint64_t dead_bytes_ = 0;
  std::multiset<uint64_t> readers_;
  uint64_t next_reader_ = 1;
  bool failed_ = false;
  bool sealed_ = false;  // nothing has been written since
};

// Data of a layer: `uuid`.lsmt
std::string DataName(std::string_view uuid);

}  // namespace dsec::disk
