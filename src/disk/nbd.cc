// SPDX-License-Identifier: Apache-2.0
#include "disk/nbd.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <utility>
#include <vector>

#include "disk/disk.h"

namespace dsec::disk {
namespace {

// doc/proto.md of NetworkBlockDevice/nbd. All numbers on the wire are big-endian.
constexpr uint64_t kInitMagic = 0x4E42444D41474943;    // "NBDMAGIC"
constexpr uint64_t kOptionMagic = 0x49484156454F5054;  // "IHAVEOPT"
constexpr uint64_t kOptionReplyMagic = 0x3E889045565A9;
constexpr uint32_t kRequestMagic = 0x25609513, kReplyMagic = 0x67446698;
constexpr uint16_t kFixedNewstyle = 1, kNoZeroes = 2;
constexpr uint32_t kOptExportName = 1, kOptAbort = 2, kOptList = 3, kOptInfo = 6, kOptGo = 7;
constexpr uint32_t kRepAck = 1, kRepServer = 2, kRepInfo = 3;
constexpr uint32_t kRepErrUnsup = 0x80000001, kRepErrInvalid = 0x80000003,
                   kRepErrTooBig = 0x80000009;
constexpr uint16_t kInfoExport = 0, kInfoBlockSize = 3;
constexpr uint16_t kHasFlags = 1, kSendFlush = 1 << 2, kSendFua = 1 << 3, kSendTrim = 1 << 5,
                   kSendWriteZeroes = 1 << 6, kCanMultiConn = 1 << 8;
constexpr uint16_t kExportFlags =
    kHasFlags | kSendFlush | kSendFua | kSendTrim | kSendWriteZeroes | kCanMultiConn;
constexpr uint16_t kRead = 0, kWrite = 1, kDisconnect = 2, kFlush = 3, kTrim = 4, kWriteZeroes = 6;
constexpr uint16_t kFua = 1, kNoHole = 2;
constexpr uint32_t kLeastBlock = kSectorBytes, kGoodBlock = 4096;
constexpr uint32_t kEio = 5, kEinval = 22, kEnospc = 28;

class Message {
 public:
  template <typename T>
  Message& Add(T value) {
    if constexpr (std::endian::native == std::endian::little) value = Swap(value);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
    return *this;
  }
  Message& AddZeros(size_t count) {
    bytes_.resize(bytes_.size() + count);
    return *this;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  template <typename T>
  static T Swap(T value) {
    auto* bytes = reinterpret_cast<uint8_t*>(&value);
    std::reverse(bytes, bytes + sizeof value);
    return value;
  }

 private:
  std::vector<uint8_t> bytes_;
};

template <typename T>
T Number(std::span<const uint8_t> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return Message::Swap(value);
}

class Session {
 public:
  Session(std::shared_ptr<NbdStream> stream, NbdTarget& target)
      : stream_(std::move(stream)), target_(target), state_(std::make_shared<State>()) {}

  std::string Run() {
    std::string end = Negotiate();
    if (end.empty()) {
      stream_->NoTimeout();
      end = Transmit();
    }
    // Buffers of reads under way are theirs until they come back.
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->reads == 0; });
    return end;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int reads = 0;
    uint64_t bytes = 0;
  };

  bool Send(const Message& message) {
    const std::span<const uint8_t> part = message.bytes();
    return stream_->Write({&part, 1});
  }
  bool ReplyOption(uint32_t option, uint32_t type, const Message& content = {}) {
    Message reply;
    reply.Add(kOptionReplyMagic).Add(option).Add(type);
    reply.Add(static_cast<uint32_t>(content.bytes().size()));
    const std::array<std::span<const uint8_t>, 2> parts = {reply.bytes(), content.bytes()};
    return stream_->Write(parts);
  }

