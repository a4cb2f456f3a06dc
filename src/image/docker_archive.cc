// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <optional>

#include "image/byte_source.h"
#include "image/fs.h"
#include "image/importers.h"
#include "image/oci_json.h"
#include "image/path.h"
#include "image/tar_source.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr uint64_t kMaxMembers = 10'000;  // of the outer archive: a few for each layer

// The bytes of one member of the outer archive.
class MemberSource : public ByteSource {
 public:
  MemberSource(std::unique_ptr<TarSource> archive, std::string name)
      : archive_(std::move(archive)), name_(std::move(name)) {}

  Result<std::span<const uint8_t>> Read() override {
    DSEC_TRY(const DataRun run, archive_->ReadData());
    if (!run.bytes.empty() && run.offset != end_) {
      return Error(Code::kInvalidArgument, "layer.malformed",
                   fmt::format("member \"{}\" has holes", Printable(name_)));
    }
    end_ += run.bytes.size();
    return run.bytes;
  }

 private:
  std::unique_ptr<TarSource> archive_;
  std::string name_;
  uint64_t end_ = 0;
};

struct Member {
  std::string real;  // of a link: the member that it stands for
  uint64_t size = 0;
};

class DockerArchive : public ImageReader {
 public:
  DockerArchive(os::UniqueFd fd, std::string name, const ImportLimits& limits, Warnings& warnings)
      : fd_(std::move(fd)), name_(std::move(name)), limits_(limits), warnings_(warnings) {}

  Result<void> Load(const std::string& ref) {
    DSEC_TRY_VOID(Index());
    DSEC_TRY(const std::string manifest, ReadMember("manifest.json"));
    DSEC_TRY(image_, ParseDockerManifest(manifest, ref));
    DSEC_TRY(const std::string config, ReadMember(image_.config));
    DSEC_TRY(ImageDocument document, ParseImageDocument(config));
    if (document.diff_ids.size() != image_.layers.size()) {
      return Error(Code::kInvalidArgument, "layer.malformed",
                   fmt::format("manifest.json names {} layers and the config {}",
                               image_.layers.size(), document.diff_ids.size()));
    }
    config_ = std::move(document.config);
    diff_ids_ = std::move(document.diff_ids);
    for (const std::string& layer : image_.layers) {
      DSEC_TRY(const Member member, Find(layer));
      least_bytes_ += std::min(member.size, limits_.max_bytes);
    }
    return Ok();
  }

  size_t layer_count() const override { return image_.layers.size(); }
  uint64_t least_bytes() const override { return least_bytes_; }
  bool has_whiteouts() const override { return true; }

  Result<std::unique_ptr<EntrySource>> OpenLayer(size_t index) override {
    const std::string name = "layer " + Printable(image_.layers[index]);
    DSEC_TRY(auto bytes, OpenMember(image_.layers[index]));
    DSEC_TRY(auto plain, InflateSource::Open(std::move(bytes), limits_, name));
    auto checked =
        std::make_unique<DigestSource>(std::move(plain), diff_ids_[index], std::nullopt, name);
    DSEC_TRY(auto source, TarSource::Open(std::move(checked), name, warnings_));
    return std::unique_ptr<EntrySource>(std::move(source));
  }

