// SPDX-License-Identifier: Apache-2.0
#include "disk/fuse_disks.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace dsec::disk {
namespace {

using blobfs::TakeFront;
using std::chrono::milliseconds;

constexpr size_t kRequestBytes = FuseDisks::kMaxWrite + (64 << 10);
constexpr uint16_t kMaxPages = FuseDisks::kMaxWrite / 4096;
constexpr uint64_t kForever = 1'000'000'000;  // seconds: names and attributes never change
constexpr uint16_t kBackground = 64;
constexpr size_t kLater = 128;
constexpr milliseconds kKilledLook{200};
constexpr milliseconds kOpenPause{200};
constexpr std::chrono::seconds kOpenPatience{20};

int ErrnoOf(const Error& error) {
  if (error.reason() == "disk.no_space") return ENOSPC;
  return error.code() == Code::kInvalidArgument ? EINVAL : EIO;
}

// Of what a request is about one disk.
bool NeedsDisk(uint32_t opcode) {
  switch (opcode) {
    case FUSE_OPEN:
    case FUSE_READ:
    case FUSE_WRITE:
    case FUSE_FSYNC:
    case FUSE_FALLOCATE:
      return true;
    default:
      return false;
  }
}

}  // namespace

FuseDisks::FuseDisks(int fd)
    : device_(fd),
      later_(kLater),
      killed_([this](const std::stop_token& stop) { LookForKilled(stop); }) {}

FuseDisks::~FuseDisks() { static_cast<void>(later_.Wait(std::chrono::seconds(5))); }

void FuseDisks::Add(uint64_t node, std::shared_ptr<Disk> disk) {
  auto entry = std::make_shared<Entry>();
  entry->bytes = disk->bytes();
  entry->disk = std::move(disk);
  const std::lock_guard lock(mutex_);
  entries_[node] = std::move(entry);
}

void FuseDisks::AddLater(uint64_t node, uint64_t bytes, OpenDisk open,
                         std::function<void(const std::shared_ptr<Disk>&)> opened) {
  auto entry = std::make_shared<Entry>();
  entry->bytes = bytes;
  entry->open = std::move(open);
  entry->opened = std::move(opened);
  {
    const std::lock_guard lock(mutex_);
    entries_[node] = std::move(entry);
  }
  StartOpening(node);
}

void FuseDisks::StartOpening(uint64_t node) {
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(node);
    if (found == entries_.end() || found->second->opening || found->second->disk != nullptr) return;
    entry = found->second;
    entry->opening = true;
  }
  const bool started = later_.Start([this, node, entry] {
    const MonoTime until = Clock::System().Mono() + kOpenPatience;
    auto disk = entry->open();
    while (!disk.ok() && Clock::System().Mono() < until) {
      log::Warn("disk.not_open", {{"node", node}, {"error", disk.error()}});
      std::this_thread::sleep_for(kOpenPause);
      disk = entry->open();
    }
    if (disk.ok()) {
      entry->opened(*disk);
    } else {
      log::Error("disk.lost", {{"node", node}, {"error", disk.error()}});
    }
    std::vector<std::vector<uint8_t>> waiting;
    {
      const std::lock_guard lock(mutex_);
      entry->opening = false;
      if (disk.ok()) entry->disk = *disk;
      waiting = std::move(entry->waiting);
      entry->waiting.clear();
    }
    for (const auto& request : waiting) {
      if (disk.ok()) {
        Serve(request);
      } else {
        fuse_in_header header;
        std::memcpy(&header, request.data(), sizeof header);
        device_.ReplyError(header.unique, EIO);
      }
    }
  });
  if (started) return;
  const std::lock_guard lock(mutex_);
  entry->opening = false;  // the next request tries again
}

std::shared_ptr<Disk> FuseDisks::Find(uint64_t node) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(node);
  return found == entries_.end() ? nullptr : found->second->disk;
}

Result<std::shared_ptr<Disk>> FuseDisks::Remove(uint64_t node, bool force) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(node);
  if (found == entries_.end())
    return Error(Code::kNotFound, "disk.not_served", fmt::format("no disk is number {}", node));
  if (found->second->open_files > 0 && !force) {
    return Error(Code::kConflict, "disk.in_use", fmt::format("the file of disk {} is open", node));
  }
  auto disk = found->second->disk;
  entries_.erase(found);
  return disk;
}

Result<void> FuseDisks::Run(size_t threads) {
  const auto run = [this] {
    return device_.Run(kRequestBytes, [this](const fuse_in_header&,
                                             std::span<const uint8_t> request) { Serve(request); });
  };
  std::vector<std::jthread> more;
  for (size_t i = 1; i < threads; ++i) {
    more.emplace_back([run] {
      if (auto done = run(); !done.ok()) log::Error("disk.fuse", {{"error", done.error()}});
    });
  }
  return run();
}