  // Empty: transmission begins.
  std::string Negotiate() {
    if (!Send(Message()
                  .Add(kInitMagic)
                  .Add(kOptionMagic)
                  .Add(static_cast<uint16_t>(kFixedNewstyle | kNoZeroes))))
      return "gone";
    std::array<uint8_t, 4> flags_bytes;
    if (!stream_->ReadExact(flags_bytes)) return "no flags";
    const auto flags = Number<uint32_t>(flags_bytes, 0);
    if ((flags & kFixedNewstyle) == 0 || (flags & ~uint32_t{kFixedNewstyle | kNoZeroes}) != 0)
      return fmt::format("flags 0x{:x}", flags);
    for (int options = 0; options < kNbdMaxOptions; ++options) {
      std::array<uint8_t, 16> header;
      if (!stream_->ReadExact(header)) return "left in the handshake";
      if (Number<uint64_t>(header, 0) != kOptionMagic) return "an option without its magic";
      const auto option = Number<uint32_t>(header, 8);
      const auto length = Number<uint32_t>(header, 12);
      // Nothing reads what is longer: it would have to be skipped, as long as the client likes.
      if (length > kNbdMaxOption) {
        ReplyOption(option, kRepErrTooBig);
        return fmt::format("an option of {} bytes", length);
      }
      std::vector<uint8_t> data(length);
      if (!stream_->ReadExact(data)) return "left in an option";
      bool sent = true;
      switch (option) {
        case kOptExportName: {  // any name: there is one disk
          Message reply;
          reply.Add(target_.size()).Add(kExportFlags);
          if ((flags & kNoZeroes) == 0) reply.AddZeros(124);
          return Send(reply) ? "" : "gone";
        }
        case kOptAbort:
          ReplyOption(option, kRepAck);
          return "aborted";
        case kOptList:
          sent = length != 0 ? ReplyOption(option, kRepErrInvalid)
                             : ReplyOption(option, kRepServer, Message().Add(uint32_t{0})) &&
                                   ReplyOption(option, kRepAck);
          break;
        case kOptInfo:
        case kOptGo:
          if (!IsInfoRequest(data)) {
            sent = ReplyOption(option, kRepErrInvalid);
            break;
          }
          sent = ReplyOption(option, kRepInfo,
                             Message().Add(kInfoExport).Add(target_.size()).Add(kExportFlags)) &&
                 ReplyOption(option, kRepInfo,
                             Message()
                                 .Add(kInfoBlockSize)
                                 .Add(kLeastBlock)
                                 .Add(kGoodBlock)
                                 .Add(kNbdMaxRequest)) &&
                 ReplyOption(option, kRepAck);
          if (sent && option == kOptGo) return "";
          break;
        default:
          sent = ReplyOption(option, kRepErrUnsup);
      }
      if (!sent) return "gone";
    }
    return fmt::format("more than {} options", kNbdMaxOptions);
  }

  // Length of a name, the name, a number of requests, as many numbers.
  static bool IsInfoRequest(std::span<const uint8_t> data) {
    if (data.size() < 6) return false;
    const auto name = Number<uint32_t>(data, 0);
    if (name > data.size() - 6) return false;
    const auto requests = Number<uint16_t>(data, 4 + name);
    return data.size() == 6 + name + 2 * size_t{requests};
  }

  static uint32_t CodeOf(const Result<void>& result) {
    if (result.ok()) return 0;
    if (result.error().code() == Code::kInvalidArgument) return kEinval;
    return result.error().reason() == "disk.no_space" ? kEnospc : kEio;
  }
  static bool Reply(NbdStream& stream, uint64_t cookie, uint32_t error,
                    std::span<const uint8_t> data = {}) {
    Message reply;
    reply.Add(kReplyMagic).Add(error).Add(cookie);
    const std::array<std::span<const uint8_t>, 2> parts = {reply.bytes(), data};
    return stream.Write(parts);
  }

