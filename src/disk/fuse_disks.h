// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "blobfs/fuse_device.h"
#include "disk/disk.h"
#include "image/root_calls.h"

namespace dsec::disk {

// The kernel's side of disks: one folder with a file <node> for each that is served. Size and times
// are fixed; what the page cache of a file keeps is the kernel's affair. The session may have been
// begun by an earlier process. Thread-safe.
class FuseDisks {
 public:
  static constexpr uint32_t kMaxWrite = 1 << 20;
  static constexpr uint64_t kFirstNode = 2;  // 0 and 1 are the kernel's

  using OpenDisk = std::function<Result<std::shared_ptr<Disk>>()>;

  explicit FuseDisks(int fd);
  ~FuseDisks();
  FuseDisks(const FuseDisks&) = delete;
  FuseDisks& operator=(const FuseDisks&) = delete;

  // A disk that is open.
  void Add(uint64_t node, std::shared_ptr<Disk> disk);
  // One that an earlier process served: opened now on a thread of its own, and again for a while
  // when that fails; requests wait for it. `opened` is called with it.
  void AddLater(uint64_t node, uint64_t bytes, OpenDisk open,
                std::function<void(const std::shared_ptr<Disk>&)> opened);
  // Null: there is none, or it is not open yet.
  std::shared_ptr<Disk> Find(uint64_t node) const;
  // Its requests fail from now on. Files that are open, as far as this process knows: then
  // kConflict "disk.in_use", and nothing is changed, unless `force`.
  Result<std::shared_ptr<Disk>> Remove(uint64_t node, bool force);

  void Resend() { device_.Resend(); }
  // Serves on `threads` threads and this one until the session has ended.
  Result<void> Run(size_t threads);

 private:
  struct Entry {
    std::shared_ptr<Disk> disk;
    uint64_t bytes = 0;
    bool opening = false;
    int64_t open_files = 0;
    OpenDisk open;
    std::function<void(const std::shared_ptr<Disk>&)> opened;
    std::vector<std::vector<uint8_t>> waiting;  // requests
  };
  struct Reading {
    uint32_t thread = 0;
    bool interrupted = false;
    std::shared_ptr<std::atomic<bool>> answered;
  };
  void Serve(std::span<const uint8_t> request);
  void Handle(const fuse_in_header& header, std::span<const uint8_t> body, Disk* disk);
  void StartOpening(uint64_t node);
  void Init(const fuse_in_header& header, std::span<const uint8_t> body);
  void Lookup(const fuse_in_header& header, std::span<const uint8_t> body);
  bool Attributes(uint64_t node, fuse_attr& attributes) const;
  void Read(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk);
  void Write(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk);
  void Fallocate(const fuse_in_header& header, std::span<const uint8_t> body, Disk& disk);
  void ReplyResult(uint64_t unique, const Result<void>& result);
  void Interrupt(std::span<const uint8_t> body);
  void LookForKilled(const std::stop_token& stop);

  const blobfs::FuseDevice device_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Entry>> entries_;
  std::map<uint64_t, Reading> reading_;  // by unique
  size_t interrupted_ = 0;               // of them
  std::condition_variable_any interrupts_;
  image::RootThreads later_;
  std::jthread killed_;  // last
};

}  // namespace dsec::disk
