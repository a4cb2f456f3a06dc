// SPDX-License-Identifier: Apache-2.0
#include "image/erofs_output.h"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "base/check.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

// As the kernel's: neither the start nor the end is inverted.
uint32_t Crc32c(std::span<const uint8_t> bytes) {
  constexpr uint32_t kPolynomial = 0x82F63B78;
  uint32_t crc = UINT32_MAX;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
  }
  return crc;
}

// None at all, or LZ4 as WriteErofs has it.
bool GoodCompression(const erofs::SuperBlock& super, std::span<const uint8_t> block) {
  constexpr uint32_t kCompressed = erofs::kIncompatZeroPadding | erofs::kIncompatCompression;
  const uint32_t used = super.feature_incompat & kCompressed;
  if (used == 0) return true;
  erofs::Lz4Config config;
  std::memcpy(&config, block.data() + erofs::kSuperOffset + sizeof(super), sizeof(config));
  return used == kCompressed && super.compression == erofs::kLz4 && super.extra_slots == 0 &&
         config.bytes == erofs::kLz4ConfigBytes && config.max_blocks > 0 &&
         config.max_blocks <= ChunkStore::kChunkBytes / erofs::kBlockBytes;
}

}  // namespace

namespace erofs {

uint32_t Checksum(std::span<const uint8_t> block) {
  std::vector<uint8_t> bytes(block.begin() + kSuperOffset, block.begin() + kBlockBytes);
  std::memset(bytes.data() + offsetof(SuperBlock, checksum), 0, sizeof(uint32_t));
  return Crc32c(bytes);
}

Output::Output(int fd) : fd_(fd) { buffer_.reserve(kBufferBytes + kBlockBytes); }

void Output::PadTo(uint64_t position) {
  DSEC_CHECK(position >= this->position());
  buffer_.resize(buffer_.size() + (position - this->position()));
}

void Output::PadToBlock() { PadTo((position() + kBlockBytes - 1) / kBlockBytes * kBlockBytes); }

Result<void> Output::FlushIfFull() { return buffer_.size() < kBufferBytes ? Ok() : Flush(); }

Result<FileDigest> Output::Finish() {
  DSEC_TRY_VOID(Flush());
  if (::fsync(fd_) != 0) return StoreError("fsync the metadata");
  return FileDigest{sha_.Finish(), flushed_};
}

Result<void> Output::Flush() {
  if (flushed_ == 0) {
    const uint32_t checksum = Checksum(buffer_);
    std::memcpy(buffer_.data() + kSuperOffset + offsetof(SuperBlock, checksum), &checksum,
                sizeof(checksum));
  }
  sha_.Update(buffer_);
  auto wrote = os::WriteAll(fd_, {reinterpret_cast<const char*>(buffer_.data()), buffer_.size()});
  if (!wrote.ok()) {
    errno = wrote.error().sys_errno();
    return StoreError("write the metadata");
  }
  flushed_ += buffer_.size();
  buffer_.clear();
  return Ok();
}

}  // namespace erofs

Result<void> CheckSuperblock(int meta_fd) {
  std::vector<uint8_t> block(erofs::kBlockBytes);
  if (::pread(meta_fd, block.data(), block.size(), 0) != static_cast<ssize_t>(block.size())) {
    return Error(Code::kInternal, "layer.corrupt", "meta.erofs has no superblock");
  }
  erofs::SuperBlock super;
  std::memcpy(&super, block.data() + erofs::kSuperOffset, sizeof(super));
  constexpr uint32_t kPlain = erofs::kIncompatChunkedFile | erofs::kIncompatDeviceTable;
  constexpr uint32_t kCompressed = erofs::kIncompatZeroPadding | erofs::kIncompatCompression;
  const uint32_t features = super.feature_incompat & ~kCompressed;
  if (super.magic != erofs::kMagic || super.block_bits != erofs::kBlockBits ||
      super.extra_devices != 1 || (features & ~kPlain) != 0 ||
      (features & erofs::kIncompatDeviceTable) == 0 || !GoodCompression(super, block)) {
    return Error(Code::kInternal, "layer.corrupt",
                 fmt::format("meta.erofs: magic {:x}, block bits {}, {} devices, features {:x}, "
                             "compression {:x}",
                             super.magic, super.block_bits, super.extra_devices,
                             super.feature_incompat, super.compression));
  }
  if ((super.feature_compat & erofs::kCompatChecksum) != 0 &&
      super.checksum != erofs::Checksum(block)) {
    return Error(Code::kInternal, "layer.corrupt", "meta.erofs: wrong checksum of its first block");
  }
  return Ok();
}

bool HasCompressedFiles(int meta_fd) {
  erofs::SuperBlock super = {};
  const ssize_t read = ::pread(meta_fd, &super, sizeof(super), erofs::kSuperOffset);
  return read == static_cast<ssize_t>(sizeof(super)) &&
         (super.feature_incompat & erofs::kIncompatCompression) != 0;
}

}  // namespace dsec::image
