// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "edge/admission.h"
#include "edge/api.h"
#include "edge/due_queue.h"
#include "edge/event_hub.h"
#include "edge/metrics.h"
#include "edge/options.h"
#include "edge/quota_lines.h"
#include "edge/record_store.h"
#include "edge/registry.h"
#include "edge/sandbox.h"
#include "edge/semaphore.h"
#include "runtime/blocking_pool.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"
#include "runtime/shards.h"
#include "sandbox/backend.h"

namespace dsec::edge {

// What Start found.
struct StartReport {
  uint64_t adopted = 0;
  uint64_t ended = 0;       // on record as live, but not
  uint64_t unanswered = 0;  // alive, but did not answer yet; tried further in the background
  uint64_t repairs = 0;     // host things that no record owned
};

// The node agent. Each sandbox lives on the shard that its id hashes to; what concerns several is
// in the thread-safe members. A step that makes or removes something on the host is on record
// before it is taken.
//
// Life: Open, Start, calls, Stop; then the owner stops the shards, calls LetGo, destroys the shards
// and last this object. Without Stop the same order is a crash, from which the next Start recovers.
class Edge final : public EdgeApi {
 public:
  // By kind; they outlive the Edge.
  using Backends = std::map<v1::Backend, sandbox::SandboxBackend*>;

  // Opens <state_dir>/edge.db. Errors of RecordStore::Open: a damaged store is an error unless the
  // host has restarted since (nothing that it names can be alive then): it is set aside as
  // edge.db.damaged and logged.
  static Result<std::unique_ptr<Edge>> Open(EdgeOptions options, runtime::Shards& shards,
                                            Backends backends);
  ~Edge() override;

  // Adopts what is alive, ends what is not, sweeps the host; then timers and reconciliation run.
  // Not from a shard of `shards`.
  Result<StartReport> Start();
  // Takes no more calls and waits for those under way, creates and stops too, until `deadline`.
  // Sandboxes go on.
  runtime::Task<void> Stop(runtime::Deadline deadline);
  // Ends every sandbox (cause user_stop, who "edge") and waits for it until `deadline`.
  runtime::Task<void> StopSandboxes(std::chrono::milliseconds grace, runtime::Deadline deadline);
  // Ends every sandbox that exists or was asked for before (cause node_lost, who "epoch") and waits
  // for it until `deadline`. A Create that began before is among them, wherever it is.
  runtime::Task<void> Fence(std::string message, runtime::Deadline deadline);
  // After the shards were stopped: destroys what of this object lives on them.
  void LetGo();

  // Quota may be there again; any thread, also while the Edge ends.
  void QuotaFreed() { quota_lines_.Poke(); }
  // What the timers do when a deadline has come; for tests that move the clock by hand.
  void RunDue();
  // What is done each reconcile_period. The lines say what was removed from the host.
  runtime::Task<std::vector<std::string>> Reconcile();

  runtime::Task<Created> Create(v1::CreateRequest request, runtime::Deadline deadline) override;
  runtime::Task<v1::SandboxView> Get(SandboxId id, runtime::Deadline deadline) override;
  runtime::Task<std::string> ProjectOf(SandboxId id) override;
  runtime::Task<v1::ListPage> List(v1::ListRequestAll request, runtime::Deadline deadline) override;
  runtime::Task<v1::SandboxView> Delete(v1::DeleteRequest request,
                                        runtime::Deadline deadline) override;
  runtime::Task<v1::SandboxView> Renew(v1::RenewRequest request,
                                       runtime::Deadline deadline) override;
  runtime::Task<v1::Usage> Stats(SandboxId id, runtime::Deadline deadline) override;
  runtime::Task<v1::EventsReply> Events(v1::EventsRequest request,
                                        runtime::Deadline deadline) override;
  runtime::Task<v1::NodeInfo> Node(runtime::Deadline deadline) override;
  runtime::Task<v1::PackReply> Pack(SandboxId id, v1::PackRequest request, PackProgressFn progress,
                                    runtime::Deadline deadline) override;
  runtime::Task<v1::FirstTouchReply> FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                runtime::Deadline deadline) override;

