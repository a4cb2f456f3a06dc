// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/id.h"
#include "base/result.h"

namespace dsec::image {

// What a layer is for; it fixes its place in the overlay (base lowest, toolkits on top).
enum class LayerKind { kBase, kWorkspace, kToolkit };
std::string_view KindName(LayerKind kind);
Result<LayerKind> ParseKind(std::string_view text);

// NAME:TAG, what people call a layer; tags move from one layer to another, ids never change.
struct LayerName {
  std::string name;
  std::string tag;
  std::string str() const { return name + ":" + tag; }
};
// NAME[:TAG], tag "latest" when left out. NAME: lower-case letters, digits and ._-/ between them,
// at most 128; TAG: word characters and .-, at most 128. kInvalidArgument "layer.bad_name".
Result<LayerName> ParseLayerName(std::string_view text);

// What an OCI or docker image says about running it. Nothing of it is applied while importing.
struct ImageConfig {
  std::vector<std::string> env;  // KEY=VALUE
  std::string workdir;
  std::string user;
  std::vector<std::string> entrypoint;
  std::vector<std::string> cmd;
  bool operator==(const ImageConfig&) const = default;
  bool empty() const { return *this == ImageConfig(); }
};

struct FileDigest {
  std::string sha256;  // 64 hex digits
  uint64_t size = 0;
  bool operator==(const FileDigest&) const = default;
};

// The digests of a blob's chunks (chunk_table.h).
struct ChunkDigests {
  uint32_t bytes = 0;  // of a chunk, a power of two; 0: there are none
  std::string sha256;  // of the table, 64 hex digits
  bool operator==(const ChunkDigests&) const = default;
};

// The identity of a layer: the SHA-256 of Encode() is its id. Times, names and origins are no part
// of it.
struct Manifest {
  // 1: written by mkfs.erofs, whose version the bytes depend on. 2: by WriteErofs; a function of
  // the tree (format_spec.md). 3: with digests of the blob's chunks. 4: with `lower`. All are read
  // alike.
  static constexpr int kFormat = 3;
  static constexpr int kWithLower = 4;
  static constexpr size_t kMaxLower = 15;
  static constexpr int kFirstWithChunks = 3;
  static constexpr uint32_t kLeastChunk = 64 << 10;
  static constexpr uint32_t kMostChunk = 4 << 20;
  int format = kFormat;
  LayerKind kind = LayerKind::kBase;
  FileDigest meta;
  FileDigest blob;
  ChunkDigests chunks;  // of the blob; from format 3 on
  ImageConfig config;   // of a base only
  // Layers that go below this one, lowest first: the rest of an image that is too large for one
  // pair. Of a base only; with it the format is kWithLower.
  std::vector<LayerId> lower;

  // Canonical JSON: sorted keys, no white space, config left out when empty.
  std::string Encode() const;
  // Accepts exactly what Encode writes. kInternal "layer.corrupt".
  static Result<Manifest> Parse(std::string_view text);
  LayerId Id() const;
  bool operator==(const Manifest&) const = default;
};

// One layer as the catalogue knows it.
struct LayerInfo {
  LayerId id;
  LayerKind kind = LayerKind::kBase;
  std::vector<std::string> names;  // NAME:TAG, sorted
  uint64_t meta_bytes = 0;
  uint64_t blob_bytes = 0;
  uint64_t entries = 0;        // files, folders and links in the tree
  uint64_t content_bytes = 0;  // sum of the file sizes
  int64_t created_unix_ms = 0;
  std::string source;  // what it was built from, for people
  ImageConfig config;
  std::map<std::string, std::string> labels;
  std::vector<LayerId> lower;  // go below it wherever it is used, lowest first
};

// Where a layer comes from: source, labels, entries, content and time of an info, as JSON. Lies
// beside the manifest, not hashed.
std::string EncodeOrigin(const LayerInfo& layer);
// Fills those members. kInternal "layer.corrupt" for what EncodeOrigin does not write; the info is
// as it was then.
Result<void> DecodeOrigin(std::string_view text, LayerInfo& layer);

std::string EncodeConfig(const ImageConfig& config);
Result<ImageConfig> DecodeConfig(std::string_view text);

// Bytes that may be hostile, made fit for a message: control and non-ASCII bytes as \xNN, at most
// 200 shown.
std::string Printable(std::string_view text);

// How far an import or build has come.
struct Progress {
  enum class Phase { kFetch, kRead, kWrite, kPublish };
  Phase phase = Phase::kRead;
  uint64_t entries = 0;
  uint64_t bytes = 0;
  uint64_t total_bytes = 0;  // 0 when not known
};
// Called often from the thread that builds; false cancels (kCancelled "layer.cancelled"). May be
// empty.
using ProgressFn = std::function<bool(const Progress&)>;

}  // namespace dsec::image
