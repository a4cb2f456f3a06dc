// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "aether/loop.h"
#include "aether/watch.h"
#include "aether/worker_pool.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"

namespace dsec::aether {

// The file calls of the Aether service: one worker job each, and what has state between calls:
// uploads, archives and watches. Such a thing has an id chosen by its caller, ends when it is
// finished, aborted, unused for kIdleLimit, or when the connection that began it closes, and leaves
// nothing behind then. A finished one answers a repeated last call.
class FileService {
 public:
  static constexpr size_t kMaxTransfers = 32;
  static constexpr size_t kMaxWatches = 32;
  static constexpr std::chrono::seconds kIdleLimit{60};
  template <typename T>
  using ReplyFn = std::function<void(Result<T>)>;

  // `root` and `default_user` are asked for at each call.
  FileService(Loop& loop, WorkerPool& workers, std::function<int()> root,
              std::function<std::string()> default_user);

  void Stat(v1::PathRequest request, const ReplyFn<v1::FileInfo>& reply);
  void List(v1::ListRequest request, const ReplyFn<v1::ListReply>& reply);
  void Read(v1::ReadRequest request, const ReplyFn<v1::ReadReply>& reply);
  void Mkdir(v1::MkdirRequest request, const ReplyFn<v1::Empty>& reply);
  void Move(v1::MoveRequest request, const ReplyFn<v1::Empty>& reply);
  void Remove(v1::RemoveRequest request, const ReplyFn<v1::Empty>& reply);
  void Chmod(v1::ChmodRequest request, const ReplyFn<v1::Empty>& reply);
  void Write(v1::WriteRequest request, uint64_t caller, const ReplyFn<v1::WriteReply>& reply);
  void Pull(v1::PullArchiveRequest request, uint64_t caller,
            const ReplyFn<v1::PullArchiveReply>& reply);
  void Push(v1::PushArchiveRequest request, uint64_t caller,
            const ReplyFn<v1::PushArchiveReply>& reply);
  void WatchPath(const v1::WatchRequest& request, uint64_t caller,
                 const ReplyFn<v1::WatchReply>& reply);
  void DropCaller(uint64_t caller);

 private:
  struct UploadState;
  struct PullState;
  struct PushState;
  // State is touched by the job under way only; the rest on the loop.
  template <typename State, typename Reply>
  struct Transfer {
    std::shared_ptr<State> state;
    uint64_t caller = 0;
    bool busy = false;
    bool finished = false;
    Reply last;  // of a finished one
    Timer idle;
  };
  template <typename State, typename Reply>
  using Transfers = std::map<std::string, std::shared_ptr<Transfer<State, Reply>>>;
  struct WatchEntry {
    std::unique_ptr<Watch> watch;
    uint64_t caller = 0;
    Timer idle;
  };

  template <typename Request, typename Reply>
  void Run(Request request, Result<Reply> (*job)(int, const Request&), const ReplyFn<Reply>& reply);
  template <typename State, typename Reply, typename Request>
  void Step(Transfers<State, Reply>& transfers, Request request, uint64_t caller, bool drop,
            bool last,
            Result<Reply> (*job)(State&, int root, const std::string& user, const Request&),
            const ReplyFn<Reply>& reply);
  template <typename State, typename Reply>
  void Forget(Transfers<State, Reply>& transfers, const std::string& id);
  // Forgets one finished transfer; false when there is none.
  template <typename State, typename Reply>
  bool DropFinished(Transfers<State, Reply>& transfers);
  static Result<v1::WriteReply> StepUpload(UploadState& state, int root, const std::string& user,
                                           const v1::WriteRequest& request);
  static Result<v1::PullArchiveReply> StepPull(PullState& state, int root, const std::string& user,
                                               const v1::PullArchiveRequest& request);
  static Result<v1::PushArchiveReply> StepPush(PushState& state, int root, const std::string& user,
                                               const v1::PushArchiveRequest& request);
  void PollWatch(const v1::WatchRequest& request, uint64_t caller,
                 const ReplyFn<v1::WatchReply>& reply);

  Loop& loop_;
  WorkerPool& workers_;
  std::function<int()> root_;
  std::function<std::string()> default_user_;
  Transfers<UploadState, v1::WriteReply> uploads_;
  Transfers<PullState, v1::PullArchiveReply> pulls_;
  Transfers<PushState, v1::PushArchiveReply> pushes_;
  std::map<std::string, WatchEntry> watches_;
  size_t watches_opening_ = 0;
};

}  // namespace dsec::aether
