// SPDX-License-Identifier: Apache-2.0
#include "image/testing/archives.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/check.h"
#include "image/digest.h"
#include "image/fs.h"
#include "os/file.h"

namespace dsec::image::testing {
namespace {

using nlohmann::json;

void Field(std::string& header, size_t at, size_t size, std::string_view text) {
  header.replace(at, std::min(size, text.size()), text.substr(0, size));
}

// Octal, or base-256 when it does not fit.
void Number(std::string& header, size_t at, size_t size, uint64_t value) {
  const std::string octal = fmt::format("{:0{}o}", value, size - 1);
  if (octal.size() == size - 1) {
    Field(header, at, size, octal);
    return;
  }
  for (size_t i = 0; i < size; ++i) {
    header[at + size - 1 - i] = i < 8 ? static_cast<char>(value >> (8 * i)) : '\0';
  }
  header[at] = '\x80';
}

std::string Block(const Member& member, uint64_t size) {
  std::string header(512, '\0');
  Field(header, 0, 100, member.name);
  Number(header, 100, 8, member.mode);
  Number(header, 108, 8, member.uid);
  Number(header, 116, 8, member.gid);
  Number(header, 124, 12, size);
  Number(header, 136, 12, static_cast<uint64_t>(member.mtime));
  header.replace(148, 8, 8, ' ');
  header[156] = member.type;
  Field(header, 157, 100, member.target);
  Field(header, 257, 8, std::string_view("ustar\00000", 8));
  Number(header, 329, 8, member.dev_major);
  Number(header, 337, 8, member.dev_minor);
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  Field(header, 148, 8, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return header;
}

void Append(std::string& out, const Member& member, std::string_view data) {
  out += Block(member, data.size());
  out += data;
  out.append((512 - data.size() % 512) % 512, '\0');
}

std::string PaxRecords(const std::map<std::string, std::string>& records) {
  std::string text;
  for (const auto& [key, value] : records) {
    const size_t rest = key.size() + value.size() + 3;  // space, '=' and newline
    size_t total = rest + 1;
    while (std::to_string(total).size() + rest != total) ++total;
    text += fmt::format("{} {}={}\n", total, key, value);
  }
  return text;
}

std::string ReadWhole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

json ConfigJson(const ImageConfig& config, const std::vector<std::string>& tars) {
  json diff_ids = json::array();
  for (const std::string& tar : tars) diff_ids.push_back("sha256:" + Sha256Hex(tar));
  return {{"architecture", "amd64"},
          {"os", "linux"},
          {"config",
           {{"Env", config.env},
            {"WorkingDir", config.workdir},
            {"User", config.user},
            {"Entrypoint", config.entrypoint},
            {"Cmd", config.cmd}}},
          {"rootfs", {{"type", "layers"}, {"diff_ids", diff_ids}}}};
}

void Describe(int dirfd, const std::string& prefix, std::map<ino_t, std::string>& links,
              std::vector<std::string>& out) {
  auto names = ListNames(dirfd, UINT64_MAX);
  DSEC_CHECK(names.ok());
  names->insert(names->begin(), ".");
  for (const std::string& name : *names) {
    struct stat status;
    DSEC_CHECK(::fstatat(dirfd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0);
    if (name == "." && !prefix.empty()) continue;
    const std::string path = prefix + name;
    std::string line =
        fmt::format("{} {:o} {}:{} {}.{:09}", Printable(path), status.st_mode, status.st_uid,
                    status.st_gid, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
    const std::string proc = fmt::format("/proc/self/fd/{}/{}", dirfd, name);
    std::array<char, 65536> list;
    const ssize_t size = ::llistxattr(proc.c_str(), list.data(), list.size());
    std::map<std::string, std::string> xattrs;
    for (ssize_t start = 0; start < size;) {
      const std::string xattr = list.data() + start;
      start += static_cast<ssize_t>(xattr.size()) + 1;
      std::array<char, 65536> value;
      const ssize_t n = ::lgetxattr(proc.c_str(), xattr.c_str(), value.data(), value.size());
      DSEC_CHECK(n >= 0);
      xattrs[xattr] = std::string(value.data(), static_cast<size_t>(n));
    }
    for (const auto& [key, value] : xattrs) line += fmt::format(" {}={}", key, Printable(value));
    if (S_ISLNK(status.st_mode)) {
      std::array<char, 4096> target;
      const ssize_t n = ::readlinkat(dirfd, name.c_str(), target.data(), target.size());
      DSEC_CHECK(n >= 0);
      line += " -> " + Printable({target.data(), static_cast<size_t>(n)});
    } else if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) {
      line += fmt::format(" dev {}:{}", major(status.st_rdev), minor(status.st_rdev));
    } else if (S_ISREG(status.st_mode)) {
      auto fd = os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_NOFOLLOW);
      DSEC_CHECK(fd.ok());
      auto digest = Sha256File(fd->get(), nullptr);
      DSEC_CHECK(digest.ok());
      line += fmt::format(" {} bytes {}", status.st_size, digest->substr(0, 16));
    }
    if (!S_ISDIR(status.st_mode) && status.st_nlink > 1) {
      line += " = " + links.try_emplace(status.st_ino, Printable(path)).first->second;
    }
    out.push_back(std::move(line));
    if (S_ISDIR(status.st_mode) && name != ".") {
      auto child = os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      DSEC_CHECK(child.ok());
      Describe(child->get(), path + "/", links, out);
    }
  }
}

}  // namespace

std::string MakeTar(const std::vector<Member>& members) {
  std::string out;
  for (const Member& member : members) {
    if (!member.pax.empty()) {
      Append(out, {.name = "pax", .type = 'x'}, PaxRecords(member.pax));
    }
    Append(out, member, member.data);
  }
  out.append(1024, '\0');
  return out;
}

std::string Compress(std::string_view program, const std::string& data) {
  auto folder = os::TempDir::Create("dsec-timg-");
  DSEC_CHECK(folder.ok());
  const std::string in = folder->path() + "/in";
  WriteFile(in, data);
  const std::string command = fmt::format("{} -c {} > {}.out", program, in, in);
  DSEC_CHECK(std::system(command.c_str()) == 0);
  return ReadWhole(in + ".out");
}

void WriteFile(const std::string& path, std::string_view data) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(data.data(), static_cast<std::streamsize>(data.size()));
  out.close();
  DSEC_CHECK(out.good());
}

void WriteOciLayout(const std::string& path, const std::vector<LayoutLayer>& layers,
                    const ImageConfig& config, const std::string& ref_name) {
  DSEC_CHECK(::mkdir((path + "/blobs").c_str(), 0755) == 0);
  DSEC_CHECK(::mkdir((path + "/blobs/sha256").c_str(), 0755) == 0);
  const auto store = [&](const std::string& blob, const std::string& media_type) -> json {
    const std::string hex = Sha256Hex(blob);
    WriteFile(path + "/blobs/sha256/" + hex, blob);
    return {{"mediaType", media_type}, {"digest", "sha256:" + hex}, {"size", blob.size()}};
  };
  std::vector<std::string> tars;
  json list = json::array();
  for (const LayoutLayer& layer : layers) {
    tars.push_back(layer.tar);
    list.push_back(store(layer.blob.empty() ? layer.tar : layer.blob, layer.media_type));
  }
  const json manifest = {{"schemaVersion", 2},
                         {"mediaType", "application/vnd.oci.image.manifest.v1+json"},
                         {"config", store(ConfigJson(config, tars).dump(),
                                          "application/vnd.oci.image.config.v1+json")},
                         {"layers", list}};
  json entry = store(manifest.dump(), "application/vnd.oci.image.manifest.v1+json");
  if (!ref_name.empty()) {
    entry["annotations"] = {{"org.opencontainers.image.ref.name", ref_name}};
  }
  WriteFile(path + "/index.json", json{{"schemaVersion", 2}, {"manifests", {entry}}}.dump());
  WriteFile(path + "/oci-layout", R"({"imageLayoutVersion":"1.0.0"})");
}

std::string MakeDockerArchive(const std::vector<std::string>& layers, const ImageConfig& config,
                              const std::string& tag) {
  std::vector<Member> members;
  json names = json::array();
  for (const std::string& tar : layers) {
    const std::string id = Sha256Hex(tar).substr(0, 20);
    const std::string name = id + "/layer.tar";
    if (std::ranges::find(names, json(name)) == names.end()) {
      members.push_back(Dir(id + "/"));
      members.push_back(File(name, tar));
    }
    names.push_back(name);
  }
  const std::string text = ConfigJson(config, layers).dump();
  const std::string file = Sha256Hex(text) + ".json";
  members.push_back(File(file, text));
  const json manifest = {{{"Config", file}, {"RepoTags", {tag}}, {"Layers", names}}};
  members.push_back(File("manifest.json", manifest.dump()));
  // The order of an archive is not the order of the image.
  std::ranges::reverse(members);
  return MakeTar(members);
}

std::vector<std::string> DescribeTree(int fd) {
  std::map<ino_t, std::string> links;
  std::vector<std::string> out;
  Describe(fd, "", links, out);
  return out;
}

std::vector<std::string> DescribeTree(const std::string& path) {
  auto fd = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  DSEC_CHECK(fd.ok());
  return DescribeTree(fd->get());
}

}  // namespace dsec::image::testing
