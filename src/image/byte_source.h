// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "image/digest.h"
#include "image/entry.h"
#include "os/unique_fd.h"

struct archive;

namespace dsec::image {

// A stream of bytes. Single-threaded, blocking.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // The next bytes, valid until the next call; empty at the end.
  virtual Result<std::span<const uint8_t>> Read() = 0;
  // Skips up to `count` bytes where that is cheaper than reading; the number skipped, 0 when it is
  // not.
  virtual Result<uint64_t> Skip(uint64_t count);
};

// A file or pipe from its present position on; `name` is for messages.
class FileSource : public ByteSource {
 public:
  FileSource(os::UniqueFd fd, std::string name);
  Result<std::span<const uint8_t>> Read() override;
  Result<uint64_t> Skip(uint64_t count) override;

 private:
  os::UniqueFd fd_;
  std::string name_;
  std::optional<uint64_t> size_;  // of a regular file
  std::vector<uint8_t> buffer_;
};

// Passes bytes on and compares their SHA-256 and length at the end: kInvalidArgument
// "layer.digest_mismatch". Whoever wants the check must read to the end.
class DigestSource : public ByteSource {
 public:
  // `size` left out: any length.
  DigestSource(std::unique_ptr<ByteSource> inner, std::string sha256, std::optional<uint64_t> size,
               std::string what);
  Result<std::span<const uint8_t>> Read() override;

 private:
  std::unique_ptr<ByteSource> inner_;
  std::string expected_;
  std::optional<uint64_t> size_;
  std::string what_;
  Sha256 sha_;
  uint64_t count_ = 0;
  bool checked_ = false;
};

// Removes gzip, bzip2, xz or zstd compression, nested too; plain bytes pass as they are. Refuses to
// expand beyond limits.max_ratio ("layer.bomb").
class InflateSource : public ByteSource {
 public:
  static Result<std::unique_ptr<InflateSource>> Open(std::unique_ptr<ByteSource> inner,
                                                     const ImportLimits& limits, std::string name);
  ~InflateSource() override;
  InflateSource(const InflateSource&) = delete;
  InflateSource& operator=(const InflateSource&) = delete;
  Result<std::span<const uint8_t>> Read() override;
  // Known once Open has returned.
  bool compressed() const { return compressed_; }

 private:
  friend struct ArchiveCallbacks;
  InflateSource(std::unique_ptr<ByteSource> inner, const ImportLimits& limits, std::string name);
  Error Fail(std::string_view what);

  std::unique_ptr<ByteSource> inner_;
  ImportLimits limits_;
  std::string name_;
  archive* archive_;
  bool empty_ = false;
  bool compressed_ = false;
  bool drained_ = false;
  uint64_t in_ = 0;
  uint64_t out_ = 0;
  std::optional<Error> inner_error_;
};

}  // namespace dsec::image
