// SPDX-License-Identifier: Apache-2.0
// The part of Exec that talks to its callers: replies, long polls, standard input.
#include <algorithm>

#include "aether/exec.h"

namespace dsec::aether {
namespace {

constexpr uint64_t kDefaultReplyBytes = 1u << 20;
// Two streams of this size and the rest of a reply fit a ttrpc message of 4 MiB.
constexpr uint64_t kMaxReplyBytes = 3u << 19;
constexpr std::chrono::milliseconds kMaxWait{60000};
constexpr std::chrono::seconds kStdinWait{10};
constexpr std::chrono::seconds kStartWait{5};

void AddChunks(const OutputStream& stream, uint64_t offset, uint64_t max_bytes, bool closed,
               google::protobuf::RepeatedPtrField<v1::StreamChunk>& chunks, v1::StreamState& state,
               uint64_t& next) {
  OutputStream::View view = stream.Read(offset, max_bytes);
  for (const OutputStream::Piece& piece : view.pieces) {
    v1::StreamChunk& chunk = *chunks.Add();
    chunk.set_offset(piece.offset);
    chunk.set_skipped(piece.skipped);
    chunk.set_data(piece.data.data(), piece.data.size());
  }
  state.set_total(stream.total());
  state.set_dropped(stream.dropped());
  state.set_closed(closed);
  next = view.next;
}

}  // namespace

void Exec::Wait(uint64_t caller, const v1::PollRequest& poll, bool known, ExecReplyFn reply) {
  Waiter waiter;
  waiter.caller = caller;
  waiter.stdout_offset = poll.stdout_offset();
  waiter.stderr_offset = poll.stderr_offset();
  waiter.max_bytes =
      poll.max_bytes() == 0 ? kDefaultReplyBytes : std::min(poll.max_bytes(), kMaxReplyBytes);
  waiter.known = known;
  waiter.reply = std::move(reply);
  auto wait =
      std::min(kMaxWait, std::chrono::milliseconds(std::min<uint64_t>(poll.wait_ms(), 1u << 30)));
  // Who starts a command without waiting for its end is told of its process: signals and input can
  // follow at once. In a session it may first have to wait for others.
  waiter.for_start = wait.count() == 0 && !known && session_name_.empty() &&
                     (state_ == State::kPending || state_ == State::kStarting);
  if (waiter.for_start) wait = kStartWait;
  if (done() || wait.count() == 0 || HasNews(waiter)) {
    waiter.reply(Reply(waiter));
    return;
  }
  auto position = waiters_.insert(waiters_.end(), std::move(waiter));
  position->limit = Timer(context_.loop, context_.loop.now() + wait, [this, position] {
    Waiter due = std::move(*position);
    waiters_.erase(position);
    due.reply(Reply(due));
  });
}

void Exec::DropCaller(uint64_t caller) {
  waiters_.remove_if([caller](const Waiter& waiter) { return waiter.caller == caller; });
  if (stdin_waiter_ != nullptr && stdin_waiter_->caller == caller) stdin_waiter_.reset();
}

bool Exec::HasNews(const Waiter& waiter) const {
  return out_.total() > waiter.stdout_offset || err_.total() > waiter.stderr_offset;
}

v1::ExecReply Exec::Reply(const Waiter& waiter) const {
  v1::ExecReply reply;
  reply.set_op_id(op_id_);
  reply.set_running(!done());
  reply.set_known(waiter.known);
  reply.set_pid(pid_);
  uint64_t next = 0;
  AddChunks(out_, waiter.stdout_offset, waiter.max_bytes, done(), *reply.mutable_stdout_chunks(),
            *reply.mutable_stdout_state(), next);
  reply.set_stdout_next(next);
  AddChunks(err_, waiter.stderr_offset, waiter.max_bytes, done(), *reply.mutable_stderr_chunks(),
            *reply.mutable_stderr_state(), next);
  reply.set_stderr_next(next);
  if (done()) {
    *reply.mutable_result() = result_;
    reply.set_drained(reply.stdout_next() >= out_.total() && reply.stderr_next() >= err_.total());
  }
  return reply;
}

void Exec::OnData() {
  if (waiters_.empty() || flush_.armed()) return;
  flush_ = Timer(context_.loop, context_.loop.now() + kCoalesce, [this] { AnswerWaiters(false); });
}

void Exec::AnswerWaiters(bool all) {
  std::list<Waiter> due;
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    auto next = std::next(waiter);
    bool started = waiter->for_start && state_ != State::kPending && state_ != State::kStarting;
    if (all || started || HasNews(*waiter)) due.splice(due.end(), waiters_, waiter);
    waiter = next;
  }
  for (Waiter& waiter : due) {
    waiter.limit.Reset();
    waiter.reply(Reply(waiter));
  }
}

