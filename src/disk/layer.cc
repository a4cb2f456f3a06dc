// SPDX-License-Identifier: Apache-2.0
#include "disk/layer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "os/file.h"

namespace dsec::disk {
namespace {

class LocalFile : public LayerFile {
 public:
  LocalFile(os::UniqueFd fd, uint64_t size) : fd_(std::move(fd)), size_(size) {}
  uint64_t size() const override { return size_; }
  void Read(uint64_t offset, std::span<uint8_t> out, Done done) override {
    done(ReadFully(fd_.get(), offset, out));
  }

 private:
  const os::UniqueFd fd_;
  const uint64_t size_;
};

}  // namespace

Error DiskError(std::string_view what) {
  const int error = errno;
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  return Error(full ? Code::kResourceExhausted : Code::kInternal,
               full ? "disk.no_space" : "disk.io",
               fmt::format("{}: {}", what, std::string(::strerrordesc_np(error))))
      .WithErrno(error);
}

Result<void> ReadFully(int fd, uint64_t offset, std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return DiskError("read a layer");
    if (got == 0) {
      return Error(Code::kInternal, "disk.io",
                   fmt::format("the file ends at {}, {} bytes too early", offset, out.size()));
    }
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return Ok();
}

Result<void> WriteFully(int fd, uint64_t offset, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return DiskError("write a layer");
    bytes = bytes.subspan(static_cast<size_t>(put));
    offset += static_cast<uint64_t>(put);
  }
  return Ok();
}

Result<void> WaitFor(const std::function<void(LayerFile::Done)>& start) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<Result<void>> result;
  };
  const auto wait = std::make_shared<Wait>();
  start([wait](Result<void> result) {
    const std::lock_guard lock(wait->mutex);
    wait->result.emplace(std::move(result));
    wait->ready.notify_all();
  });
  std::unique_lock lock(wait->mutex);
  wait->ready.wait(lock, [&] { return wait->result.has_value(); });
  return *std::move(wait->result);
}

Result<void> LayerFile::ReadNow(uint64_t offset, std::span<uint8_t> out) {
  return WaitFor([&](Done done) { Read(offset, out, std::move(done)); });
}

Result<std::unique_ptr<LayerFile>> OpenLocalFile(os::UniqueFd fd) {
  struct stat status;
  if (::fstat(fd.get(), &status) != 0) return DiskError("look at a layer");
  if (!S_ISREG(status.st_mode)) return BadLayer("file", "is not a regular file");
  return std::unique_ptr<LayerFile>(
      std::make_unique<LocalFile>(std::move(fd), static_cast<uint64_t>(status.st_size)));
}

Result<std::shared_ptr<const Layer>> OpenLayer(std::shared_ptr<LayerFile> file) {
  const uint64_t size = file->size();
  if (size < 2 * kHeaderBytes) {
    return BadLayer("file",
                    fmt::format("has {} bytes, a layer has {} at least", size, 2 * kHeaderBytes));
  }
  HeaderBlock block;
  DSEC_TRY_VOID(file->ReadNow(0, block));
  DSEC_TRY(const auto header, ParseHeader(block).Context("header"));
  if ((header.flags & (kIsHeader | kIsData)) != (kIsHeader | kIsData)) {
    return BadLayer("flags", fmt::format("of the header is 0x{:x}: it must be a header (bit 0) of "
                                         "data (bit 1)",
                                         header.flags));
  }
  DSEC_TRY_VOID(file->ReadNow(size - kHeaderBytes, block));
  auto layer = std::make_shared<Layer>();
  DSEC_TRY(layer->info, ParseTrailer(block, size).Context("trailer"));
  layer->file = std::move(file);
  return std::shared_ptr<const Layer>(std::move(layer));
}

Result<std::shared_ptr<const Layer>> OpenLayerAt(int dirfd, const std::string& path) {
  DSEC_TRY(auto fd, os::OpenAt(dirfd, path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  DSEC_TRY(auto file, OpenLocalFile(std::move(fd)));
  return OpenLayer(std::move(file)).Context("layer {}", path);
}

Result<std::vector<Extent>> Layer::ReadIndex() const {
  std::vector<uint8_t> bytes(info.index_entries * kEntryBytes);
  DSEC_TRY_VOID(file->ReadNow(info.index_offset, bytes));
  return ParseIndex(bytes, info);
}

Result<void> CheckChain(std::span<const std::shared_ptr<const Layer>> layers) {
  const auto bad = [](size_t at, std::string rule) {
    return Error(Code::kInvalidArgument, "disk.bad_chain", fmt::format("layer {} {}", at, rule))
        .WithField(fmt::format("layers[{}]", at));
  };
  if (layers.size() > kMaxLayers)
    return bad(kMaxLayers, fmt::format("is one too many: {} are allowed", kMaxLayers));
  for (size_t i = 1; i < layers.size(); ++i) {
    const LayerInfo& below = layers[i - 1]->info;
    const LayerInfo& info = layers[i]->info;
    if (info.parent_uuid != below.uuid) {
      return bad(
          i, fmt::format("was made over \"{}\", below it is \"{}\"", info.parent_uuid, below.uuid));
    }
    if (info.virtual_bytes < below.virtual_bytes) {
      return bad(i, fmt::format("has a disk of {} bytes, below it are {}", info.virtual_bytes,
                                below.virtual_bytes));
    }
  }
  return Ok();
}

Result<std::vector<Extent>> MergeLayers(std::span<const std::shared_ptr<const Layer>> layers) {
  DSEC_TRY_VOID(CheckChain(layers));
  std::vector<Extent> merged;
  for (size_t i = 0; i < layers.size(); ++i) {
    DSEC_TRY(auto index, layers[i]->ReadIndex().Context("layer {}", i));
    for (Extent& extent : index) extent.layer = static_cast<uint16_t>(i);
    merged = Overlay(index, merged);
  }
  return merged;
}

Result<std::vector<Extent>> MergeChain(std::span<const std::shared_ptr<const Layer>> layers) {
  DSEC_TRY(auto merged, MergeLayers(layers));
  return WithoutZeros(std::move(merged));
}

}  // namespace dsec::disk
