// SPDX-License-Identifier: Apache-2.0
#include "disk/layer_writer.h"

#include <unistd.h>

#include <algorithm>

#include "base/fault.h"

namespace dsec::disk {
namespace {

constexpr uint64_t kCopyBytes = 1 << 20;

}  // namespace

Result<LayerWriter> LayerWriter::Create(int fd, LayerInfo info) {
  DSEC_TRY_VOID(CheckDiskBytes(info.virtual_bytes));
  LayerWriter writer(fd, std::move(info));
  LayerInfo header = writer.info_;
  header.flags = kIsHeader | kIsData;
  header.index_offset = header.index_entries = 0;
  DSEC_TRY_VOID(WriteFully(fd, 0, EncodeHeader(header)));
  return writer;
}

Result<void> LayerWriter::AddData(uint64_t first, std::span<const uint8_t> data) {
  Extent extent;
  extent.first = first;
  extent.count = static_cast<uint32_t>(data.size() / kSectorBytes);
  extent.place = end_ / kSectorBytes;
  if (first < done_ || data.size() % kSectorBytes != 0 ||
      extent.end() > info_.virtual_bytes / kSectorBytes)
    return Error(Code::kInternal, "disk.io", "parts of a layer are not in order");
  DSEC_TRY_VOID(WriteFully(fd_, end_, data));
  end_ += data.size();
  done_ = extent.end();
  Append(extents_, extent);
  return Ok();
}

Result<void> LayerWriter::AddZeros(uint64_t first, uint64_t count) {
  if (first < done_ || count > info_.virtual_bytes / kSectorBytes - first)
    return Error(Code::kInternal, "disk.io", "parts of a layer are not in order");
  done_ = first + count;
  while (count > 0) {
    Extent extent;
    extent.first = first;
    extent.count = static_cast<uint32_t>(std::min<uint64_t>(count, UINT32_MAX));
    extent.zero = true;
    Append(extents_, extent);
    first += extent.count;
    count -= extent.count;
  }
  return Ok();
}

Result<LayerInfo> LayerWriter::Finish() {
  const auto round = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  info_.flags = kIsData | kIsSealed | kInfoValid;
  info_.index_offset = round(end_);
  info_.index_entries = EntriesFor(extents_);
  if (info_.index_entries > kMaxEntries) {
    return Error(
        Code::kResourceExhausted, "disk.too_many_extents",
        fmt::format("{} entries, a layer has {} at most", info_.index_entries, kMaxEntries));
  }
  const auto index = EncodeIndex(extents_);
  DSEC_TRY_VOID(WriteFully(fd_, info_.index_offset, index));
  DSEC_TRY_VOID(WriteFully(fd_, round(info_.index_offset + index.size()), EncodeHeader(info_)));
  if (::fsync(fd_) != 0) return DiskError("sync a layer");
  return info_;
}

Result<LayerInfo> CollapseTo(int fd, std::span<const std::shared_ptr<const Layer>> layers,
                             bool bottom, const std::function<bool(uint64_t)>& proceed) {
  if (layers.empty())
    return Error(Code::kInvalidArgument, "disk.out_of_range", "no layers to make one of");
  DSEC_TRY(auto merged, bottom ? MergeChain(layers) : MergeLayers(layers));
  LayerInfo info = layers.back()->info;
  info.parent_uuid = layers.front()->info.parent_uuid;
  DSEC_TRY(auto writer, LayerWriter::Create(fd, info));
  std::vector<uint8_t> buffer(kCopyBytes);
  for (const Extent& extent : merged) {
    if (extent.zero) {
      DSEC_TRY_VOID(writer.AddZeros(extent.first, extent.count));
      continue;
    }
    for (uint64_t first = extent.first; first < extent.end();) {
      const uint64_t end = std::min<uint64_t>(extent.end(), first + buffer.size() / kSectorBytes);
      const Extent part = Clip(extent, first, end);
      const std::span<uint8_t> bytes(buffer.data(), uint64_t{part.count} * kSectorBytes);
      DSEC_TRY_VOID(layers[part.layer]->file->ReadNow(part.place * kSectorBytes, bytes));
      DSEC_TRY_VOID(writer.AddData(first, bytes));
      first = end;
      if (proceed && !proceed(writer.data_bytes()))
        return Error(Code::kCancelled, "disk.cancelled", "stopped on request");
    }
  }
  DSEC_FAULT_POINT("disk.collapse.before_index");
  return writer.Finish();
}

}  // namespace dsec::disk
