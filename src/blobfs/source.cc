// SPDX-License-Identifier: Apache-2.0
#include "blobfs/source.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "image/canonical_blob.h"
#include "image/erofs_writer.h"
#include "image/layer_files.h"
#include "image/root_calls.h"
#include "image/stored_form.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {
namespace {

using image::RootError;

Error Missing(const std::string& path) {
  return Error(Code::kNotFound, "layer.not_found", path + " is not there").WithErrno(ENOENT);
}

// A file in the folder of a layer. One that is not there may be the content of a layer that shares
// it with others, in pieces of their files.
class FolderReader : public image::BlobReader {
 public:
  FolderReader(std::string folder, const char* name, uint64_t size)
      : folder_(std::move(folder)), name_(name), size_(size) {}

  Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) override {
    DSEC_TRY(const auto opened, Opened());
    auto read = opened->blob->ReadAt(offset, out).Context("read {}/{}", folder_, name_);
    if (read.ok()) {
      opened->blob->ForEachPiece(offset, out.size(), [](int file, uint64_t from, uint64_t bytes) {
        static_cast<void>(::posix_fadvise(file, static_cast<off_t>(from), static_cast<off_t>(bytes),
                                          POSIX_FADV_DONTNEED));
      });
      return read;
    }
    // Some clients of cluster file systems stay with an error for as long as the file is open; and
    // a layer may have been put in place anew.
    const std::lock_guard lock(mutex_);
    if (opened_ == opened) opened_.reset();
    return read;
  }
  // Of a file that is not what it should be: the next read opens what is there by then.
  void Reopen() override {
    const std::lock_guard lock(mutex_);
    opened_.reset();
  }

 private:
  struct Files {
    std::vector<os::UniqueFd> files;
    std::optional<image::CanonicalBlob> blob;
  };
  using Shared = std::shared_ptr<const Files>;

  Result<Shared> Opened() {
    {
      const std::lock_guard lock(mutex_);
      if (opened_ != nullptr) return opened_;
    }
    auto opened = std::make_shared<Files>();
    DSEC_TRY(const auto form, OpenAll(opened->files));
    std::vector<int> content;
    for (const os::UniqueFd& file : opened->files) {
      // The page cache of a file that is copied to the node would hold it twice.
      static_cast<void>(::posix_fadvise(file.get(), 0, 0, POSIX_FADV_RANDOM));
      content.push_back(file.get());
    }
    opened->blob.emplace(std::move(content), form ? &*form : nullptr, size_);
    const std::lock_guard lock(mutex_);
    opened_ = opened;
    return Shared(opened);
  }

  // May hang.
  Result<std::optional<image::StoredForm>> OpenAll(std::vector<os::UniqueFd>& files) const {
    const std::string path = folder_ + "/" + name_;
    auto whole = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW);
    if (whole.ok()) {
      files.push_back(*std::move(whole));
      return std::optional<image::StoredForm>();
    }
    if (whole.error().sys_errno() != ENOENT) return RootError(std::move(whole).error());
    if (name_ != image::kBlobName) return Missing(path);
    auto folder = os::OpenAt(AT_FDCWD, folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!folder.ok())
      return folder.error().sys_errno() == ENOENT ? Missing(path)
                                                  : RootError(std::move(folder).error());
    DSEC_TRY(auto form, image::ReadForm(folder->get(), size_));
    if (!form) return Missing(path);
    for (const image::StoredForm::File& file : form->files) {
      auto part = os::OpenAt(folder->get(), file.name.c_str(), O_RDONLY | O_NOFOLLOW);
      if (!part.ok())
        return part.error().sys_errno() == ENOENT ? Missing(folder_ + "/" + file.name)
                                                  : RootError(std::move(part).error());
      files.push_back(*std::move(part));
    }
    return form;
  }

  const std::string folder_;
  const std::string name_;
  const uint64_t size_;
  std::mutex mutex_;
  Shared opened_;
};

class Folder : public LayerSource {
 public:
  explicit Folder(std::string root) : root_(std::move(root)) {}
  Result<std::string> ReadAll(const std::string& hex, const char* name, size_t limit) override {
    const std::string path = PathOf(hex, name);
    auto text = os::ReadFile(AT_FDCWD, path.c_str(), limit);
    if (text.ok()) return text;
    if (text.error().sys_errno() == ENOENT) return Missing(path);
    if (text.error().reason() == "os.file_too_large")
      return Error(Code::kInternal, "layer.corrupt", path + ": " + text.error().message());
    return RootError(std::move(text).error());
  }
  std::unique_ptr<image::BlobReader> Open(const std::string& hex, const char* name,
                                          uint64_t size) override {
    return std::make_unique<FolderReader>(fmt::format("{}/blobs/{}", root_, hex), name, size);
  }

 private:
  std::string PathOf(const std::string& hex, const char* name) const {
    return fmt::format("{}/blobs/{}/{}", root_, hex, name);
  }
  const std::string root_;
};

class HttpReader : public image::BlobReader {
 public:
  HttpReader(std::shared_ptr<HttpClient> client, std::string path, uint64_t size)
      : client_(std::move(client)), path_(std::move(path)), size_(size) {}
  Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) override {
    return client_->GetRange(path_, offset, size_, out);
  }

 private:
  const std::shared_ptr<HttpClient> client_;
  const std::string path_;
  const uint64_t size_;
};

class Http : public LayerSource {
 public:
  explicit Http(HttpOptions options) : client_(std::make_shared<HttpClient>(std::move(options))) {}
  Result<std::string> ReadAll(const std::string& hex, const char* name, size_t limit) override {
    return client_->Get(PathOf(hex, name), limit);
  }
  std::unique_ptr<image::BlobReader> Open(const std::string& hex, const char* name,
                                          uint64_t size) override {
    return std::make_unique<HttpReader>(client_, PathOf(hex, name), size);
  }
  void Stop() override { client_->Stop(); }

 private:
  static std::string PathOf(const std::string& hex, const char* name) {
    return fmt::format("/blobs/{}/{}", hex, name);
  }
  const std::shared_ptr<HttpClient> client_;
};

}  // namespace

std::unique_ptr<LayerSource> FolderSource(std::string root) {
  return std::make_unique<Folder>(std::move(root));
}

std::unique_ptr<LayerSource> HttpSource(HttpOptions options) {
  return std::make_unique<Http>(std::move(options));
}

}  // namespace dsec::blobfs
