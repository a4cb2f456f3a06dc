// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "aether/loop.h"
#include "aether/worker_pool.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"
#include "os/unique_fd.h"

namespace dsec::aether {

// What a watch is made of, put together on a worker thread.
struct WatchedTree {
  os::UniqueFd base;  // the directory
  os::UniqueFd inotify;
  std::string path;  // of the directory, absolute
  std::string only;  // set: one file in it
  bool recursive = false;
  std::map<int, std::string>
      directories;  // watch descriptor -> path below base, "" or ending in '/'
};

// Changes below a directory, or of one file, kept for callers that come with the number of the last
// event they have seen. Types: created, modified, removed (also: moved away), moved (here, with the
// new path), overflow (events were lost: look for yourself). Events of at most kMaxDirectories
// directories; a tree that has more starts with an overflow.
class Watch {
 public:
  static constexpr size_t kMaxDirectories = 1024;
  static constexpr size_t kMaxEvents = 4096;
  static constexpr size_t kEventsPerReply = 512;
  using ReplyFn = std::function<void(Result<v1::WatchReply>)>;

  // Blocks.
  static Result<std::shared_ptr<WatchedTree>> Open(int root, const std::string& path,
                                                   bool recursive);

  Watch(Loop& loop, WorkerPool& workers, std::shared_ptr<WatchedTree> tree);
  ~Watch();

  void Wait(uint64_t caller, uint64_t after_seq, std::chrono::milliseconds wait, ReplyFn reply);
  void DropCaller(uint64_t caller);
  bool waiting() const { return !waiters_.empty(); }

 private:
  struct Waiter {
    uint64_t caller = 0;
    uint64_t after_seq = 0;
    ReplyFn reply;
    Timer limit;
  };
  struct Found {
    std::map<int, std::string> directories;
    std::vector<std::string> paths;
    bool incomplete = false;
  };
  // Adds a directory and, if asked for, all below it.
  static Found Cover(const WatchedTree& tree, const std::string& below, size_t room);

  void OnEvents();
  void AddDirectory(const std::string& below);
  void Report(const char* type, const std::string& below);
  v1::WatchReply Reply(uint64_t after_seq) const;
  void Answer();

  Loop& loop_;
  WorkerPool& workers_;
  std::shared_ptr<WatchedTree> tree_;
  FdWatch watch_;
  std::deque<v1::WatchEvent> events_;
  uint64_t last_seq_ = 0;
  std::list<Waiter> waiters_;
  Timer flush_;
  std::shared_ptr<Watch*> self_ = std::make_shared<Watch*>(this);
};

}  // namespace dsec::aether
