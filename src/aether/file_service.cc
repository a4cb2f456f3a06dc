// SPDX-License-Identifier: Apache-2.0
#include "aether/file_service.h"

#include <algorithm>
#include <optional>

#include "aether/archive.h"
#include "aether/files.h"
#include "aether/upload.h"
#include "base/id.h"

namespace dsec::aether {
namespace {

constexpr size_t kMaxChunkBytes = 1 << 20;
constexpr std::chrono::milliseconds kMaxWatchWait(60000);

Error Gap(uint64_t offset, uint64_t have) {
  return Error(Code::kConflict, "file.gap",
               fmt::format("offset {} does not continue at {}", offset, have))
      .WithField("offset");
}

Result<void> CheckChunk(size_t size) {
  if (size <= kMaxChunkBytes) return Ok();
  return Error(Code::kInvalidArgument, "file.chunk_too_large",
               fmt::format("data has {} bytes; the limit is {}", size, kMaxChunkBytes))
      .WithField("data");
}

}  // namespace

struct FileService::UploadState {
  std::optional<NewFile> file;
};

struct FileService::PullState {
  std::unique_ptr<ArchiveWriter> writer;
  uint64_t next = 0;
  uint64_t last_offset = 0;
  v1::PullArchiveReply last;
};

struct FileService::PushState {
  std::unique_ptr<ArchiveReader> reader;
  uint64_t received = 0;
};

FileService::FileService(Loop& loop, WorkerPool& workers, std::function<int()> root,
                         std::function<std::string()> default_user)
    : loop_(loop),
      workers_(workers),
      root_(std::move(root)),
      default_user_(std::move(default_user)) {}

template <typename Request, typename Reply>
void FileService::Run(Request request, Result<Reply> (*job)(int, const Request&),
                      const ReplyFn<Reply>& reply) {
  Result<void> asked = workers_.Run<Result<Reply>>(
      [root = root_(), request = std::move(request), job] { return job(root, request); }, reply);
  if (!asked.ok()) reply(asked.error());
}

void FileService::Stat(v1::PathRequest request, const ReplyFn<v1::FileInfo>& reply) {
  Run(std::move(request), &aether::Stat, reply);
}
void FileService::List(v1::ListRequest request, const ReplyFn<v1::ListReply>& reply) {
  Run(std::move(request), &aether::List, reply);
}
void FileService::Read(v1::ReadRequest request, const ReplyFn<v1::ReadReply>& reply) {
  Run(std::move(request), &aether::Read, reply);
}
void FileService::Mkdir(v1::MkdirRequest request, const ReplyFn<v1::Empty>& reply) {
  if (request.user().empty()) request.set_user(default_user_());
  Run(std::move(request), &aether::Mkdir, reply);
}
void FileService::Move(v1::MoveRequest request, const ReplyFn<v1::Empty>& reply) {
  Run(std::move(request), &aether::Move, reply);
}
void FileService::Remove(v1::RemoveRequest request, const ReplyFn<v1::Empty>& reply) {
  Run(std::move(request), &aether::Remove, reply);
}
void FileService::Chmod(v1::ChmodRequest request, const ReplyFn<v1::Empty>& reply) {
  Run(std::move(request), &aether::Chmod, reply);
}

template <typename State, typename Reply>
void FileService::Forget(Transfers<State, Reply>& transfers, const std::string& id) {
  auto found = transfers.find(id);
  if (found == transfers.end()) return;
  std::shared_ptr<State> state = std::move(found->second->state);
  transfers.erase(found);
  // Giving up a file may mean work on the file system. A job under way keeps it until it is done.
  Result<void> asked = workers_.Run<bool>(
      [state = std::move(state)]() mutable {
        state.reset();
        return true;
      },
      [](bool) {});
  if (!asked.ok()) return;  // then it has been dropped here
}

template <typename State, typename Reply>
bool FileService::DropFinished(Transfers<State, Reply>& transfers) {
  for (const auto& [id, transfer] : transfers) {
    if (!transfer->finished || transfer->busy) continue;
    const std::string victim = id;
    Forget(transfers, victim);
    return true;
  }
  return false;
}

template <typename State, typename Reply, typename Request>
void FileService::Step(Transfers<State, Reply>& transfers, Request request, uint64_t caller,
                       bool drop, bool last,
                       Result<Reply> (*job)(State&, int root, const std::string& user,
                                            const Request&),
                       const ReplyFn<Reply>& reply) {
  const std::string id = request.transfer_id();
  if (Result<OpId> parsed = ParseOpId(id, "transfer_id"); !parsed.ok())
    return reply(parsed.error());
  auto found = transfers.find(id);
  if (drop) {
    Forget(transfers, id);
    return reply(Reply());
  }
  if (found == transfers.end()) {
    if (request.path().empty()) {
      return reply(
          Error(Code::kNotFound, "file.transfer_unknown", "there is no transfer with this id")
              .WithField("transfer_id"));
    }
    // One that has finished is kept only for a caller who lost its reply; it makes room for a new
    // one.
    if (uploads_.size() + pulls_.size() + pushes_.size() >= kMaxTransfers &&
        !DropFinished(uploads_) && !DropFinished(pulls_) && !DropFinished(pushes_)) {
      return reply(Error(Code::kResourceExhausted, "file.too_many_transfers",
                         fmt::format("{} transfers are open already", kMaxTransfers)));
    }
    auto transfer = std::make_shared<Transfer<State, Reply>>();
    transfer->state = std::make_shared<State>();
    transfer->caller = caller;
    found = transfers.emplace(id, std::move(transfer)).first;
  }
  std::shared_ptr<Transfer<State, Reply>> transfer = found->second;
  if (transfer->busy) {
    return reply(
        Error(Code::kConflict, "file.transfer_busy", "another call of this transfer is under way"));
  }
  if (transfer->finished) return reply(transfer->last);
  transfer->busy = true;
  transfer->idle.Reset();
  auto expire = [this, &transfers, id] { Forget(transfers, id); };
  Result<void> asked = workers_.Run<Result<Reply>>(
      [state = transfer->state, root = root_(), user = default_user_(),
       request = std::move(request), job] { return job(*state, root, user, request); },
      [this, &transfers, id, transfer, last, reply, expire](Result<Reply> result) {
        transfer->busy = false;
        auto present = transfers.find(id);
        if (present == transfers.end() || present->second != transfer) {
          return reply(Error(Code::kCancelled, "file.transfer_dropped",
                             "the transfer was given up meanwhile"));
        }
        bool gap = !result.ok() && (result.error().reason() == "file.gap" ||
                                    result.error().reason() == "file.chunk_too_large");
        if (!result.ok() && !gap) {
          Forget(transfers, id);
        } else {
          if (result.ok() && last) {
            transfer->finished = true;
            transfer->last = *result;
          }
          transfer->idle = Timer(loop_, loop_.now() + kIdleLimit, expire);
        }
        reply(std::move(result));
      });
  if (!asked.ok()) {
    transfer->busy = false;
    transfer->idle = Timer(loop_, loop_.now() + kIdleLimit, expire);
    reply(asked.error());
  }
}

void FileService::Write(v1::WriteRequest request, uint64_t caller,
                        const ReplyFn<v1::WriteReply>& reply) {
  bool drop = request.abort();
  bool last = request.commit();
  Step(uploads_, std::move(request), caller, drop, last, &FileService::StepUpload, reply);
}

Result<v1::WriteReply> FileService::StepUpload(UploadState& state, int root,
                                               const std::string& user,
                                               const v1::WriteRequest& request) {
  DSEC_TRY_VOID(CheckChunk(request.data().size()));
  if (request.has_mode() && request.mode() > 07777) {
    return Error(Code::kInvalidArgument, "file.bad_mode", "mode is out of range").WithField("mode");
  }
  if (!state.file) {
    DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
    DSEC_TRY(Identity owner, LookUpIdentity(root, request.user().empty() ? user : request.user()));
    DSEC_TRY(Place place, FindWritePlace(root, request.path(), request.parents(), owner));
    DSEC_TRY(NewFile file,
             NewFile::Create(std::move(place.directory), std::move(place.name), owner));
    state.file = std::move(file);
  }
  uint64_t have = state.file->size();
  bool repeated = request.offset() + request.data().size() <= have && request.offset() <= have;
  if (!repeated && request.offset() != have) return Gap(request.offset(), have);
  if (!repeated) DSEC_TRY_VOID(state.file->Write(request.data()));
  v1::WriteReply reply;
  reply.set_size(state.file->size());
  if (request.commit()) {
    std::optional<mode_t> mode;
    if (request.has_mode()) mode = request.mode();
    DSEC_TRY_VOID(state.file->Commit(mode, NewFile::Existing::kKeepAttributes));
    DSEC_TRY(*reply.mutable_info(), state.file->Info());
    state.file.reset();
  }
  return reply;
}

void FileService::Pull(v1::PullArchiveRequest request, uint64_t caller,
                       const ReplyFn<v1::PullArchiveReply>& reply) {
  bool drop = request.close();
  Step(pulls_, std::move(request), caller, drop, false, &FileService::StepPull, reply);
}

Result<v1::PullArchiveReply> FileService::StepPull(PullState& state, int root, const std::string&,
                                                   const v1::PullArchiveRequest& request) {
  if (state.writer == nullptr) {
    DSEC_TRY(state.writer, ArchiveWriter::Open(root, request.path()));
  } else if (request.offset() == state.last_offset && request.offset() != state.next) {
    return state.last;
  }
  if (request.offset() != state.next) return Gap(request.offset(), state.next);
  v1::PullArchiveReply reply;
  if (!state.writer->ended()) {
    size_t wanted = request.max_bytes() == 0
                        ? kMaxChunkBytes
                        : std::min<size_t>(request.max_bytes(), kMaxChunkBytes);
    DSEC_TRY(*reply.mutable_data(), state.writer->Read(wanted));
    for (std::string& warning : state.writer->TakeWarnings())
      reply.add_warnings(std::move(warning));
  }
  reply.set_eof(state.writer->ended());
  state.last_offset = state.next;
  state.next += reply.data().size();
  state.last = reply;
  return reply;
}

void FileService::Push(v1::PushArchiveRequest request, uint64_t caller,
                       const ReplyFn<v1::PushArchiveReply>& reply) {
  bool drop = request.abort();
  bool last = request.commit();
  Step(pushes_, std::move(request), caller, drop, last, &FileService::StepPush, reply);
}

Result<v1::PushArchiveReply> FileService::StepPush(PushState& state, int root,
                                                   const std::string& user,
                                                   const v1::PushArchiveRequest& request) {
  DSEC_TRY_VOID(CheckChunk(request.data().size()));
  if (state.reader == nullptr) {
    DSEC_TRY(Identity owner, LookUpIdentity(root, request.user().empty() ? user : request.user()));
    DSEC_TRY(state.reader, ArchiveReader::Open(root, request.path(), owner));
  }
  bool repeated = request.offset() <= state.received &&
                  request.offset() + request.data().size() <= state.received;
  if (!repeated && request.offset() != state.received) return Gap(request.offset(), state.received);
  if (!repeated) {
    DSEC_TRY_VOID(state.reader->Feed(request.data()));
    state.received += request.data().size();
  }
  if (request.commit()) DSEC_TRY_VOID(state.reader->Finish());
  v1::PushArchiveReply reply;
  reply.set_entries(state.reader->entries());
  reply.set_bytes(state.reader->bytes());
  if (request.commit()) state.reader.reset();
  return reply;
}

void FileService::WatchPath(const v1::WatchRequest& request, uint64_t caller,
                            const ReplyFn<v1::WatchReply>& reply) {
  const std::string id = request.watch_id();
  if (Result<OpId> parsed = ParseOpId(id, "watch_id"); !parsed.ok()) return reply(parsed.error());
  if (request.close()) {
    watches_.erase(id);
    return reply(v1::WatchReply());
  }
  if (watches_.contains(id)) return PollWatch(request, caller, reply);
  if (request.path().empty()) {
    return reply(Error(Code::kNotFound, "watch.not_found", "there is no watch with this id")
                     .WithField("watch_id"));
  }
  if (watches_.size() + watches_opening_ >= kMaxWatches) {
    return reply(Error(Code::kResourceExhausted, "watch.too_many",
                       fmt::format("{} watches are open already", kMaxWatches)));
  }
  ++watches_opening_;
  using Opened = Result<std::shared_ptr<WatchedTree>>;
  Result<void> asked = workers_.Run<Opened>(
      [root = root_(), request] { return Watch::Open(root, request.path(), request.recursive()); },
      [this, id, caller, reply](Opened tree) {
        --watches_opening_;
        if (!tree.ok()) return reply(tree.error());
        WatchEntry& entry = watches_[id];
        entry.watch = std::make_unique<Watch>(loop_, workers_, std::move(*tree));
        entry.caller = caller;
        // The first answer says that the watch stands: what changes from now on is seen.
        v1::WatchRequest now;
        now.set_watch_id(id);
        PollWatch(now, caller, reply);
      });
  if (!asked.ok()) {
    --watches_opening_;
    reply(asked.error());
  }
}

void FileService::PollWatch(const v1::WatchRequest& request, uint64_t caller,
                            const ReplyFn<v1::WatchReply>& reply) {
  const std::string& id = request.watch_id();
  WatchEntry& entry = watches_[id];
  entry.caller = caller;
  auto wait = std::min(kMaxWatchWait,
                       std::chrono::milliseconds(std::min<uint64_t>(request.wait_ms(), 1u << 30)));
  entry.idle = Timer(loop_, loop_.now() + wait + kIdleLimit, [this, id] { watches_.erase(id); });
  entry.watch->Wait(caller, request.after_seq(), wait, reply);
}

void FileService::DropCaller(uint64_t caller) {
  auto drop = [this, caller](auto& transfers) {
    std::vector<std::string> ids;
    for (const auto& [id, transfer] : transfers) {
      if (transfer->caller == caller && !transfer->finished) ids.push_back(id);
    }
    for (const std::string& id : ids) Forget(transfers, id);
  };
  drop(uploads_);
  drop(pulls_);
  drop(pushes_);
  std::erase_if(watches_, [caller](const auto& item) { return item.second.caller == caller; });
}

}  // namespace dsec::aether