 private:
  // A reader of the outer archive from its start. One at a time: they share the file's position.
  Result<std::unique_ptr<TarSource>> Rewind() {
    const int copy = ::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0);
    if (copy < 0 || ::lseek(copy, 0, SEEK_SET) != 0) {
      return os::ErrnoError("layer.source", fmt::format("rewind {}", name_));
    }
    return TarSource::Open(std::make_unique<FileSource>(os::UniqueFd(copy), name_), name_,
                           warnings_);
  }

  Result<void> Index() {
    DSEC_TRY(auto archive, Rewind());
    Entry entry;
    while (true) {
      DSEC_TRY(const bool more, archive->Next(entry));
      if (!more) return Ok();
      if (entry.type == EntryType::kDirectory) continue;
      DSEC_TRY(std::string path, CleanPath(entry.path, limits_.max_depth));
      Member member{path, entry.size};
      // Layers that several images share: a symbolic link "../<id>/layer.tar" or a hard link.
      if (entry.type == EntryType::kSymlink || entry.type == EntryType::kHardlink) {
        const bool up = entry.type == EntryType::kSymlink && entry.target.starts_with("../");
        DSEC_TRY(member.real,
                 CleanPath(std::string_view(entry.target).substr(up ? 3 : 0), limits_.max_depth));
      } else if (entry.type != EntryType::kFile) {
        continue;
      }
      if (members_.size() >= kMaxMembers) {
        return Error(Code::kInvalidArgument, "layer.too_many_entries",
                     fmt::format("{} has more than {} members", name_, kMaxMembers));
      }
      if (!members_.emplace(path, std::move(member)).second) {
        return Error(Code::kInvalidArgument, "layer.malformed",
                     fmt::format("{} holds \"{}\" twice", name_, Printable(path)));
      }
    }
  }

  // The file that `name` stands for, over at most one link.
  Result<Member> Find(const std::string& name) const {
    DSEC_TRY(const std::string path, CleanPath(name, limits_.max_depth));
    auto found = members_.find(path);
    if (found != members_.end() && found->second.real != path) {
      found = members_.find(found->second.real);
      if (found != members_.end() && found->second.real != found->first) found = members_.end();
    }
    if (found == members_.end()) {
      return Error(Code::kInvalidArgument, "layer.malformed",
                   fmt::format("{} does not hold \"{}\"", name_, Printable(name)));
    }
    return found->second;
  }

  Result<std::unique_ptr<ByteSource>> OpenMember(const std::string& name) {
    DSEC_TRY(const Member member, Find(name));
    DSEC_TRY(auto archive, Rewind());
    Entry entry;
    while (true) {
      DSEC_TRY(const bool more, archive->Next(entry));
      if (!more) break;
      if (entry.type != EntryType::kFile) continue;
      DSEC_TRY(const std::string path, CleanPath(entry.path, limits_.max_depth));
      if (path == member.real) {
        return std::unique_ptr<ByteSource>(
            std::make_unique<MemberSource>(std::move(archive), member.real));
      }
    }
    return Error(Code::kInvalidArgument, "layer.source_changed",
                 fmt::format("{} lost \"{}\" while it was read", name_, Printable(name)));
  }

  Result<std::string> ReadMember(const std::string& name) {
    DSEC_TRY(auto bytes, OpenMember(name));
    std::string text;
    while (true) {
      DSEC_TRY(const auto piece, bytes->Read());
      if (piece.empty()) return text;
      text.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      if (text.size() > kMaxDocument) {
        return Error(Code::kInvalidArgument, "layer.malformed",
                     fmt::format("\"{}\" is longer than {} bytes", Printable(name), kMaxDocument));
      }
    }
  }

  os::UniqueFd fd_;
  std::string name_;
  ImportLimits limits_;
  Warnings& warnings_;
  std::map<std::string, Member> members_;
  DockerImage image_;
  std::vector<std::string> diff_ids_;
  uint64_t least_bytes_ = 0;
};

// The archive as a plain, seekable file.
Result<os::UniqueFd> Plain(os::UniqueFd fd, const std::string& path, int scratch,
                           const ImportLimits& limits) {
  const bool seekable = ::lseek(fd.get(), 0, SEEK_SET) == 0;
  const int copy = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return os::ErrnoError("layer.source", "dup");
  DSEC_TRY(auto bytes, InflateSource::Open(std::make_unique<FileSource>(os::UniqueFd(copy), path),
                                           limits, path));
  if (seekable && !bytes->compressed()) return fd;
  os::UniqueFd plain(::openat(scratch, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!plain.valid()) return StoreError("make a file for the inflated archive");
  constexpr uint64_t kSpaceCheckBytes = 64 << 20;
  uint64_t written = 0;
  uint64_t checked = 0;
  while (true) {
    DSEC_TRY(const auto piece, bytes->Read());
    if (piece.empty()) return plain;
    if (piece.size() > limits.max_bytes - written) {
      return Error(Code::kInvalidArgument, "layer.too_large",
                   fmt::format("{} inflates to more than {} bytes", path, limits.max_bytes));
    }
    written += piece.size();
    if (written - checked >= kSpaceCheckBytes) {
      checked = written;
      // The tree and the image will take as much again, each.
      DSEC_TRY_VOID(RequireSpace(scratch, 2 * written, "the import"));
    }
    auto wrote =
        os::WriteAll(plain.get(), {reinterpret_cast<const char*>(piece.data()), piece.size()});
    if (!wrote.ok()) {
      errno = wrote.error().sys_errno();
      return StoreError("write the inflated archive");
    }
  }
}

}  // namespace

Result<std::unique_ptr<ImageReader>> OpenDockerArchive(const std::string& path,
                                                       const std::string& ref, int scratch,
                                                       const ImportLimits& limits,
                                                       Warnings& warnings) {
  DSEC_TRY(auto fd, OpenSource(path));
  DSEC_TRY(auto plain, Plain(std::move(fd), path, scratch, limits));
  auto image = std::make_unique<DockerArchive>(std::move(plain), path, limits, warnings);
  DSEC_TRY_VOID(image->Load(ref));
  return std::unique_ptr<ImageReader>(std::move(image));
}

}  // namespace dsec::image
