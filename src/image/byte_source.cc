// SPDX-License-Identifier: Apache-2.0
#include "image/byte_source.h"

#include <archive.h>
#include <archive_entry.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kBufferBytes = 256 << 10;

}  // namespace

Result<uint64_t> ByteSource::Skip(uint64_t) { return uint64_t{0}; }

FileSource::FileSource(os::UniqueFd fd, std::string name)
    : fd_(std::move(fd)), name_(std::move(name)), buffer_(kBufferBytes) {
  struct stat status;
  if (::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode)) {
    size_ = static_cast<uint64_t>(status.st_size);
  }
}

Result<std::span<const uint8_t>> FileSource::Read() {
  while (true) {
    const ssize_t n = ::read(fd_.get(), buffer_.data(), buffer_.size());
    if (n >= 0) return std::span<const uint8_t>(buffer_.data(), static_cast<size_t>(n));
    if (errno != EINTR) return os::ErrnoError("layer.source", fmt::format("read {}", name_));
  }
}

Result<uint64_t> FileSource::Skip(uint64_t count) {
  if (!size_) return uint64_t{0};
  const off_t here = ::lseek(fd_.get(), 0, SEEK_CUR);
  if (here < 0) return os::ErrnoError("layer.source", fmt::format("seek in {}", name_));
  // Never beyond the end: a file that stops in the middle of a member must show as one.
  const uint64_t left = *size_ - std::min(*size_, static_cast<uint64_t>(here));
  const uint64_t step = std::min(count, left);
  if (step > 0 && ::lseek(fd_.get(), static_cast<off_t>(step), SEEK_CUR) < 0) {
    return os::ErrnoError("layer.source", fmt::format("seek in {}", name_));
  }
  return step;
}

DigestSource::DigestSource(std::unique_ptr<ByteSource> inner, std::string sha256,
                           std::optional<uint64_t> size, std::string what)
    : inner_(std::move(inner)), expected_(std::move(sha256)), size_(size), what_(std::move(what)) {}

Result<std::span<const uint8_t>> DigestSource::Read() {
  DSEC_TRY(const auto bytes, inner_->Read());
  count_ += bytes.size();
  if (!bytes.empty()) {
    sha_.Update(bytes);
    if (size_ && count_ > *size_) {
      return Error(Code::kInvalidArgument, "layer.digest_mismatch",
                   fmt::format("{} is longer than the {} bytes it should be", what_, *size_));
    }
    return bytes;
  }
  if (!checked_) {
    checked_ = true;
    const std::string found = sha_.Finish();
    if ((size_ && count_ != *size_) || found != expected_) {
      return Error(Code::kInvalidArgument, "layer.digest_mismatch",
                   fmt::format("{}: {} bytes of sha256:{}, should be sha256:{}", what_, count_,
                               found, expected_));
    }
  }
  return bytes;
}

// C callbacks of libarchive; friend of the sources that use them.
struct ArchiveCallbacks {
  static la_ssize_t Inflate(archive* handle, void* context, const void** out) {
    auto& self = *static_cast<InflateSource*>(context);
    auto bytes = self.inner_->Read();
    if (!bytes.ok()) {
      self.inner_error_ = std::move(bytes).error();
      ::archive_set_error(handle, EIO, "read failed");
      return -1;
    }
    self.in_ += bytes->size();
    if (bytes->empty()) self.drained_ = true;
    *out = bytes->data();
    return static_cast<la_ssize_t>(bytes->size());
  }
};

InflateSource::InflateSource(std::unique_ptr<ByteSource> inner, const ImportLimits& limits,
                             std::string name)
    : inner_(std::move(inner)),
      limits_(limits),
      name_(std::move(name)),
      archive_(::archive_read_new()) {
  DSEC_CHECK(archive_ != nullptr);
}

InflateSource::~InflateSource() { ::archive_read_free(archive_); }

Error InflateSource::Fail(std::string_view what) {
  if (inner_error_) return *inner_error_;
  const char* text = ::archive_error_string(archive_);
  return Error(Code::kInvalidArgument, "layer.malformed",
               fmt::format("{}: {}: {}", name_, what, Printable(text != nullptr ? text : "?")));
}

Result<std::unique_ptr<InflateSource>> InflateSource::Open(std::unique_ptr<ByteSource> inner,
                                                           const ImportLimits& limits,
                                                           std::string name) {
  std::unique_ptr<InflateSource> source(
      new InflateSource(std::move(inner), limits, std::move(name)));
  archive* handle = source->archive_;
  // Only filters inside the library: others would run programs.
  ::archive_read_support_filter_gzip(handle);
  ::archive_read_support_filter_bzip2(handle);
  ::archive_read_support_filter_xz(handle);
  ::archive_read_support_filter_zstd(handle);
  ::archive_read_support_format_raw(handle);
  ::archive_read_support_format_empty(handle);
  if (::archive_read_open(handle, source.get(), nullptr, ArchiveCallbacks::Inflate, nullptr) !=
      ARCHIVE_OK) {
    return source->Fail("open");
  }
  archive_entry* entry = nullptr;
  const int status = ::archive_read_next_header(handle, &entry);
  if (status != ARCHIVE_OK && status != ARCHIVE_EOF) return source->Fail("read");
  source->empty_ = status == ARCHIVE_EOF;
  source->compressed_ = ::archive_filter_count(handle) > 1;
  return source;
}

Result<std::span<const uint8_t>> InflateSource::Read() {
  const void* data = nullptr;
  size_t size = 0;
  la_int64_t offset = 0;
  while (!empty_) {
    const int status = ::archive_read_data_block(archive_, &data, &size, &offset);
    if (status == ARCHIVE_EOF) break;
    if (status != ARCHIVE_OK) return Fail("decompress");
    if (size == 0) continue;
    out_ += size;
    if (out_ > limits_.ratio_free_bytes && out_ / limits_.max_ratio > in_) {
      return Error(Code::kInvalidArgument, "layer.bomb",
                   fmt::format("{}: {} bytes expand to more than {}, over {} times", name_, in_,
                               out_, limits_.max_ratio));
    }
    return std::span<const uint8_t>(static_cast<const uint8_t*>(data), size);
  }
  // The decoder stops at the end of its stream; a digest below needs what follows, too.
  while (!drained_) {
    DSEC_TRY(const auto rest, inner_->Read());
    drained_ = rest.empty();
  }
  return std::span<const uint8_t>();
}

}  // namespace dsec::image
