// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "image/layer.h"

namespace dsec::image {

// Pure parsers of the documents of the OCI image specification 1.1 and of `docker save`. All input
// is hostile; what does not fit is kInvalidArgument "layer.malformed" or "layer.unsupported" with
// the field. Documents are at most kMaxDocument long.
inline constexpr size_t kMaxDocument = 4 << 20;

struct Descriptor {
  std::string media_type;
  std::string sha256;  // 64 hex digits; other algorithms are refused
  uint64_t size = 0;
  std::string ref_name;      // annotation org.opencontainers.image.ref.name
  std::string architecture;  // of `platform`, may be empty
  std::string os;
};

// An index leads to manifests or further indexes.
Result<std::vector<Descriptor>> ParseIndex(std::string_view json);
bool IsIndex(const Descriptor& descriptor);
// The one descriptor that `ref` (annotation; empty: any) and the platform of this host leave over.
// Several or none: kInvalidArgument "layer.ambiguous_ref" / "layer.ref_not_found" with the choices.
Result<Descriptor> Choose(const std::vector<Descriptor>& list, std::string_view ref);

struct ImageManifest {
  Descriptor config;
  std::vector<Descriptor> layers;  // lowest first
};
Result<ImageManifest> ParseImageManifest(std::string_view json);

struct ImageDocument {
  ImageConfig config;
  std::vector<std::string> diff_ids;  // SHA-256 of each uncompressed layer
};
Result<ImageDocument> ParseImageDocument(std::string_view json);

// manifest.json of a docker archive, one image.
struct DockerImage {
  std::string config;               // member name
  std::vector<std::string> layers;  // member names, lowest first
  std::vector<std::string> tags;
};
// The image that has the tag `ref`, or the only one when `ref` is empty.
Result<DockerImage> ParseDockerManifest(std::string_view json, std::string_view ref);

}  // namespace dsec::image
