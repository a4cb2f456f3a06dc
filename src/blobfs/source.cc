// SPDX-License-Identifier: Apache-2.0
#include "blobfs/source.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "image/root_calls.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {
namespace {

using image::RootError;

Error Missing(const std::string& path) {
  return Error(Code::kNotFound, "layer.not_found", path + " is not there").WithErrno(ENOENT);
}

class FolderReader : public image::BlobReader {
 public:
  explicit FolderReader(std::string path) : path_(std::move(path)) {}

  Result<void> ReadAt(uint64_t offset, std::span<uint8_t> out) override {
    DSEC_TRY(const auto file, File());
    auto read = ReadFrom(*file, offset, out);
    if (read.ok()) return read;
    // Some clients of cluster file systems stay with an error for as long as the file is open; and
    // a layer may have been put in place anew.
    Forget(file);
    return read;
  }
  // Of a file that is not what it should be: the next read opens what is there by then.
  void Reopen() override {
    const std::lock_guard lock(mutex_);
    file_.reset();
  }

 private:
  using Shared = std::shared_ptr<const os::UniqueFd>;
  Result<Shared> File() {
    {
      const std::lock_guard lock(mutex_);
      if (file_ != nullptr) return file_;
    }
    auto opened = os::OpenAt(AT_FDCWD, path_.c_str(), O_RDONLY | O_NOFOLLOW);  // may hang
    if (!opened.ok())
      return opened.error().sys_errno() == ENOENT ? Missing(path_)
                                                  : RootError(std::move(opened).error());
    // The page cache of a file that is copied to the node would hold it twice.
    static_cast<void>(::posix_fadvise(opened->get(), 0, 0, POSIX_FADV_RANDOM));
    auto shared = std::make_shared<const os::UniqueFd>(*std::move(opened));
    const std::lock_guard lock(mutex_);
    file_ = shared;
    return shared;
  }
  void Forget(const Shared& file) {
    const std::lock_guard lock(mutex_);
    if (file_ == file) file_.reset();
  }
  Result<void> ReadFrom(const os::UniqueFd& file, uint64_t offset, std::span<uint8_t> out) const {
    const uint64_t begin = offset;
    const auto length = static_cast<off_t>(out.size());
    while (!out.empty()) {
      const ssize_t got = ::pread(file.get(), out.data(), out.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return RootError(os::ErrnoError("layer.io", "read " + path_));
      if (got == 0) {
        return Error(Code::kInternal, "layer.corrupt",
                     fmt::format("{} ends at byte {}", path_, offset));
      }
      offset += static_cast<uint64_t>(got);
      out = out.subspan(static_cast<size_t>(got));
    }
    static_cast<void>(
        ::posix_fadvise(file.get(), static_cast<off_t>(begin), length, POSIX_FADV_DONTNEED));
    return Ok();
  }

  const std::string path_;
  std::mutex mutex_;
  Shared file_;
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
                                          uint64_t) override {
    return std::make_unique<FolderReader>(PathOf(hex, name));
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