void Exec::WriteStdin(uint64_t caller, const v1::StdinRequest& request,
                      std::function<void(Result<v1::StdinReply>)> reply) {
  if (stdin_waiter_ != nullptr) {
    reply(Error(Code::kConflict, "exec.stdin_busy", "another write to this input is under way"));
    return;
  }
  bool opened = stdin_ != nullptr || done() ||
                (request_ != nullptr && (request_->stdin_open() || !request_->stdin().empty()));
  if (!opened) {
    reply(
        Error(Code::kConflict, "exec.stdin_closed", "the command was started without open input"));
    return;
  }
  stdin_waiter_ = std::make_unique<StdinWaiter>();
  stdin_waiter_->caller = caller;
  stdin_waiter_->eof = request.eof();
  stdin_waiter_->reply = std::move(reply);
  uint64_t accepted = stdin_ != nullptr ? stdin_->accepted() : stdin_accepted_;
  if (request_ != nullptr && stdin_ == nullptr) accepted = request_->stdin().size();
  bool closed = done() || (stdin_ != nullptr && stdin_->closed());
  if (request.offset() > accepted && !closed) {
    auto call = std::move(stdin_waiter_->reply);
    stdin_waiter_.reset();
    call(Error(Code::kConflict, "exec.stdin_gap",
               fmt::format("offset {} follows {} accepted bytes", request.offset(), accepted))
             .WithField("offset"));
    return;
  }
  uint64_t repeated = accepted - std::min(request.offset(), accepted);
  if (repeated < request.data().size()) stdin_waiter_->data = request.data().substr(repeated);
  stdin_waiter_->limit = Timer(context_.loop, context_.loop.now() + kStdinWait, [this] {
    v1::StdinReply timed;
    timed.set_accepted(stdin_ != nullptr ? stdin_->accepted() : stdin_accepted_);
    auto call = std::move(stdin_waiter_->reply);
    stdin_waiter_.reset();
    call(timed);
  });
  AnswerStdin();
}

void Exec::AnswerStdin() {
  if (stdin_waiter_ == nullptr || (stdin_ == nullptr && !done())) return;
  v1::StdinReply reply;
  bool closed = stdin_ == nullptr || stdin_->closed();
  if (!closed && !stdin_waiter_->data.empty()) {
    size_t taken = stdin_->Write(stdin_waiter_->data);
    stdin_waiter_->data.erase(0, taken);
    if (taken == 0 && !stdin_->closed()) return;  // waits for room
    closed = stdin_->closed();
  }
  if (!closed && stdin_waiter_->data.empty() && stdin_waiter_->eof) stdin_->End();
  reply.set_accepted(stdin_ != nullptr ? stdin_->accepted() : stdin_accepted_);
  reply.set_closed(closed);
  auto call = std::move(stdin_waiter_->reply);
  stdin_waiter_.reset();
  call(reply);
}

v1::ExecSummary Exec::Summary() const {
  v1::ExecSummary summary = summary_;
  summary.set_op_id(op_id_);
  summary.set_running(!done());
  summary.set_session(session_name_);
  summary.set_started_unix_ms(
      started_ == MonoTime() ? 0 : static_cast<uint64_t>(UnixMillis(started_wall_)));
  summary.set_detached(detached_);
  summary.set_pid(pid_);
  summary.set_request_digest(digest_);
  if (done()) *summary.mutable_result() = result_;
  return summary;
}

}  // namespace dsec::aether