  runtime::Task<std::unique_ptr<Attachment>> Attach(SandboxId id, std::string op_id,
                                                    OnDisconnect rule,
                                                    runtime::Deadline deadline) override;
  runtime::Task<v1::ExecReply> Exec(SandboxId id, v1::ExecRequest request, Attachment* follower,
                                    runtime::Deadline deadline) override;
  runtime::Task<v1::ExecReply> Poll(SandboxId id, v1::PollRequest request, Attachment* follower,
                                    runtime::Deadline deadline) override;
  runtime::Task<v1::StdinReply> WriteStdin(SandboxId id, v1::StdinRequest request,
                                           runtime::Deadline deadline) override;
  runtime::Task<void> Signal(SandboxId id, v1::SignalRequest request,
                             runtime::Deadline deadline) override;
  runtime::Task<void> Resize(SandboxId id, v1::ResizeRequest request,
                             runtime::Deadline deadline) override;
  runtime::Task<void> Ack(SandboxId id, v1::AckRequest request,
                          runtime::Deadline deadline) override;
  runtime::Task<v1::ListExecsReply> ListExecs(SandboxId id, runtime::Deadline deadline) override;
  runtime::Task<v1::ListSessionsReply> ListSessions(SandboxId id,
                                                    runtime::Deadline deadline) override;
  runtime::Task<void> CloseSession(SandboxId id, v1::SessionRequest request,
                                   runtime::Deadline deadline) override;
  runtime::Task<v1::FileInfo> StatFile(SandboxId id, v1::PathRequest request,
                                       runtime::Deadline deadline) override;
  runtime::Task<v1::ListReply> ListFiles(SandboxId id, v1::ListRequest request,
                                         runtime::Deadline deadline) override;
  runtime::Task<v1::ReadReply> ReadFile(SandboxId id, v1::ReadRequest request,
                                        runtime::Deadline deadline) override;
  runtime::Task<v1::WriteReply> WriteFile(SandboxId id, v1::WriteRequest request,
                                          runtime::Deadline deadline) override;
  runtime::Task<void> Mkdir(SandboxId id, v1::MkdirRequest request,
                            runtime::Deadline deadline) override;
  runtime::Task<void> Move(SandboxId id, v1::MoveRequest request,
                           runtime::Deadline deadline) override;
  runtime::Task<void> Remove(SandboxId id, v1::RemoveRequest request,
                             runtime::Deadline deadline) override;
  runtime::Task<void> Chmod(SandboxId id, v1::ChmodRequest request,
                            runtime::Deadline deadline) override;
  runtime::Task<v1::WatchReply> Watch(SandboxId id, v1::WatchRequest request,
                                      runtime::Deadline deadline) override;
  runtime::Task<v1::PullArchiveReply> PullArchive(SandboxId id, v1::PullArchiveRequest request,
                                                  runtime::Deadline deadline) override;
  runtime::Task<v1::PushArchiveReply> PushArchive(SandboxId id, v1::PushArchiveRequest request,
                                                  runtime::Deadline deadline) override;

 private:
  using SandboxPtr = std::shared_ptr<Sandbox>;
  class Follower;
  class Delivery;

  Edge(EdgeOptions options, runtime::Shards& shards, Backends backends,
       std::unique_ptr<RecordStore> store);

  // --- edge.cc: what all share ---
  int64_t NowMs() const { return UnixMillis(options_.clock->Wall()); }
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  Result<sandbox::SandboxBackend*> BackendFor(v1::Backend kind) const;
  // The live sandbox, or kGone / kNotFound.
  runtime::Task<SandboxPtr> FindLive(SandboxId id);
  // Of one that has ended.
  runtime::Task<v1::SandboxRecord> FindEnded(std::string id);
  v1::SandboxView ViewOf(const Sandbox& sandbox) const;
  // Writes the record as it is now together with `events` and announces them.
  runtime::Task<void> Save(SandboxPtr sandbox, std::vector<v1::Event> events);
  runtime::Task<void> SaveNew(SandboxPtr sandbox, std::vector<v1::Event> events);
  runtime::Task<void> SaveBy(SandboxPtr sandbox, std::shared_ptr<const v1::SandboxRecord> record,
                             std::vector<v1::Event> events, bool fresh);
  // Writes an event without waiting: now, or within 10 ms together with others of that time.
  void Emit(const SandboxPtr& sandbox, v1::Event event, bool soon = false);
  boost::asio::awaitable<void> FlushLater(SandboxPtr sandbox);
  runtime::Task<void> Flush(SandboxPtr sandbox);
  boost::asio::awaitable<void> SaveLater(SandboxPtr sandbox);
  // Enters the sandbox for its next deadline.
  void Arm(const SandboxPtr& sandbox);
  void OnDue(const SandboxPtr& sandbox);
  boost::asio::awaitable<void> RunTimers();
  boost::asio::awaitable<void> CloseCalls(std::shared_ptr<runtime::AsyncEvent> closed);
  boost::asio::awaitable<void> ReconcileAndLog();
  runtime::Task<v1::SandboxView> GetHere(SandboxPtr sandbox);
  runtime::Task<v1::SandboxView> RenewHere(SandboxPtr sandbox, v1::RenewRequest request,
                                           runtime::Deadline deadline);
  runtime::Task<v1::Usage> StatsHere(SandboxPtr sandbox);