void FuseDisks::Serve(std::span<const uint8_t> request) {
  fuse_in_header header;
  std::memcpy(&header, request.data(), sizeof header);
  const auto body = request.subspan(sizeof header);
  std::shared_ptr<Disk> disk;
  if (NeedsDisk(header.opcode)) {
    bool open = false;
    {
      const std::lock_guard lock(mutex_);
      const auto found = entries_.find(header.nodeid);
      if (found == entries_.end()) return device_.ReplyError(header.unique, ENOENT);
      Entry& entry = *found->second;
      if (entry.disk == nullptr) {
        entry.waiting.emplace_back(request.begin(), request.end());
        open = !entry.opening;
      }
      disk = entry.disk;
    }
    if (disk == nullptr) {
      if (open) StartOpening(header.nodeid);
      return;
    }
    // What reads around itself may wait for the root: no thread that others need waits with it.
    fuse_write_in in;
    if (header.opcode == FUSE_WRITE && TakeFront(body, in) &&
        Disk::ReadsFirst(in.offset, in.size)) {
      const bool started = later_.Start(
          [this, header, disk, copy = std::vector<uint8_t>(request.begin(), request.end())] {
            Handle(header, std::span(copy).subspan(sizeof header), disk.get());
          });
      if (!started) device_.ReplyError(header.unique, EIO);
      return;
    }
  }
  Handle(header, body, disk.get());
}

void FuseDisks::Handle(const fuse_in_header& header, std::span<const uint8_t> body, Disk* disk) {
  switch (header.opcode) {
    case FUSE_INIT:
      return Init(header, body);
    case FUSE_LOOKUP:
      return Lookup(header, body);
    case FUSE_GETATTR: {
      fuse_attr_out out{};
      out.attr_valid = kForever;
      if (!Attributes(header.nodeid, out.attr)) return device_.ReplyError(header.unique, ENOENT);
      return device_.ReplyWith(header.unique, out);
    }
    case FUSE_SETATTR: {  // times and modes are as they are; a disk does not change its size
      fuse_setattr_in in;
      fuse_attr_out out{};
      out.attr_valid = kForever;
      if (!TakeFront(body, in) || !Attributes(header.nodeid, out.attr))
        return device_.ReplyError(header.unique, ENOENT);
      if ((in.valid & FATTR_SIZE) != 0 && in.size != out.attr.size)
        return device_.ReplyError(header.unique, EPERM);
      return device_.ReplyWith(header.unique, out);
    }
    case FUSE_OPEN: {
      fuse_open_out out{};
      // A process that starts the next worker closes its files of ours in execve(2): no request
      // may have to be answered for that (Linux 5.16).
      out.open_flags = FOPEN_KEEP_CACHE | FOPEN_NOFLUSH;
      {
        const std::lock_guard lock(mutex_);
        if (const auto found = entries_.find(header.nodeid); found != entries_.end())
          ++found->second->open_files;
      }
      return device_.ReplyWith(header.unique, out);
    }
    case FUSE_READ:
      return Read(header, body, *disk);
    case FUSE_WRITE:
      return Write(header, body, *disk);
    case FUSE_FSYNC:
      return ReplyResult(header.unique, disk->Flush());
    case FUSE_FALLOCATE:
      return Fallocate(header, body, *disk);
    case FUSE_RELEASE: {
      {
        const std::lock_guard lock(mutex_);
        if (const auto found = entries_.find(header.nodeid); found != entries_.end())
          --found->second->open_files;
      }
      return device_.ReplyError(header.unique, 0);
    }
    case FUSE_INTERRUPT:
      return Interrupt(body);
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
      return;  // have no answer
    case FUSE_DESTROY:
      return device_.ReplyError(header.unique, 0);
    default:
      return device_.ReplyError(header.unique, ENOSYS);
  }
}

void FuseDisks::ReplyResult(uint64_t unique, const Result<void>& result) {
  if (!result.ok()) log::Warn("disk.request_failed", {{"error", result.error()}});
  device_.ReplyError(unique, result.ok() ? 0 : ErrnoOf(result.error()));
}

void FuseDisks::Init(const fuse_in_header& header, std::span<const uint8_t> body) {
  fuse_init_in in{};
  std::memcpy(&in, body.data(), std::min(body.size(), sizeof in));
  if (in.major != FUSE_KERNEL_VERSION) return device_.ReplyError(header.unique, EPROTO);
  fuse_init_out out{};
  out.major = FUSE_KERNEL_VERSION;
  out.minor = FUSE_KERNEL_MINOR_VERSION;
  out.max_readahead = in.max_readahead;
  out.flags = in.flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ASYNC_DIO |
                          FUSE_PARALLEL_DIROPS | FUSE_INIT_EXT);
  out.flags2 = in.flags2 & blobfs::FuseDevice::kHasResend2;
  out.max_background = kBackground;
  out.congestion_threshold = kBackground * 3 / 4;
  out.max_write = kMaxWrite;
  out.time_gran = 1;
  out.max_pages = kMaxPages;
  device_.ReplyWith(header.unique, out);
}

bool FuseDisks::Attributes(uint64_t node, fuse_attr& attributes) const {
  attributes = {};
  attributes.ino = node;
  attributes.nlink = 1;
  attributes.blksize = 4096;
  if (node == FUSE_ROOT_ID) {
    attributes.mode = S_IFDIR | 0500;
    return true;
  }
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(node);
  if (found == entries_.end()) return false;
  attributes.mode = S_IFREG | 0600;
  attributes.size = found->second->bytes;
  attributes.blocks = attributes.size / kSectorBytes;
  return true;
}

