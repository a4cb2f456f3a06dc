// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/id.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/edge.pb.h"
#include "dsec/v1/pack.pb.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::edge {

// What happens to an exec when its last follower vanishes and nobody attaches again within the
// disconnect grace (5 s; 60 s after a restart of the edge, so that clients can come back).
enum class OnDisconnect {
  kKill,  // the whole exec is ended, killed_by "disconnect"
  kKeep,  // it goes on; the same as ExecRequest.detached for this rule
};

// One follower of one exec: a client that is connected and reads its output. While any exists and
// the exec runs, the sandbox is active (idle time does not pass) and, under ttl_waits_for_exec, its
// TTL waits. Destroying it means that the follower has vanished. Any thread may destroy it, also
// while an Exec or Poll that was given it is under way (these read nothing of it once they have
// first waited); it may outlive the sandbox but not the EdgeApi.
class Attachment {
 public:
  virtual ~Attachment() = default;
  // The follower leaves in order: it saw the end, or the exec never started. Its destruction then
  // has no effect.
  virtual void Finish() = 0;
};

// Stands for the reply of one Create until that has reached the client. When every Claim of a
// sandbox was destroyed without Delivered, nobody knows its id: unless a repeat of the request_id
// is delivered or an exec or file call comes within the claim grace (60 s), the sandbox is ended
// with cause "unclaimed". Same threads and life as Attachment.
class Claim {
 public:
  virtual ~Claim() = default;
  // The reply has been written and the client was still there.
  virtual void Delivered() = 0;
};

struct Created {
  v1::SandboxView view;
  std::unique_ptr<Claim> claim;  // null when the sandbox has ended
};

// Told how far a pack has come, on any thread, at most ten times a second; must not block. False
// ends it (kCancelled "layer.cancelled"). May be empty.
using PackProgressFn = std::function<bool(const v1::PackProgress&)>;

// The node agent as the apiserver sees it. Every call may be made from any shard, resumes on the
// caller's and is bounded by `deadline`; a call that was abandoned half-way by its deadline is
// carried to a definite end by the edge.
//
// Errors. Get, Delete, Stats and Events take a sandbox in every state; the other calls want it to
// run:
//
//  - kNotFound sandbox.not_found: it never existed here, or its record has passed the retention
//    time. Of every call.
//  - kConflict sandbox.not_ready: it is pending or starting.
//  - kConflict sandbox.stopping: somebody asked for its end.
//  - kGone sandbox.ended.<cause>: it has ended, or is about to by another cause than user_stop. Get
//    still answers with the Termination.
//  - kUnavailable sandbox.unreachable: its agent does not answer.
//
// Not of the sandbox:
//
//  - kUnavailable edge.stopping: this daemon is being stopped; Create, Delete and Renew begin no
//    more.
//  - kUnavailable or kInternal store.*: the records cannot be read or written.
//
// Errors of the agent inside arrive with the code and reason that aether gave.
class EdgeApi {
 public:
  virtual ~EdgeApi() = default;

  // --- sandboxes ---

  // Answers when the sandbox is RUNNING. request_id and name are the project's own. The project's
  // quota is kResourceExhausted quota.<resource>. A repeat of request_id with the same spec joins
  // the create under way or answers the sandbox that it made, ended or not (`existed`); with
  // another spec kAlreadyExists create.request_id_reused. A name in use by a live sandbox:
  // kAlreadyExists sandbox.name_in_use. No room: kResourceExhausted capacity.<resource>, nothing is
  // recorded (see RetryAfter). Deleted while it was being made: kGone. A create that failed leaves
  // an ended record but does not use up its request_id: the same request may be sent again. It goes
  // on when the deadline of the caller passes.
  virtual runtime::Task<Created> Create(v1::CreateRequest request, runtime::Deadline deadline) = 0;

