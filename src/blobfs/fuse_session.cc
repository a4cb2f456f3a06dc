// SPDX-License-Identifier: Apache-2.0
#include "blobfs/fuse_session.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>
#include <vector>

#include "base/log.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

using std::chrono::milliseconds;

constexpr size_t kRequestBytes = 64 << 10;    // there are no writes; requests are small
constexpr uint32_t kMaxWrite = 4096;          // the least that the kernel takes
constexpr uint64_t kForever = 1'000'000'000;  // seconds: names and attributes never change
constexpr uint16_t kBackground = 64;
constexpr size_t kFinders = 64;
constexpr milliseconds kKilledLook{200};
constexpr size_t kHexDigits = 64;

}  // namespace

FuseSession::FuseSession(int fd, ChunkLoader& loader, FindLayer peek, FindLayer find)
    : device_(fd),
      loader_(loader),
      peek_(std::move(peek)),
      find_(std::move(find)),
      finders_(kFinders),
      killed_([this](const std::stop_token& stop) { LookForKilled(stop); }) {}

FuseSession::~FuseSession() { static_cast<void>(finders_.Wait(std::chrono::seconds(5))); }

// Its own in any process that serves the session. 0 and 1 are the kernel's.
uint64_t FuseSession::NodeOf(const std::string& hex) {
  uint64_t node = 0;
  std::from_chars(hex.data(), hex.data() + 16, node, 16);
  return node | 2;
}

Result<void> FuseSession::Add(const std::string& hex) {
  const std::lock_guard lock(mutex_);
  const auto [found, added] = nodes_.emplace(NodeOf(hex), hex);
  if (found->second == hex) return Ok();
  return Error(Code::kInternal, "layer.io",
               fmt::format("{} and {} have one number", hex, found->second));
}

size_t FuseSession::open_files() const {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::max<int64_t>(open_, 0));
}

Result<void> FuseSession::Run() {
  return device_.Run(kRequestBytes, [this](const fuse_in_header&,
                                           std::span<const uint8_t> request) { Handle(request); });
}

void FuseSession::Handle(std::span<const uint8_t> request) {
  fuse_in_header header;
  if (!TakeFront(request, header) || header.len != request.size()) return;
  const auto body = request.subspan(sizeof header);
  switch (header.opcode) {
    case FUSE_LOOKUP:
    case FUSE_GETATTR:
    case FUSE_OPEN:
    case FUSE_READ:
      if (HandleLater(header, request)) return;
      break;
    default:
      break;
  }
  switch (header.opcode) {
    case FUSE_INIT:
      return Init(header, body);
    case FUSE_LOOKUP:
      return Lookup(header, body);
    case FUSE_GETATTR:
      return GetAttr(header);
    case FUSE_OPEN:
      return Open(header);
    case FUSE_READ:
      return Read(header, body);
    case FUSE_RELEASE:
      Release();
      return Reply(header.unique, 0, {});
    case FUSE_INTERRUPT:
      return Interrupt(body);
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
      return;  // have no answer; node ids are for ever
    case FUSE_DESTROY:
      return Reply(header.unique, 0, {});
    default:
      return Reply(header.unique, ENOSYS, {});
  }
}

// True: the layer of the request is not in memory, which happens in a process that has taken a
// session over; another thread gets it and goes on.
bool FuseSession::HandleLater(const fuse_in_header& header, std::span<const uint8_t> request) {
  std::string hex;
  {
    const std::lock_guard lock(mutex_);
    uint64_t node = header.nodeid;
    if (header.opcode == FUSE_LOOKUP) {
      const auto* name = reinterpret_cast<const char*>(request.data() + sizeof header);
      const std::string asked(name, ::strnlen(name, request.size() - sizeof header));
      if (asked.size() != kHexDigits) return false;
      node = NodeOf(asked);
    }
    const auto found = nodes_.find(node);
    if (found == nodes_.end()) return false;
    hex = found->second;
  }
  if (peek_(hex) != nullptr) return false;
  const bool started =
      finders_.Start([this, hex, copy = std::vector<uint8_t>(request.begin(), request.end()),
                      unique = header.unique] {
        if (find_(hex) == nullptr) return Reply(unique, EIO, {});
        Handle(copy);
      });
  if (!started) Reply(header.unique, EIO, {});
  return true;
}

void FuseSession::Reply(uint64_t unique, int error, std::span<const Piece> pieces) {
  std::vector<std::span<const uint8_t>> parts;
  for (const Piece& piece : pieces) parts.push_back(piece.bytes);
  device_.Reply(unique, error, parts);
}

template <typename T>
void FuseSession::ReplyWith(uint64_t unique, const T& value) {
  device_.ReplyWith(unique, value);
}

void FuseSession::Init(const fuse_in_header& header, std::span<const uint8_t> body) {
  // What kernels before 5.16 do not send stays zero.
  fuse_init_in in{};
  std::memcpy(&in, body.data(), std::min(body.size(), sizeof in));
  if (in.major != FUSE_KERNEL_VERSION) return Reply(header.unique, EPROTO, {});
  fuse_init_out out{};
  out.major = FUSE_KERNEL_VERSION;
  out.minor = FUSE_KERNEL_MINOR_VERSION;
  out.max_readahead = in.max_readahead;
  out.flags = in.flags & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_INIT_EXT);
  out.flags2 = in.flags2 & FuseDevice::kHasResend2;
  out.max_background = kBackground;
  out.congestion_threshold = kBackground * 3 / 4;
  out.max_write = kMaxWrite;
  out.time_gran = 1;
  out.max_pages = kMaxPages;
  ReplyWith(header.unique, out);
}

