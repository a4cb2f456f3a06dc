// SPDX-License-Identifier: Apache-2.0
#include "image/canonical_blob.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {

CanonicalBlob::CanonicalBlob(std::vector<int> content, const StoredForm* form, uint64_t size)
    : content_(std::move(content)),
      map_(form != nullptr ? std::optional<FormMap>(*form) : std::nullopt),
      size_(size) {}

CanonicalBlob::Piece CanonicalBlob::Find(uint64_t offset, uint64_t most) const {
  if (offset >= size_) return {};
  most = std::min(most, size_ - offset);
  if (!map_) return {content_.front(), offset, most};
  const FormMap::Place place = map_->Find(offset / StoredForm::kBlock);
  const uint64_t into = offset % StoredForm::kBlock;
  if (place.blocks == 0) return {};
  return {content_[place.file], place.block * StoredForm::kBlock + into,
          std::min(most, place.blocks * StoredForm::kBlock - into)};
}

Result<void> CanonicalBlob::ReadAt(uint64_t offset, std::span<uint8_t> out) const {
  while (!out.empty()) {
    const Piece piece = Find(offset, out.size());
    const ssize_t got = piece.bytes == 0 ? 0
                                         : ::pread(piece.file, out.data(), piece.bytes,
                                                   static_cast<off_t>(piece.offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return RootError(os::ErrnoError("layer.io", "read the content of a layer"));
    if (got == 0)
      return Error(Code::kInternal, "layer.corrupt",
                   fmt::format("the content ends at byte {}", offset));
    offset += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
  return Ok();
}

void CanonicalBlob::ForEachPiece(
    uint64_t offset, uint64_t bytes,
    const std::function<void(int file, uint64_t offset, uint64_t bytes)>& show) const {
  while (bytes > 0) {
    const Piece piece = Find(offset, bytes);
    if (piece.bytes == 0) return;
    show(piece.file, piece.offset, piece.bytes);
    offset += piece.bytes;
    bytes -= piece.bytes;
  }
}

}  // namespace dsec::image