void FuseDisks::Lookup(const fuse_in_header& header, std::span<const uint8_t> body) {
  const auto* text = reinterpret_cast<const char*>(body.data());
  const std::string_view name(text, ::strnlen(text, body.size()));
  fuse_entry_out out{};
  const auto read = std::from_chars(name.data(), name.data() + name.size(), out.nodeid);
  if (header.nodeid != FUSE_ROOT_ID || read.ec != std::errc() ||
      read.ptr != name.data() + name.size() || out.nodeid < kFirstNode ||
      !Attributes(out.nodeid, out.attr))
    return device_.ReplyError(header.unique, ENOENT);
  out.attr_valid = kForever;  // the name itself may go: entry_valid stays 0
  device_.ReplyWith(header.unique, out);
}

void FuseDisks::Read(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk) {
  fuse_read_in in;
  if (!TakeFront(body, in)) return device_.ReplyError(header.unique, EINVAL);
  if (in.offset >= disk.bytes() || in.size == 0) return device_.ReplyError(header.unique, 0);
  const auto size = std::min<uint64_t>({in.size, disk.bytes() - in.offset, kMaxWrite});
  const auto buffer = std::make_shared<std::vector<uint8_t>>(size);
  const auto answered = std::make_shared<std::atomic<bool>>(false);
  {
    const std::lock_guard lock(mutex_);
    reading_[header.unique] = {header.pid, false, answered};
  }
  const std::span<uint8_t> out = *buffer;
  disk.Read(in.offset, out,
            [this, buffer, answered, unique = header.unique](const Result<void>& result) {
              {
                const std::lock_guard lock(mutex_);
                // Whoever was killed may have gone, and the number may be another request's.
                const auto found = reading_.find(unique);
                if (found != reading_.end() && found->second.answered == answered) {
                  if (found->second.interrupted) --interrupted_;
                  reading_.erase(found);
                }
              }
              if (answered->exchange(true)) return;
              if (!result.ok()) return ReplyResult(unique, result);
              const std::span<const uint8_t> part = *buffer;
              device_.Reply(unique, 0, {&part, 1});
            });
}

void FuseDisks::Write(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk) {
  fuse_write_in in;
  if (!TakeFront(body, in) || in.size != body.size() - sizeof in)
    return device_.ReplyError(header.unique, EINVAL);
  if (in.offset > disk.bytes() || in.size > disk.bytes() - in.offset)
    return device_.ReplyError(header.unique, in.offset >= disk.bytes() ? ENOSPC : EFBIG);
  const auto written = disk.Write(in.offset, body.subspan(sizeof in));
  if (!written.ok()) return ReplyResult(header.unique, written);
  fuse_write_out out{};
  out.size = in.size;
  device_.ReplyWith(header.unique, out);
}

void FuseDisks::Fallocate(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk) {
  fuse_fallocate_in in;
  if (!TakeFront(body, in)) return device_.ReplyError(header.unique, EINVAL);
  constexpr uint32_t kTrim = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  const uint32_t mode = in.mode & ~uint32_t{FALLOC_FL_KEEP_SIZE};
  if (in.mode != kTrim && mode != FALLOC_FL_ZERO_RANGE)
    return device_.ReplyError(header.unique, EOPNOTSUPP);
  if (in.offset > disk.bytes() || in.length > disk.bytes() - in.offset)
    return device_.ReplyError(header.unique, EFBIG);
  ReplyResult(header.unique, disk.Zero(in.offset, in.length));
}

// A signal came to a thread that reads; it is answered only when it is being killed, as for layers
// (blobfs::FuseSession).
void FuseDisks::Interrupt(std::span<const uint8_t> body) {
  fuse_interrupt_in in;
  if (!TakeFront(body, in)) return;
  {
    const std::lock_guard lock(mutex_);
    const auto found = reading_.find(in.unique);
    if (found == reading_.end() || found->second.interrupted) return;
    found->second.interrupted = true;
    ++interrupted_;
  }
  interrupts_.notify_all();
}

void FuseDisks::LookForKilled(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (interrupts_.wait(lock, stop, [&] { return interrupted_ > 0; })) {
    std::vector<std::pair<uint64_t, uint32_t>> all;
    for (const auto& [unique, reading] : reading_) {
      if (reading.interrupted) all.emplace_back(unique, reading.thread);
    }
    lock.unlock();
    std::erase_if(all, [](const auto& item) { return !blobfs::IsKilled(item.second); });
    lock.lock();
    for (const auto& [unique, thread] : all) {
      const auto found = reading_.find(unique);
      if (found == reading_.end() || found->second.answered->exchange(true)) continue;
      --interrupted_;
      reading_.erase(found);
      device_.ReplyError(unique, EINTR);
    }
    interrupts_.wait_for(lock, stop, kKilledLook, [] { return false; });
  }
}

}  // namespace dsec::disk