  // --- create.cc ---
  // What a live sandbox is charged with.
  static iam::Amounts AmountsOf(const v1::SandboxRecord& record);
  runtime::Task<void> TakeQuota(SandboxPtr sandbox, runtime::Deadline room_by);
  runtime::Task<Created> Join(SandboxPtr sandbox, std::string digest, bool existed,
                              runtime::Deadline deadline);
  runtime::Task<Created> JoinHere(SandboxPtr sandbox, bool existed, runtime::Deadline deadline);
  boost::asio::awaitable<void> RunCreate(SandboxPtr sandbox, runtime::Deadline room_by);
  runtime::Task<void> MakeSandbox(SandboxPtr sandbox, runtime::Deadline room_by);
  boost::asio::awaitable<void> EndCreate(SandboxPtr sandbox, Error error);
  void Began(const SandboxPtr& sandbox, std::shared_ptr<sandbox::Instance> instance,
             int64_t now_ms);
  void ClaimSettled(const SandboxPtr& sandbox, bool delivered);
  void SetClaim(const SandboxPtr& sandbox, int64_t until_ms);
  // Whoever uses a sandbox has it. On record when this returns: a crash then must not end it as
  // unclaimed.
  boost::asio::awaitable<void> LiftClaim(SandboxPtr sandbox);

  // --- stop.cc ---
  runtime::Task<void> EndAll(v1::Termination termination, std::chrono::milliseconds grace,
                             runtime::Deadline deadline);
  runtime::Task<v1::SandboxView> DeleteHere(SandboxPtr sandbox, v1::DeleteRequest request,
                                            runtime::Deadline deadline);
  // Begins the end of a sandbox in whatever state, unless it has begun; a shorter grace than before
  // counts.
  void BeginStop(const SandboxPtr& sandbox, v1::Termination termination,
                 std::chrono::milliseconds grace);
  v1::Termination FencedTermination(std::string_view message) const;
  v1::Termination NewTermination(std::string_view cause, std::string_view who,
                                 std::string_view message) const;
  boost::asio::awaitable<void> RunStop(SandboxPtr sandbox);
  runtime::Task<void> Quiesce(SandboxPtr sandbox);
  // Ok after a change or at `by`.
  runtime::Task<void> WaitUnlessDue(SandboxPtr sandbox, runtime::Deadline by);
  boost::asio::awaitable<void> CallShutdown(SandboxPtr sandbox,
                                            std::shared_ptr<rpc::Channel> agent);
  // Removes everything from the host, however often it takes, and records the end.
  boost::asio::awaitable<void> FinishStop(SandboxPtr sandbox, std::optional<Code> create_code);
  runtime::Task<void> RemoveFromHost(SandboxPtr sandbox);
  boost::asio::awaitable<void> Monitor(SandboxPtr sandbox,
                                       std::shared_ptr<sandbox::Instance> instance);
  boost::asio::awaitable<void> FollowEntrypoint(SandboxPtr sandbox);

