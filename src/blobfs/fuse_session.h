// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/fuse.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "base/result.h"
#include "blobfs/chunk_loader.h"
#include "blobfs/fuse_device.h"
#include "image/root_calls.h"

namespace dsec::blobfs {

// The kernel's side of the files: one folder with a read-only file <hex> for each layer that is
// served. Speaks the protocol of /dev/fuse itself: libfuse begins each session with INIT, and the
// session here outlives the process that began it.
//
// Files are opened with FOPEN_DIRECT_IO: EROFS above keeps the pages, a second copy in the cache of
// this file system would be waste, and a buffered read that fails half way would come back short,
// which EROFS up to 6.18 at least takes for the whole with zeros at its end (fs/erofs/fileio.c). A
// read is one request as long as it is not larger than kMaxPages, which is the largest readahead of
// the kernel (a huge page), and is answered with all its bytes or an error. Without FUSE_ASYNC_DIO
// the kernel waits for it in the call of EROFS.
class FuseSession {
 public:
  static constexpr uint32_t kMaxPages = 512;

  // A layer by its hex digits; null: it cannot be had.
  using FindLayer = std::function<std::shared_ptr<Layer>(const std::string& hex)>;

  // `fd`: /dev/fuse of a mounted session. `peek` finds what is in memory, `find` may block.
  FuseSession(int fd, ChunkLoader& loader, FindLayer peek, FindLayer find);
  ~FuseSession();
  FuseSession(const FuseSession&) = delete;
  FuseSession& operator=(const FuseSession&) = delete;

  // Makes a file of the layer. kInternal "layer.io": its number is taken by another one.
  Result<void> Add(const std::string& hex);
  // Asks the kernel for what an earlier process took and did not answer (Linux 6.9).
  void Resend() { device_.Resend(); }
  // Reads requests until the session has ended. ENODEV of the device is success.
  Result<void> Run();
  // Files that are open, as far as this process knows.
  size_t open_files() const;
  // Waits until no file is open; false after `patience`.
  bool WaitClosed(std::chrono::milliseconds patience) const;

 private:
  struct Reading {
    std::shared_ptr<ChunkLoader::Job> job;
    uint32_t thread = 0;  // that reads
    bool interrupted = false;
  };
  static uint64_t NodeOf(const std::string& hex);
  void Handle(std::span<const uint8_t> request);
  bool HandleLater(const fuse_in_header& header, std::span<const uint8_t> request);
  void Reply(uint64_t unique, int error, std::span<const Piece> pieces);
  template <typename T>
  void ReplyWith(uint64_t unique, const T& value);
  void Init(const fuse_in_header& header, std::span<const uint8_t> body);
  void Lookup(const fuse_in_header& header, std::span<const uint8_t> body);
  void GetAttr(const fuse_in_header& header);
  void Open(const fuse_in_header& header);
  void Release();
  void Read(const fuse_in_header& header, std::span<const uint8_t> body);
  void Interrupt(std::span<const uint8_t> body);
  void LookForKilled(const std::stop_token& stop);
  std::shared_ptr<Layer> LayerOf(uint64_t node);
  bool Attributes(uint64_t node, fuse_attr& attributes);

  const FuseDevice device_;
  ChunkLoader& loader_;
  const FindLayer peek_;
  const FindLayer find_;
  mutable std::mutex mutex_;
  std::condition_variable_any interrupts_;
  mutable std::condition_variable closed_;
  std::map<uint64_t, std::string> nodes_;  // node id to hex
  std::map<uint64_t, Reading> reading_;    // by unique
  size_t interrupted_ = 0;                 // of them
  int64_t open_ = 0;
  image::RootThreads finders_;
  std::jthread killed_;  // last
};

}  // namespace dsec::blobfs
