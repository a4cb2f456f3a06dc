// SPDX-License-Identifier: Apache-2.0
#include "image/compressor.h"

#include <lz4.h>
#include <lz4hc.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/check.h"
#include "image/layer.h"

namespace dsec::image {
namespace {

const char* Chars(const uint8_t* bytes) { return reinterpret_cast<const char*>(bytes); }
char* Chars(uint8_t* bytes) { return reinterpret_cast<char*>(bytes); }

size_t Blocks(size_t bytes) { return (bytes + Compressor::kBlock - 1) / Compressor::kBlock; }

// What a piece may become at most. A block less saves nothing that a read notices, as it has to
// unpack the piece then.
size_t MostPacked(size_t bytes) {
  const size_t blocks = Blocks(bytes);
  return (blocks - std::max<size_t>(1, blocks / 8)) * Compressor::kBlock;
}

}  // namespace

Result<Compression> ParseCompression(std::string_view text) {
  Compression compression;
  if (text == "none") return compression;
  constexpr std::string_view kName = "lz4hc";
  compression.level = Compression::kDefault;
  if (text == kName) return compression;
  if (text.starts_with(kName) && text.substr(kName.size()).starts_with(':')) {
    const std::string_view level = text.substr(kName.size() + 1);
    const auto [end, failed] =
        std::from_chars(level.data(), level.data() + level.size(), compression.level);
    if (failed == std::errc() && end == level.data() + level.size() &&
        compression.level >= Compression::kLowest && compression.level <= Compression::kHighest) {
      return compression;
    }
  }
  return Error(Code::kInvalidArgument, "layer.bad_compression",
               fmt::format("\"{}\" is neither none nor lz4hc[:LEVEL] with a level from {} to {}",
                           Printable(text), Compression::kLowest, Compression::kHighest))
      .WithField("compress");
}

std::string DescribeCompression(const Compression& compression) {
  if (!compression.on()) return "none";
  return fmt::format("lz4hc:{} liblz4:{}", compression.level, ::LZ4_versionString());
}

Compressor::Compressor(const Compression& compression) : level_(compression.level) {
  if (!compression.on()) return;
  state_.resize(static_cast<size_t>(std::max(::LZ4_sizeofStateHC(), ::LZ4_sizeofState())));
  packed_.resize(kMaxPiece);
  blocks_.resize(kMaxPiece);
}

std::span<const uint8_t> Compressor::Compress(std::span<const uint8_t> piece) {
  DSEC_CHECK(level_ > 0 && !piece.empty() && piece.size() <= kMaxPiece);
  const size_t most = MostPacked(piece.size());
  if (most == 0) return {};
  const int size = static_cast<int>(piece.size());
  const int room = static_cast<int>(most);
  // HC makes it a third smaller than this at most, in all that was tried.
  const int probe_room =
      static_cast<int>(std::min(piece.size() - piece.size() / 32, most + most / 3));
  if (::LZ4_compress_fast_extState(state_.data(), Chars(piece.data()), Chars(packed_.data()), size,
                                   probe_room, 1) <= 0) {
    return {};
  }
  const int packed = ::LZ4_compress_HC_extStateHC(state_.data(), Chars(piece.data()),
                                                  Chars(packed_.data()), size, room, level_);
  if (packed <= 0) return {};
  const size_t bytes = Blocks(static_cast<size_t>(packed)) * kBlock;
  const size_t zeros = bytes - static_cast<size_t>(packed);
  std::memset(blocks_.data(), 0, zeros);
  std::memcpy(blocks_.data() + zeros, packed_.data(), static_cast<size_t>(packed));
  return {blocks_.data(), bytes};
}

Result<void> Compressor::Decompress(std::span<const uint8_t> blocks, std::span<uint8_t> piece) {
  // The first byte of LZ4 is a token with literals, so never 0.
  const auto start = std::ranges::find_if(blocks, [](uint8_t byte) { return byte != 0; });
  const std::span<const uint8_t> packed(start, blocks.end());
  const int size =
      ::LZ4_decompress_safe(Chars(packed.data()), Chars(piece.data()),
                            static_cast<int>(packed.size()), static_cast<int>(piece.size()));
  if (size == static_cast<int>(piece.size())) return Ok();
  return Error(Code::kInternal, "layer.corrupt", "compressed content does not unpack to its size");
}

}  // namespace dsec::image