  // --- exec.cc ---
  // What a call does to the sandbox.
  enum class Counts { kActivity, kRead };
  runtime::Task<std::unique_ptr<Attachment>> AttachHere(SandboxPtr sandbox, std::string op_id,
                                                        OnDisconnect rule,
                                                        runtime::Deadline deadline);
  void Detach(const SandboxPtr& sandbox, const std::string& op_id, bool vanished);
  runtime::Task<v1::ExecReply> ExecHere(SandboxPtr sandbox, v1::ExecRequest request, bool followed,
                                        runtime::Deadline deadline);
  runtime::Task<v1::ExecReply> PollHere(SandboxPtr sandbox, v1::PollRequest request, bool followed,
                                        runtime::Deadline deadline);
  // What a follower or another caller is told. `keep` is the rule of an exec that this reply may
  // have started.
  Result<v1::ExecReply> Answer(const SandboxPtr& sandbox, const std::string& op_id,
                               Result<v1::ExecReply> reply, bool followed,
                               std::optional<bool> keep);
  void NoteReply(const SandboxPtr& sandbox, const v1::ExecReply& reply, std::optional<bool> keep);
  boost::asio::awaitable<void> KillDisconnected(SandboxPtr sandbox, std::string op_id);
  // One call to the agent of a sandbox that is RUNNING (or, with `until_the_end`, STOPPING).
  template <typename Reply, typename Request>
  runtime::Task<Reply> CallAgent(SandboxPtr sandbox, const char* method, Request request,
                                 Counts counts, bool until_the_end, runtime::Deadline deadline);
  template <typename Reply, typename Request>
  runtime::Task<Reply> Forward(SandboxId id, const char* method, Request request, Counts counts,
                               runtime::Deadline deadline);
  template <typename Request>
  runtime::Task<void> ForwardVoid(SandboxId id, const char* method, Request request, Counts counts,
                                  runtime::Deadline deadline);
  // Its channel, or why there is none.
  runtime::Task<std::shared_ptr<rpc::Channel>> AgentOf(SandboxPtr sandbox, bool until_the_end,
                                                       runtime::Deadline deadline);
  // The channel is gone: why, as far as it is known soon.
  boost::asio::awaitable<Error> WhyLost(SandboxPtr sandbox, runtime::Deadline deadline);

  // --- pack.cc ---
  // A call on the instance of a sandbox, on its shard, that is activity for as long as it runs.
  // `call` makes it of the instance.
  template <typename Reply, typename Call>
  runtime::Task<Reply> OnInstance(SandboxPtr sandbox, Call call, runtime::Deadline deadline);

  // --- recover.cc ---
  runtime::Task<StartReport> StartHere(std::vector<v1::SandboxRecord> records);
  boost::asio::awaitable<void> Recover(SandboxPtr sandbox);
  boost::asio::awaitable<void> RecoverByEnding(SandboxPtr sandbox, v1::Termination termination);
  runtime::Task<void> Adopt(SandboxPtr sandbox);
  runtime::Task<void> WaitRecovered(SandboxPtr sandbox);
  // What is looked at each minute: execs that ended unseen, a full disk.
  runtime::Task<void> CheckUp(SandboxPtr sandbox);
  runtime::Task<std::vector<std::string>> Sweep();

  const EdgeOptions options_;
  runtime::Shards& shards_;
  const Backends backends_;
  std::string boot_id_;
  EdgeMetrics metrics_;
  const std::unique_ptr<RecordStore> store_;
  Registry registry_;
  EventHub hub_;
  QuotaLines quota_lines_;
  FairQueue room_queue_;
  Semaphore turns_;      // creates that work
  Semaphore adoptions_;  // of recovery
  Admission admission_;
  DueQueue<Sandbox> due_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> let_go_ = false;
  std::atomic<uint64_t> fences_ = 0;                 // begun
  runtime::Gate calls_;                              // calls, creates, stops: what Stop waits for
  runtime::Gate watchers_;                           // coroutines that last as long as a sandbox
  std::shared_ptr<runtime::AsyncEvent> timer_wake_;  // of shard 0
  std::unique_ptr<runtime::BlockingPool> store_thread_;
  std::unique_ptr<runtime::Periodic> reconcile_;
};

inline constexpr std::string_view kAetherService = "dsec.v1.Aether";
// op_id of the exec that runs a spec's entrypoint.
inline constexpr std::string_view kEntrypointOp = "entrypoint";

// kUnavailable "edge.stopping".
Error StoppingError();
// Ok for RUNNING, else what EdgeApi says for each state.
Result<void> CheckRunning(const Sandbox& sandbox);
// kGone "sandbox.ended.<cause>".
Error GoneError(const v1::Termination& termination);
// SHA-256 of what makes two creates the same.
std::string CreateDigest(const v1::CreateRequest& request);
// SHA-256 of an exec without its Poll part. `request` is the same afterwards.
std::string ExecDigest(v1::ExecRequest& request);
// The reply to a follower whose sandbox ended under its exec.
v1::ExecReply EndedReply(const std::string& op_id, const v1::Termination& termination);
// Bytes of unknown origin as text for a record: UTF-8, without control characters, bounded.
std::string SafeText(std::string_view bytes);

}  // namespace dsec::edge