std::shared_ptr<Layer> FuseSession::LayerOf(uint64_t node) {
  std::string hex;
  {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(node);
    if (found == nodes_.end()) return nullptr;
    hex = found->second;
  }
  return peek_(hex);
}

bool FuseSession::Attributes(uint64_t node, fuse_attr& attributes) {
  attributes = {};
  attributes.ino = node;
  attributes.nlink = 1;
  attributes.blksize = 4096;
  if (node == FUSE_ROOT_ID) {
    attributes.mode = S_IFDIR | 0500;
    return true;
  }
  const auto layer = LayerOf(node);
  if (layer == nullptr) return false;
  attributes.mode = S_IFREG | 0400;
  attributes.size = layer->proof.table.blob_bytes();
  attributes.blocks = (attributes.size + 511) / 512;
  return true;
}

void FuseSession::Lookup(const fuse_in_header& header, std::span<const uint8_t> body) {
  const auto* name = reinterpret_cast<const char*>(body.data());
  const std::string hex(name, ::strnlen(name, body.size()));
  fuse_entry_out out{};
  out.nodeid = hex.size() == kHexDigits ? NodeOf(hex) : 0;
  const auto layer = LayerOf(out.nodeid);
  if (header.nodeid != FUSE_ROOT_ID || layer == nullptr || layer->hex != hex)
    return Reply(header.unique, ENOENT, {});
  out.entry_valid = kForever;
  out.attr_valid = kForever;
  Attributes(out.nodeid, out.attr);
  ReplyWith(header.unique, out);
}

void FuseSession::GetAttr(const fuse_in_header& header) {
  fuse_attr_out out{};
  out.attr_valid = kForever;
  if (!Attributes(header.nodeid, out.attr)) return Reply(header.unique, ENOENT, {});
  ReplyWith(header.unique, out);
}

void FuseSession::Open(const fuse_in_header& header) {
  if (LayerOf(header.nodeid) == nullptr) return Reply(header.unique, ENOENT, {});
  fuse_open_out out{};
  out.open_flags = FOPEN_DIRECT_IO;
  {
    const std::lock_guard lock(mutex_);
    ++open_;
  }
  ReplyWith(header.unique, out);
}

void FuseSession::Release() {
  {
    const std::lock_guard lock(mutex_);
    --open_;
  }
  closed_.notify_all();
}

bool FuseSession::WaitClosed(std::chrono::milliseconds patience) const {
  std::unique_lock lock(mutex_);
  return closed_.wait_for(lock, patience, [&] { return open_ <= 0; });
}

void FuseSession::Read(const fuse_in_header& header, std::span<const uint8_t> body) {
  fuse_read_in in;
  auto layer = LayerOf(header.nodeid);
  if (layer == nullptr || !TakeFront(body, in)) return Reply(header.unique, EIO, {});
  const uint64_t end = layer->proof.table.blob_bytes();
  if (in.offset >= end || in.size == 0) return Reply(header.unique, 0, {});
  const auto size = static_cast<uint32_t>(std::min<uint64_t>(in.size, end - in.offset));
  // Held over the start, so that the answer finds its entry.
  const std::lock_guard lock(mutex_);
  Reading& reading = reading_[header.unique];
  reading.thread = header.pid;
  reading.job =
      loader_.Read(std::move(layer), in.offset, size,
                   [this, unique = header.unique](const Result<ChunkLoader::Pieces>& pieces) {
                     {
                       const std::lock_guard reply_lock(mutex_);
                       const auto found = reading_.find(unique);
                       if (found->second.interrupted) --interrupted_;
                       reading_.erase(found);
                     }
                     if (pieces.ok()) {
                       Reply(unique, 0, *pieces);
                     } else {
                       Reply(unique, EIO, {});
                     }
                   });
}

// A signal came to a thread that reads. Nobody expects EINTR of a read of a file, and a fault would
// become SIGBUS; so it goes on waiting, unless it is being killed: then it could not end.
void FuseSession::Interrupt(std::span<const uint8_t> body) {
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

// The kernel tells of the first signal only: one that kills may come later.
void FuseSession::LookForKilled(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (interrupts_.wait(lock, stop, [&] { return interrupted_ > 0; })) {
    std::vector<std::pair<uint64_t, uint32_t>> all;
    for (const auto& [unique, reading] : reading_) {
      if (reading.interrupted) all.emplace_back(unique, reading.thread);
    }
    lock.unlock();
    std::erase_if(all, [](const auto& item) { return !IsKilled(item.second); });
    lock.lock();
    for (const auto& [unique, thread] : all) {
      const auto found = reading_.find(unique);
      if (found == reading_.end() || !loader_.Cancel(found->second.job)) continue;
      --interrupted_;
      reading_.erase(found);
      Reply(unique, EINTR, {});
    }
    interrupts_.wait_for(lock, stop, kKilledLook, [] { return false; });
  }
}

}  // namespace dsec::blobfs
