// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "image/layer.h"

namespace dsec::image::testing {

// One member of a hand-made archive; nothing is checked, so that hostile ones can be made.
struct Member {
  std::string name = {};
  char type = '0';  // ustar typeflag
  std::string data = {};
  std::string target = {};
  uint32_t mode = 0644;
  uint64_t uid = 0;
  uint64_t gid = 0;
  int64_t mtime = 1'600'000'000;
  uint32_t dev_major = 0;
  uint32_t dev_minor = 0;
  std::map<std::string, std::string> pax = {};  // records of an extended header before it
};

inline Member File(std::string name, std::string data = "x") {
  return {.name = std::move(name), .data = std::move(data)};
}
inline Member Dir(std::string name, uint32_t mode = 0755) {
  return {.name = std::move(name), .type = '5', .mode = mode};
}
inline Member Symlink(std::string name, std::string target) {
  return {.name = std::move(name), .type = '2', .target = std::move(target), .mode = 0777};
}
inline Member Hardlink(std::string name, std::string target) {
  return {.name = std::move(name), .type = '1', .target = std::move(target)};
}
inline Member Device(std::string name, uint32_t major, uint32_t minor) {
  return {.name = std::move(name), .type = '3', .dev_major = major, .dev_minor = minor};
}

// ustar with pax headers where a member asks for them.
std::string MakeTar(const std::vector<Member>& members);
// Through the system's gzip, xz or zstd.
std::string Compress(std::string_view program, const std::string& data);

void WriteFile(const std::string& path, std::string_view data);

struct LayoutLayer {
  std::string tar = {};
  std::string media_type = "application/vnd.oci.image.layer.v1.tar";
  std::string blob = {};  // what is stored; empty: the tar itself
};
// An OCI image layout of one image below the existing, empty folder `path`.
void WriteOciLayout(const std::string& path, const std::vector<LayoutLayer>& layers,
                    const ImageConfig& config, const std::string& ref_name = "");
// What `docker save` wrote before it wrote OCI layouts.
std::string MakeDockerArchive(const std::vector<std::string>& layers, const ImageConfig& config,
                              const std::string& tag);

// All there is to see of a tree, a line an entry, in byte order: type, mode, owner, mtime with ns,
// size, device, link target, xattrs, SHA-256 of the content, and which paths are the same inode.
// `fd` is a folder, O_PATH will do.
std::vector<std::string> DescribeTree(int fd);
std::vector<std::string> DescribeTree(const std::string& path);

}  // namespace dsec::image::testing