  // Live and ended; reads are not activity.
  virtual runtime::Task<v1::SandboxView> Get(SandboxId id, runtime::Deadline deadline) = 0;
  // The project that it belongs to, as its record holds it (empty: the root). Live and ended.
  virtual runtime::Task<std::string> ProjectOf(SandboxId id) = 0;
  // In order of id, which is order of creation. A token continues after the last id of its page:
  // whatever lives throughout is seen exactly once. kInvalidArgument list.page_token /
  // list.page_size.
  virtual runtime::Task<v1::ListPage> List(v1::ListRequestAll request,
                                           runtime::Deadline deadline) = 0;
  // From every state, any number of times; an ended sandbox is answered as it is. With `wait` the
  // reply comes when nothing of it is left on the host, else when the stop is on record.
  // kDeadlineExceeded sandbox.stuck: something would not die yet; the edge keeps trying and the
  // record says so.
  virtual runtime::Task<v1::SandboxView> Delete(v1::DeleteRequest request,
                                                runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::SandboxView> Renew(v1::RenewRequest request,
                                               runtime::Deadline deadline) = 0;
  // Usage now; of an ended sandbox the final figures.
  virtual runtime::Task<v1::Usage> Stats(SandboxId id, runtime::Deadline deadline) = 0;
  // Events after after_seq in order; waits up to wait_ms for the first. An ended sandbox with
  // nothing further answers at once with an empty list. When retention has dropped events just
  // after after_seq, the first event answered has a later seq: the gap is visible.
  virtual runtime::Task<v1::EventsReply> Events(v1::EventsRequest request,
                                                runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::NodeInfo> Node(runtime::Deadline deadline) = 0;

  // What the sandbox has changed in its root since its creation, as a layer over the same layers or
  // others: one state of it, for which its code stands still some milliseconds (on a host without
  // snapshots: while its files are read, at most a minute). Equal content gives the equal id.
  // Activity while it lasts. One at a time of a sandbox: kConflict pack.under_way. It ends, and
  // nothing stays, when the caller cancels, its deadline passes or the sandbox ends.
  //  - kInvalidArgument pack.bad_rule, pack.bad_kind, pack.bad_label, layer.bad_name, with the
  //  field
  //  - kConflict pack.canary: something that must not be in it is; names path and rule
  //  - kUnavailable pack.not_frozen, pack.frozen_too_long
  //  - layer.*: as a build of a layer
  virtual runtime::Task<v1::PackReply> Pack(SandboxId id, v1::PackRequest request,
                                            PackProgressFn progress,
                                            runtime::Deadline deadline) = 0;

  // What a sandbox that was created with record_first_touch has read first of its layers since
  // then, and with `save` puts it beside them, where nodes find it that mount them. Activity.
  //  - kConflict trace.not_recording: it was created without, or the daemon was restarted
  //  - layer.*: the trace of a layer could not be saved; those of the layers before it are
  virtual runtime::Task<v1::FirstTouchReply> FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                        runtime::Deadline deadline) = 0;

  // --- execs ---

  // Made before Exec or Poll of the same op and kept for as long as the client is connected. `rule`
  // is the rule of a new exec; an op that already has one keeps it.
  virtual runtime::Task<std::unique_ptr<Attachment>> Attach(SandboxId id, std::string op_id,
                                                            OnDisconnect rule,
                                                            runtime::Deadline deadline) = 0;
  // op_id is required (the apiserver makes one up for a caller that gave none). A wait longer than
  // the deadline is cut to it. With a follower (may be null; the same object as Attach gave, of
  // this sandbox and op), the end of the sandbox is answered as a result of kind END_SANDBOX_ENDED
  // whose killed_by is the cause (END_KILLED by "stop" for a stop that was asked for) and not as
  // kGone.
  virtual runtime::Task<v1::ExecReply> Exec(SandboxId id, v1::ExecRequest request,
                                            Attachment* follower, runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::ExecReply> Poll(SandboxId id, v1::PollRequest request,
                                            Attachment* follower, runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::StdinReply> WriteStdin(SandboxId id, v1::StdinRequest request,
                                                   runtime::Deadline deadline) = 0;
  // Cancel is a Signal with killed_by = "cancel".
  virtual runtime::Task<void> Signal(SandboxId id, v1::SignalRequest request,
                                     runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Resize(SandboxId id, v1::ResizeRequest request,
                                     runtime::Deadline deadline) = 0;
  // Not activity: the apiserver acknowledges a minute after the exec has ended.
  virtual runtime::Task<void> Ack(SandboxId id, v1::AckRequest request,
                                  runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::ListExecsReply> ListExecs(SandboxId id, runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::ListSessionsReply> ListSessions(SandboxId id,
                                                            runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> CloseSession(SandboxId id, v1::SessionRequest request,
                                           runtime::Deadline deadline) = 0;

  // --- files (aether.proto says what each does) ---

  virtual runtime::Task<v1::FileInfo> StatFile(SandboxId id, v1::PathRequest request,
                                               runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::ListReply> ListFiles(SandboxId id, v1::ListRequest request,
                                                 runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::ReadReply> ReadFile(SandboxId id, v1::ReadRequest request,
                                                runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::WriteReply> WriteFile(SandboxId id, v1::WriteRequest request,
                                                  runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Mkdir(SandboxId id, v1::MkdirRequest request,
                                    runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Move(SandboxId id, v1::MoveRequest request,
                                   runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Remove(SandboxId id, v1::RemoveRequest request,
                                     runtime::Deadline deadline) = 0;
  virtual runtime::Task<void> Chmod(SandboxId id, v1::ChmodRequest request,
                                    runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::WatchReply> Watch(SandboxId id, v1::WatchRequest request,
                                              runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::PullArchiveReply> PullArchive(SandboxId id,
                                                          v1::PullArchiveRequest request,
                                                          runtime::Deadline deadline) = 0;
  virtual runtime::Task<v1::PushArchiveReply> PushArchive(SandboxId id,
                                                          v1::PushArchiveRequest request,
                                                          runtime::Deadline deadline) = 0;
};

// How long a client should wait before it repeats a request that failed with `error`; for the
// Retry-After header.
std::chrono::seconds RetryAfter(const Error& error);
// kNotFound "sandbox.not_found".
Error NotFoundError(std::string_view id);

}  // namespace dsec::edge
