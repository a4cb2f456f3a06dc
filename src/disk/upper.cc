// SPDX-License-Identifier: Apache-2.0
#include "disk/upper.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/fault.h"
#include "base/log.h"
#include "disk/layer.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

constexpr uint64_t kBlock = 4096;  // what a file system can punch out
constexpr size_t kRecordEntries = 2048;

uint64_t RoundUp(uint64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

}  // namespace

std::string DataName(std::string_view uuid) { return std::string(uuid) + ".lsmt"; }

Upper::Upper(int dirfd, LayerInfo info, UpperOptions options, os::UniqueFd data, Journal journal)
    : dir_(dirfd),
      info_(std::move(info)),
      options_(std::move(options)),
      data_(std::move(data)),
      journal_(std::move(journal)) {}

Result<std::unique_ptr<Upper>> Upper::Create(int dirfd, const LayerInfo& info,
                                             UpperOptions options) {
  DSEC_TRY_VOID(CheckDiskBytes(info.virtual_bytes));
  DSEC_TRY(auto dir, os::OpenAt(dirfd, ".", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(auto data, os::OpenAt(dirfd, DataName(info.uuid).c_str(),
                                 O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  LayerInfo header = info;
  header.flags = kIsHeader | kIsData;
  DSEC_TRY_VOID(WriteFully(data.get(), 0, EncodeHeader(header)));
  DSEC_TRY(auto journal, Journal::Create(dirfd, info.uuid + ".journal", info.uuid));
  DSEC_TRY_VOID(journal.AddOpened(options.boot_id));
  DSEC_FAULT_POINT("disk.upper.created");
  if (::fsync(data.get()) != 0 || ::fsync(dir.get()) != 0) return DiskError("make an upper");
  DSEC_TRY_VOID(journal.Sync());
  std::unique_ptr<Upper> upper(new Upper(dir.Release(), std::move(header), std::move(options),
                                         std::move(data), std::move(journal)));
  upper->end_ = kHeaderBytes;
  upper->flushed_ = upper->journal_.last();
  return upper;
}

Result<std::unique_ptr<Upper>> Upper::Open(int dirfd, const std::string& uuid,
                                           UpperOptions options) {
  DSEC_TRY(auto dir, os::OpenAt(dirfd, ".", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(auto data, os::OpenAt(dirfd, DataName(uuid).c_str(), O_RDWR | O_NOFOLLOW));
  HeaderBlock block;
  DSEC_TRY_VOID(ReadFully(data.get(), 0, block));
  DSEC_TRY(auto info, ParseHeader(block).Context("upper {}", uuid));
  const auto corrupt = [&](std::string what) {
    return Error(Code::kInternal, "disk.corrupt", fmt::format("upper {}: {}", uuid, what));
  };
  if (info.uuid != uuid) return corrupt(fmt::format("its data are those of \"{}\"", info.uuid));
  DSEC_TRY_VOID(CheckDiskBytes(info.virtual_bytes));
  struct stat status;
  if (::fstat(data.get(), &status) != 0) return DiskError("look at an upper");
  DSEC_TRY(auto journal, Journal::Open(dirfd, uuid + ".journal", uuid));
  DSEC_TRY(const auto recovered, journal.Recover(options.boot_id));
  std::unique_ptr<Upper> upper(new Upper(dir.Release(), std::move(info), std::move(options),
                                         std::move(data), std::move(journal)));
  const std::lock_guard lock(upper->mutex_);
  const uint64_t disk_end = upper->info_.virtual_bytes / kSectorBytes;
  const uint64_t file_end = static_cast<uint64_t>(status.st_size) / kSectorBytes;
  for (const Extent& extent : recovered.writes) {
    if (extent.end() > disk_end || (!extent.zero && (extent.place < kHeaderBytes / kSectorBytes ||
                                                     extent.place + extent.count > file_end)))
      return corrupt(fmt::format("its journal names {} sectors at {} in place {}", extent.count,
                                 extent.first, extent.place));
    upper->map_.Put(extent, [](const Extent&) {});
  }
  upper->end_ = RoundUp(std::max<uint64_t>(static_cast<uint64_t>(status.st_size), kHeaderBytes));
  DSEC_TRY_VOID(upper->journal_.Continue(recovered));
  if (recovered.same_boot) {
    upper->flushed_ = recovered.flushed;
  } else {
    // What did not count must not count when it is read the next time.
    log::Info("disk.recovered", {{"upper", uuid}, {"extents", upper->map_.size()}});
    DSEC_TRY_VOID(upper->Rewrite());
  }
  DSEC_TRY_VOID(upper->journal_.AddOpened(upper->options_.boot_id));
  // All that nothing names is dead.
  auto live = WithoutZeros(upper->map_.All());
  std::ranges::sort(live, {}, &Extent::place);
  uint64_t at = kHeaderBytes / kSectorBytes;
  for (const Extent& extent : live) {
    if (extent.place > at) upper->Kill(at, extent.place - at, upper->journal_.last());
    at = std::max(at, extent.place + extent.count);
  }
  if (upper->end_ / kSectorBytes > at)
    upper->Kill(at, upper->end_ / kSectorBytes - at, upper->journal_.last());
  return upper;
}

Result<void> Upper::CheckUsable() const {
  if (!failed_) return Ok();
  return Error(Code::kInternal, "disk.io",
               fmt::format("upper {} failed to reach the disk before; open it again", info_.uuid));
}

Upper::Plan Upper::Find(uint64_t first, uint64_t end) {
  const std::lock_guard lock(mutex_);
  const uint64_t reader = next_reader_++;
  readers_.insert(reader);
  return {this, reader, map_.Find(first, end)};
}

void Upper::EndRead(uint64_t reader) {
  const std::lock_guard lock(mutex_);
  readers_.erase(readers_.find(reader));
}

Result<void> Upper::ReadData(uint64_t offset, std::span<uint8_t> out) const {
  return ReadFully(data_.get(), offset, out);
}

Result<bool> Upper::Write(uint64_t first, std::span<const uint8_t> data, const Expected& expected) {
  Extent extent;
  extent.first = first;
  extent.count = static_cast<uint32_t>(data.size() / kSectorBytes);
  bool flush = false;
  {
    const std::lock_guard lock(mutex_);
    DSEC_TRY_VOID(CheckUsable());
    sealed_ = false;
    if (data.size() % kBlock == 0) end_ = RoundUp(end_);
    extent.place = end_ / kSectorBytes;
    end_ += data.size();
    flush = dead_bytes_ > options_.max_dead_bytes;
  }
  auto written = fault::Point("disk.upper.before_data");
  if (written.ok()) written = WriteFully(data_.get(), extent.place * kSectorBytes, data);
  if (written.ok()) written = fault::Point("disk.upper.after_data");
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [range, parts] : expected)
      changed = changed || map_.Find(range.first, range.second) != parts;
    if (written.ok() && !changed) written = Record(extent);
    if (!written.ok() || changed) Kill(extent.place, extent.count, journal_.last());
  }
  DSEC_TRY_VOID(std::move(written));
  DSEC_FAULT_POINT("disk.upper.after_record");
  if (flush) DSEC_TRY_VOID(Flush());
  return !changed;
}

Result<void> Upper::Record(const Extent& extent) {
  DSEC_TRY_VOID(CheckUsable());
  sealed_ = false;
  DSEC_TRY(const uint64_t number, journal_.AddEntries({&extent, 1}));
  map_.Put(extent, [&](const Extent& old) { Kill(old.place, old.count, number); });
  return Ok();
}

Result<void> Upper::Zero(uint64_t first, uint64_t count) {
  // As many sectors as one record can name.
  constexpr uint64_t kMost = kRecordEntries * uint64_t{kMaxEntrySectors};
  const std::lock_guard lock(mutex_);
  while (count > 0) {
    Extent extent;
    extent.first = first;
    extent.count = static_cast<uint32_t>(std::min(count, kMost));
    extent.zero = true;
    DSEC_TRY_VOID(Record(extent));
    first += extent.count;
    count -= extent.count;
  }
  return Ok();
}

void Upper::Kill(uint64_t place, uint64_t count, uint64_t number) {
  dead_bytes_ += count * kSectorBytes;
  // What is written in a row dies in a row.
  if (!dead_.empty() && dead_.back().place + dead_.back().count == place &&
      dead_.back().reader == next_reader_) {
    dead_.back().count += count;
    dead_.back().number = number;
    return;
  }
  dead_.push_back({place, count, number, next_reader_});
}

Result<void> Upper::Flush() {
  const std::lock_guard one(flush_mutex_);
  uint64_t upto = 0;
  {
    const std::lock_guard lock(mutex_);
    DSEC_TRY_VOID(CheckUsable());
    if (sealed_) return Ok();
    upto = journal_.last();
  }
  auto synced = fault::Point("disk.flush.data_sync");
  if (synced.ok() && ::fdatasync(data_.get()) != 0) synced = DiskError("sync an upper");
  if (synced.ok()) synced = fault::Point("disk.flush.after_data_sync");
  {
    const std::lock_guard lock(mutex_);
    if (synced.ok()) {
      auto marked = journal_.AddFlushed(upto);
      if (!marked.ok()) synced = std::move(marked).error();
    }
  }
  if (synced.ok()) synced = fault::Point("disk.flush.after_marker");
  if (synced.ok()) synced = journal_.Sync();
  const std::lock_guard lock(mutex_);
  if (!synced.ok()) {
    failed_ = true;  // pages that could not be written may have gone from memory
    static_cast<void>(journal_.AddBroken());
    log::Error("disk.flush_failed", {{"upper", info_.uuid}, {"error", synced.error()}});
    return synced;
  }
  flushed_ = upto;
  Punch();
  const uint64_t live = map_.size() * (kEntryBytes + 40);
  if (journal_.bytes() > options_.min_journal_bytes && journal_.bytes() > 4 * live) {
    // Data of writes since then are not on disk, and the new journal says that all are.
    if (journal_.last() != upto + 1 && ::fdatasync(data_.get()) != 0) {
      failed_ = true;
      static_cast<void>(journal_.AddBroken());
      return DiskError("sync an upper");
    }
    auto rewritten = Rewrite();
    if (!rewritten.ok()) log::Warn("disk.journal_stays", {{"error", rewritten.error()}});
  }
  return Ok();
}

// Whole blocks of what is dead for good. What cannot be punched out stays.
void Upper::Punch() {
  const uint64_t oldest = readers_.empty() ? UINT64_MAX : *readers_.begin();
  std::vector<Dead> kept;
  for (const Dead& dead : dead_) {
    if (dead.number > flushed_ || dead.reader > oldest) {
      kept.push_back(dead);
      continue;
    }
    dead_bytes_ -= dead.count * kSectorBytes;
    const uint64_t from = RoundUp(dead.place * kSectorBytes);
    const uint64_t to = (dead.place + dead.count) * kSectorBytes / kBlock * kBlock;
    if (from < to)
      static_cast<void>(::fallocate(data_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                    static_cast<off_t>(from), static_cast<off_t>(to - from)));
  }
  dead_ = std::move(kept);
}

// A journal of what is live, all of which is on disk. The old one stays when this fails.
Result<void> Upper::Rewrite() {
  const std::string fresh = JournalName() + ".new";
  DSEC_TRY(auto journal, Journal::Create(dir_.get(), fresh, info_.uuid));
  // Numbers go on, as what is dead knows them.
  Recovered none;
  none.last = journal_.last();
  DSEC_TRY_VOID(journal.Continue(none));
  const auto all = map_.All();
  std::vector<Extent> record;
  for (const Extent& whole : all) {
    for (uint64_t first = whole.first; first < whole.end();) {
      const uint64_t end = std::min<uint64_t>(whole.end(), first + kMaxEntrySectors);
      record.push_back(Clip(whole, first, end));
      first = end;
      if (record.size() < kRecordEntries) continue;
      DSEC_TRY_VOID(journal.AddEntries(record));
      record.clear();
    }
  }
  if (!record.empty()) DSEC_TRY_VOID(journal.AddEntries(record));
  DSEC_TRY_VOID(journal.AddOpened(options_.boot_id));
  DSEC_TRY_VOID(journal.AddFlushed(journal.last()));
  DSEC_TRY_VOID(journal.Sync());
  DSEC_FAULT_POINT("disk.journal.before_rename");
  if (::renameat(dir_.get(), fresh.c_str(), dir_.get(), JournalName().c_str()) != 0)
    return DiskError("replace a journal");
  journal_ = std::move(journal);
  flushed_ = journal_.last();
  DSEC_FAULT_POINT("disk.journal.after_rename");
  if (::fsync(dir_.get()) != 0) return DiskError("sync a folder");
  return Ok();
}

Result<void> Upper::Seal() {
  DSEC_TRY_VOID(Flush());
  const std::lock_guard lock(mutex_);
  const auto extents = map_.All();
  LayerInfo info = info_;
  info.flags = kIsData | kIsSealed | kInfoValid;
  info.index_offset = RoundUp(end_);
  info.index_entries = EntriesFor(extents);
  if (info.index_entries > kMaxEntries) {
    return Error(
        Code::kResourceExhausted, "disk.too_many_extents",
        fmt::format("{} entries, a layer has {} at most", info.index_entries, kMaxEntries));
  }
  const auto index = EncodeIndex(extents);
  const uint64_t trailer = RoundUp(info.index_offset + index.size());
  // Should this layer go on being written to, they are dead.
  end_ = trailer + kHeaderBytes;
  Kill(info.index_offset / kSectorBytes, (end_ - info.index_offset) / kSectorBytes,
       journal_.last());
  DSEC_TRY_VOID(WriteFully(data_.get(), info.index_offset, index));
  DSEC_FAULT_POINT("disk.seal.after_index");
  DSEC_TRY_VOID(WriteFully(data_.get(), trailer, EncodeHeader(info)));
  if (::fdatasync(data_.get()) != 0) return DiskError("sync a sealed layer");
  sealed_ = true;
  return Ok();
}

Upper::Usage Upper::usage() const {
  const std::lock_guard lock(mutex_);
  return {map_.live_sectors() * kSectorBytes, dead_bytes_, end_, journal_.bytes(), map_.size()};
}

}  // namespace dsec::disk