  std::string Transmit() {
    while (true) {
      std::array<uint8_t, 28> header;
      if (!stream_->ReadExact(header)) return "left";
      if (Number<uint32_t>(header, 0) != kRequestMagic) return "a request without its magic";
      const auto flags = Number<uint16_t>(header, 4);
      const auto type = Number<uint16_t>(header, 6);
      const auto cookie = Number<uint64_t>(header, 8);
      const auto offset = Number<uint64_t>(header, 16);
      const auto length = Number<uint32_t>(header, 24);
      if (type == kDisconnect) return "disconnected";
      const uint64_t size = target_.size();
      const bool within = offset <= size && length <= size - offset;
      const bool carries = type == kRead || type == kWrite;
      std::vector<uint8_t> data;
      if (carries && length > kNbdMaxRequest) {
        // What follows a write would have to be read before the next request.
        if (type == kWrite) return fmt::format("a write of {} bytes", length);
        if (!Reply(*stream_, cookie, kEinval)) return "gone";
        continue;
      }
      if (type == kWrite) {
        data.resize(length);
        if (!stream_->ReadExact(data)) return "left in a write";
      }
      const bool known_flags = (flags & ~(kFua | (type == kWriteZeroes ? kNoHole : 0))) == 0;
      // A write past the end is ENOSPC by the protocol.
      const uint32_t outside = type == kWrite || type == kWriteZeroes ? kEnospc : kEinval;
      bool sent = true;
      if (!known_flags || (length == 0 && type != kFlush)) {
        sent = Reply(*stream_, cookie, kEinval);
      } else if (type != kFlush && !within) {
        sent = Reply(*stream_, cookie, outside);
      } else {
        sent = Handle(type, flags, cookie, offset, length, data);
      }
      if (!sent) return "gone";
    }
  }

  bool Handle(uint16_t type, uint16_t flags, uint64_t cookie, uint64_t offset, uint32_t length,
              std::span<const uint8_t> data) {
    Result<void> result;
    switch (type) {
      case kRead:
        return StartRead(cookie, offset, length);
      case kWrite:
        result = target_.Write(offset, data);
        break;
      case kTrim:
      case kWriteZeroes:
        result = target_.Zero(offset, length);
        break;
      case kFlush:
        result = target_.Flush();
        break;
      default:
        return Reply(*stream_, cookie, kEinval);
    }
    if (result.ok() && (flags & kFua) != 0) result = target_.Flush();
    return Reply(*stream_, cookie, CodeOf(result));
  }

  // What hangs holds up the rest only when there is too much of it.
  bool StartRead(uint64_t cookie, uint64_t offset, uint32_t length) {
    {
      std::unique_lock lock(state_->mutex);
      state_->changed.wait(lock, [&] {
        return state_->reads == 0 ||
               (state_->reads < kNbdMaxReads && state_->bytes + length <= kNbdMaxBytes);
      });
      ++state_->reads;
      state_->bytes += length;
    }
    auto buffer = std::make_shared<std::vector<uint8_t>>(length);
    const std::span<uint8_t> out = *buffer;
    target_.Read(
        offset, out,
        [stream = stream_, state = state_, buffer, cookie](const Result<void>& result) {
          Reply(*stream, cookie, CodeOf(result),
                result.ok() ? std::span<const uint8_t>(*buffer) : std::span<const uint8_t>());
          const std::lock_guard lock(state->mutex);
          --state->reads;
          state->bytes -= buffer->size();
          state->changed.notify_all();
        });
    return true;
  }

  const std::shared_ptr<NbdStream> stream_;
  NbdTarget& target_;
  const std::shared_ptr<State> state_;
};

class DiskTarget : public NbdTarget {
 public:
  explicit DiskTarget(std::shared_ptr<Disk> disk) : disk_(std::move(disk)) {}
  uint64_t size() const override { return disk_->bytes(); }
  void Read(uint64_t offset, std::span<uint8_t> out, Done done) override {
    disk_->Read(offset, out, std::move(done));
  }
  Result<void> Write(uint64_t offset, std::span<const uint8_t> data) override {
    return disk_->Write(offset, data);
  }
  Result<void> Zero(uint64_t offset, uint64_t size) override { return disk_->Zero(offset, size); }
  Result<void> Flush() override { return disk_->Flush(); }

 private:
  const std::shared_ptr<Disk> disk_;
};

}  // namespace

std::unique_ptr<NbdTarget> NbdTargetOf(std::shared_ptr<Disk> disk) {
  return std::make_unique<DiskTarget>(std::move(disk));
}

std::string ServeNbd(const std::shared_ptr<NbdStream>& stream, NbdTarget& target) {
  return Session(stream, target).Run();
}

}  // namespace dsec::disk
