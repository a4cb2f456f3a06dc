// SPDX-License-Identifier: Apache-2.0
#include "disk/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/fault.h"
#include "disk/layer.h"
#include "disk/lsmt.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

constexpr uint32_t kMagic = 0x4C4A4B44;  // "DKJL"
constexpr uint16_t kEntries = 1, kFlushed = 2, kOpened = 3, kBroken = 4;
constexpr uint32_t kMaxPayload = 64 << 10;
constexpr size_t kMaxJournal = size_t{1} << 31;  // it is written anew long before
constexpr size_t kBootBytes = 36;

struct RecordHeader {
  uint32_t magic;
  uint16_t kind;
  uint16_t reserved;
  uint64_t number;
  uint64_t value;  // of kFlushed
  uint32_t payload;
  uint32_t reserved2;
  uint64_t checksum;  // of all in front of it and the payload
};
static_assert(sizeof(RecordHeader) == 40);

uint64_t ChecksumOf(const RecordHeader& header, std::span<const uint8_t> payload, uint64_t seed) {
  const uint64_t first = ::XXH64(&header, offsetof(RecordHeader, checksum), seed);
  return ::XXH64(payload.data(), payload.size(), first);
}

uint64_t SeedOf(std::string_view uuid) { return ::XXH64(uuid.data(), uuid.size(), 0); }

std::string_view TextOf(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Journal::Journal(os::UniqueFd fd, std::string_view uuid)
    : fd_(std::move(fd)), uuid_(uuid), seed_(SeedOf(uuid)) {}

Result<Journal> Journal::Create(int dirfd, const std::string& name, std::string_view uuid) {
  DSEC_TRY(auto fd, os::OpenAt(dirfd, name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600));
  return Journal(std::move(fd), uuid);
}

Result<Journal> Journal::Open(int dirfd, const std::string& name, std::string_view uuid) {
  DSEC_TRY(auto fd, os::OpenAt(dirfd, name.c_str(), O_RDWR | O_NOFOLLOW));
  return Journal(std::move(fd), uuid);
}

Recovered Journal::Parse(std::span<const uint8_t> bytes, std::string_view uuid,
                         std::string_view boot_id) {
  const uint64_t seed = SeedOf(uuid);
  Recovered all;
  uint64_t number = 0;
  while (bytes.size() - all.end >= sizeof(RecordHeader)) {
    RecordHeader header;
    std::memcpy(&header, bytes.data() + all.end, sizeof header);
    if (header.magic != kMagic || header.payload > kMaxPayload ||
        header.payload > bytes.size() - all.end - sizeof header ||
        (number != 0 && header.number != number + 1) || header.number == 0)
      break;
    const auto payload = bytes.subspan(all.end + sizeof header, header.payload);
    if (ChecksumOf(header, payload, seed) != header.checksum) break;
    number = header.number;
    switch (header.kind) {
      case kEntries:
        for (size_t at = 0; at + kEntryBytes <= payload.size(); at += kEntryBytes) {
          all.writes.push_back(
              DecodeEntry(std::span<const uint8_t, kEntryBytes>(payload.data() + at, kEntryBytes)));
          all.numbers.push_back(number);
        }
        break;
      case kFlushed:
        all.flushed = std::max(all.flushed, std::min(header.value, number));
        break;
      case kOpened:
        all.same_boot = TextOf(payload) == boot_id && !boot_id.empty();
        break;
      case kBroken:
        all.same_boot = false;
        break;
      default:  // of a later version: what it says is not known
        all.same_boot = false;
        break;
    }
    all.end += sizeof header + header.payload;
  }
  all.last = number;
  if (!all.same_boot) {
    const auto cut = std::ranges::upper_bound(all.numbers, all.flushed);
    all.writes.resize(static_cast<size_t>(cut - all.numbers.begin()));
    all.numbers.resize(all.writes.size());
  }
  return all;
}

Result<Recovered> Journal::Recover(std::string_view boot_id) {
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) return DiskError("look at a journal");
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size > kMaxJournal) {
    return Error(Code::kInternal, "disk.corrupt",
                 fmt::format("a journal of {} bytes; {} at most are written", size, kMaxJournal));
  }
  std::vector<uint8_t> bytes(size);
  DSEC_TRY_VOID(ReadFully(fd_.get(), 0, bytes));
  return Parse(bytes, uuid_, boot_id);
}

Result<void> Journal::Continue(const Recovered& recovered) {
  if (::ftruncate(fd_.get(), static_cast<off_t>(recovered.end)) != 0)
    return DiskError("cut a journal");
  end_ = recovered.end;
  last_ = recovered.last;
  return Ok();
}

Result<uint64_t> Journal::Add(uint16_t kind, uint64_t value, std::span<const uint8_t> payload) {
  if (damaged_) return Error(Code::kInternal, "disk.io", "the journal could not be written before");
  RecordHeader header{};
  header.magic = kMagic;
  header.kind = kind;
  header.number = last_ + 1;
  header.value = value;
  header.payload = static_cast<uint32_t>(payload.size());
  header.checksum = ChecksumOf(header, payload, seed_);
  std::vector<uint8_t> record(sizeof header + payload.size());
  std::memcpy(record.data(), &header, sizeof header);
  std::ranges::copy(payload, record.begin() + sizeof header);
  auto written = fault::Point("disk.journal.before_record");
  if (written.ok()) written = WriteFully(fd_.get(), end_, record);
  if (!written.ok()) {
    // A part of it may be there, and the next record would hide behind it.
    if (::ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) damaged_ = true;
    return std::move(written).error();
  }
  end_ += record.size();
  return ++last_;
}

Result<uint64_t> Journal::AddEntries(std::span<const Extent> extents) {
  const auto bytes = EncodeIndex(extents);
  if (bytes.size() > kMaxPayload) {
    return Error(Code::kInternal, "disk.io",
                 fmt::format("{} bytes of entries in one record", bytes.size()));
  }
  return Add(kEntries, 0, bytes);
}

Result<uint64_t> Journal::AddFlushed(uint64_t upto) { return Add(kFlushed, upto, {}); }

Result<uint64_t> Journal::AddOpened(std::string_view boot_id) {
  const auto text = boot_id.substr(0, kBootBytes);
  return Add(kOpened, 0, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

Result<uint64_t> Journal::AddBroken() { return Add(kBroken, 0, {}); }

Result<void> Journal::Sync() {
  if (::fdatasync(fd_.get()) != 0) return DiskError("sync a journal");
  return Ok();
}

}  // namespace dsec::disk
