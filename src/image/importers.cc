// SPDX-License-Identifier: Apache-2.0
#include "image/importers.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <optional>

#include "image/byte_source.h"
#include "image/fs.h"
#include "image/oci_json.h"
#include "image/tar_source.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr int kMaxIndexDepth = 3;  // an index of indexes; deeper ones are no real images

Error SourceError(const std::string& path, const Error& cause) {
  return Error(Code::kInvalidArgument, "layer.source",
               fmt::format("cannot open {}: {}", path, cause.message()))
      .WithErrno(cause.sys_errno())
      .WithField("source");
}

uint64_t RegularSize(int fd) {
  struct stat status;
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  return regular ? static_cast<uint64_t>(status.st_size) : 0;
}

class TarImage : public ImageReader {
 public:
  TarImage(os::UniqueFd fd, std::string name, const ImportLimits& limits, Warnings& warnings)
      : bytes_(RegularSize(fd.get())),
        fd_(std::move(fd)),
        name_(std::move(name)),
        limits_(limits),
        warnings_(warnings) {}

  size_t layer_count() const override { return 1; }
  uint64_t least_bytes() const override { return bytes_; }
  bool has_whiteouts() const override { return true; }

  Result<std::unique_ptr<EntrySource>> OpenLayer(size_t) override {
    auto file = std::make_unique<FileSource>(std::move(fd_), name_);
    DSEC_TRY(auto plain, InflateSource::Open(std::move(file), limits_, name_));
    DSEC_TRY(auto source, TarSource::Open(std::move(plain), name_, warnings_));
    return std::unique_ptr<EntrySource>(std::move(source));
  }

 private:
  uint64_t bytes_;
  os::UniqueFd fd_;
  std::string name_;
  ImportLimits limits_;
  Warnings& warnings_;
};

class OciImage : public ImageReader {
 public:
  // `blobs` invalid: they are in the layout.
  OciImage(os::UniqueFd root, os::UniqueFd blobs, const ImportLimits& limits, Warnings& warnings)
      : root_(std::move(root)), blobs_(std::move(blobs)), limits_(limits), warnings_(warnings) {}

  Result<void> Load(const std::string& ref) {
    DSEC_TRY(const std::string index, os::ReadFile(root_.get(), "index.json", kMaxDocument));
    DSEC_TRY(auto list, ParseIndex(index));
    DSEC_TRY(Descriptor chosen, Choose(list, ref));
    for (int depth = 0; IsIndex(chosen); ++depth) {
      if (depth == kMaxIndexDepth) {
        return Error(Code::kInvalidArgument, "layer.unsupported", "indexes of indexes, too deep");
      }
      DSEC_TRY(const std::string nested, ReadDocument(chosen));
      DSEC_TRY(list, ParseIndex(nested));
      DSEC_TRY(chosen, Choose(list, ""));  // by platform alone from here on
    }
    DSEC_TRY(const std::string text, ReadDocument(chosen));
    DSEC_TRY(ImageManifest manifest, ParseImageManifest(text));
    DSEC_TRY(const std::string config, ReadDocument(manifest.config));
    DSEC_TRY(ImageDocument document, ParseImageDocument(config));
    config_ = std::move(document.config);
    layers_ = std::move(manifest.layers);
    return Ok();
  }

  size_t layer_count() const override { return layers_.size(); }
  bool has_whiteouts() const override { return true; }
  uint64_t least_bytes() const override {
    uint64_t total = 0;
    for (const Descriptor& layer : layers_) {
      total += std::min(layer.size, limits_.max_bytes);  // a size that is a lie must not overflow
    }
    return total;
  }

  Result<std::unique_ptr<EntrySource>> OpenLayer(size_t index) override {
    const Descriptor& layer = layers_[index];
    const std::string name = "layer sha256:" + layer.sha256;
    DSEC_TRY(auto fd, OpenBlob(layer));
    auto checked = std::make_unique<DigestSource>(std::make_unique<FileSource>(std::move(fd), name),
                                                  layer.sha256, layer.size, name);
    DSEC_TRY(auto plain, InflateSource::Open(std::move(checked), limits_, name));
    DSEC_TRY(auto source, TarSource::Open(std::move(plain), name, warnings_));
    return std::unique_ptr<EntrySource>(std::move(source));
  }

 private:
  Result<os::UniqueFd> OpenBlob(const Descriptor& descriptor) const {
    const std::string path = (blobs_.valid() ? "sha256/" : "blobs/sha256/") + descriptor.sha256;
    const int folder = blobs_.valid() ? blobs_.get() : root_.get();
    auto fd = os::OpenBeneath(folder, path.c_str(), O_RDONLY | O_NONBLOCK);
    if (!fd.ok()) return SourceError(path, fd.error());
    if (blobs_.valid() && ::futimens(fd->get(), nullptr) != 0) return StoreError("touch a blob");
    return fd;
  }

  Result<std::string> ReadDocument(const Descriptor& descriptor) const {
    DSEC_TRY(auto fd, OpenBlob(descriptor));
    DSEC_TRY(std::string text, os::ReadAll(fd.get(), kMaxDocument));
    if (text.size() != descriptor.size || Sha256Hex(text) != descriptor.sha256) {
      return Error(Code::kInvalidArgument, "layer.digest_mismatch",
                   fmt::format("blob sha256:{} holds something else", descriptor.sha256));
    }
    return text;
  }

  os::UniqueFd root_;
  os::UniqueFd blobs_;
  ImportLimits limits_;
  Warnings& warnings_;
  std::vector<Descriptor> layers_;
};

}  // namespace

Result<os::UniqueFd> OpenSource(const std::string& path) {
  auto fd = path == "-" ? os::OpenAt(AT_FDCWD, "/dev/stdin", O_RDONLY)
                        : os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOCTTY);
  if (!fd.ok()) return SourceError(path, fd.error());
  struct stat status;
  if (::fstat(fd->get(), &status) != 0 || !(S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode))) {
    return Error(Code::kInvalidArgument, "layer.source",
                 fmt::format("{} is neither a file nor a pipe", path))
        .WithField("source");
  }
  return fd;
}

Result<std::unique_ptr<ImageReader>> OpenTar(const std::string& path, const ImportLimits& limits,
                                             Warnings& warnings) {
  DSEC_TRY(auto fd, OpenSource(path));
  return std::unique_ptr<ImageReader>(
      std::make_unique<TarImage>(std::move(fd), path, limits, warnings));
}

Result<std::unique_ptr<ImageReader>> OpenOciLayout(const std::string& path, const std::string& ref,
                                                   const ImportLimits& limits, Warnings& warnings,
                                                   const std::string& blobs) {
  auto root = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!root.ok()) return SourceError(path, root.error());
  os::UniqueFd shared;
  if (!blobs.empty()) {
    auto folder = os::OpenAt(AT_FDCWD, blobs.c_str(), O_RDONLY | O_DIRECTORY);
    if (!folder.ok()) return SourceError(blobs, folder.error());
    shared = *std::move(folder);
  }
  if (auto marker = os::ReadFile(root->get(), "oci-layout", kMaxDocument); !marker.ok()) {
    return Error(Code::kInvalidArgument, "layer.source",
                 fmt::format("{} is no OCI image layout: it has no file oci-layout", path))
        .WithField("source");
  }
  auto image = std::make_unique<OciImage>(*std::move(root), std::move(shared), limits, warnings);
  DSEC_TRY_VOID(image->Load(ref));
  return std::unique_ptr<ImageReader>(std::move(image));
}

}  // namespace dsec::image
