// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "edge/api.h"
#include "edge/fair_queue.h"
#include "iam/project.h"
#include "placement/node.h"
#include "router/load.h"
#include "router/lost.h"
#include "router/nodes.h"
#include "router/requests.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::router {

struct ClusterOptions {
  std::string instance;  // of this apiserver, as node ids
  std::string cluster;   // its name, for NodeInfo
  EdgeOf edge_of;
  // A life of a node is over: what is open to it is to be closed.
  std::function<void(const v1::NodeRecord&)> dead;
  WatcherOf watcher_of;
  Load::Options load;
  Requests::Options requests;
  // What a sandbox is expected to use; never more than its limits.
  placement::Demand expected{1, uint64_t{64} << 20, uint64_t{50} << 20};
  // A node that has not answered a create for so long is asked again.
  std::chrono::milliseconds attempt{5'000};
  // Creates under way here, and those of one project that wait for their turn at the door.
  size_t creates_at_once = 8'000;
  size_t max_waiting = 50'000;
  std::chrono::milliseconds list_patience{5'000};  // with one node
  size_t list_at_once = 16;                        // nodes asked at the same time
  std::chrono::milliseconds lease{10'000};         // of place/<instance>
  size_t projects_kept = 400'000;                  // ids whose project is known without asking
  const Clock* clock = &Clock::System();
  metrics::Registry* metrics = &metrics::Registry::Global();
};

// All edges of a cluster as one EdgeApi, with what EdgeApi says of each call. Any number of these
// work beside one another; each may be killed at any moment (docs/design/cluster.md, section 4).
//
// What is different from one edge:
//  - Create goes where placement says, to another node when one refuses, and to the same node until
//    it answers or is dead when it does not answer. kResourceExhausted capacity.cluster: no node
//    has room. kGone create.deleted: the request was deleted. kUnavailable cluster.no_nodes.
//    kUnavailable store.*: where the request went cannot be put on record now.
//  - A sandbox whose node was declared dead has ended: Get, Delete and Events answer from lost/,
//    the other calls are kGone sandbox.ended.node_lost.
//  - List goes node by node in order of id; nodes that do not answer are named in the page.
//  - Events of all need a cursor in place of a number.
//  - Node answers for the cluster: sums.
class ClusterEdge final : public edge::EdgeApi {
 public:
  // `store` must outlive it; `executor` runs what talks to it.
  ClusterEdge(store::Store& store, runtime::Executor executor, ClusterOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~ClusterEdge() override;
  // Follows the store and a watcher from now on.
  void Start();
  // Returns when the nodes have been read.
  runtime::Task<void> WaitReady(runtime::Deadline deadline);
  runtime::Task<void> Stop();

  // Nothing is to come of the request, whether it was made, is under way or was never sent: a
  // delete wins over a late create. What was made is ended as by Delete.
  runtime::Task<void> DeleteByRequest(std::string project, std::string request_id, std::string who,
                                      runtime::Deadline deadline);

  const NodeTable& nodes() const { return nodes_; }
  const Load& load() const { return load_; }
  // Creates that wait for room, and for their turn at the door.
  size_t waiting_for_room() const { return room_.waiting(); }
  size_t waiting_at_door() const { return door_.waiting(); }

  // --- EdgeApi ---
  runtime::Task<edge::Created> Create(v1::CreateRequest request,
                                      runtime::Deadline deadline) override;
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
  runtime::Task<v1::PackReply> Pack(SandboxId id, v1::PackRequest request,
                                    edge::PackProgressFn progress,
                                    runtime::Deadline deadline) override;
  runtime::Task<v1::FirstTouchReply> FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                runtime::Deadline deadline) override;
  runtime::Task<std::unique_ptr<edge::Attachment>> Attach(SandboxId id, std::string op_id,
                                                          edge::OnDisconnect rule,
                                                          runtime::Deadline deadline) override;
  runtime::Task<v1::ExecReply> Exec(SandboxId id, v1::ExecRequest request,
                                    edge::Attachment* follower,
                                    runtime::Deadline deadline) override;
  runtime::Task<v1::ExecReply> Poll(SandboxId id, v1::PollRequest request,
                                    edge::Attachment* follower,
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
  // Where the sandbox is, or what is left of it.
  struct Target {
    NodePtr node;
    std::optional<LostOfNode::One> lost;
  };
  using Way = std::shared_ptr<edge::EdgeApi>;
  struct Creating;
  class Follower;
  class HeldClaim;

  static edge::Attachment* AtNode(edge::Attachment* follower, const Way& api);
  // kNotFound sandbox.not_found.
  runtime::Task<Target> Find(SandboxId id, runtime::Deadline deadline);
  // What a node's error means for its sandbox: a node that has just been declared dead answers
  // nothing any more, and one that came back does not know what it had.
  runtime::Task<std::optional<LostOfNode::One>> LostSince(SandboxId id, NodePtr node, Error error,
                                                          runtime::Deadline deadline);
  // One call about a sandbox that is to run.
  template <typename Reply, typename Call>
  runtime::Task<Reply> Route(SandboxId id, Call call, runtime::Deadline deadline);
  // One that an ended sandbox answers, too.
  template <typename Reply, typename Call, typename OfLost>
  runtime::Task<Reply> RouteAny(SandboxId id, Call call, OfLost of_lost,
                                runtime::Deadline deadline);

  // --- cluster_create.cc ---
  runtime::Task<edge::Created> CreateIn(Creating& creating);
  runtime::Task<void> ChooseNode(Creating& creating);
  runtime::Task<void> Enroll(Creating& creating);
  runtime::Task<std::optional<edge::Created>> AskNode(Creating& creating);
  runtime::Task<void> MoveOn(Creating& creating);
  runtime::Task<edge::Created> Finish(Creating& creating, edge::Created made);
  runtime::Task<edge::Created> GiveUp(Creating& creating, Error error);
  runtime::Task<edge::Created> LostAnswer(Creating& creating);
  boost::asio::awaitable<void> EndDeleted(std::string sandbox_id, std::string who);
  placement::Demand DemandOf(const v1::SandboxSpec& spec) const;

  // --- cluster_list.cc ---
  struct Part;
  boost::asio::awaitable<void> ListNode(std::shared_ptr<Part> part, v1::ListRequestAll request,
                                        runtime::Deadline deadline);
  runtime::Task<v1::ListPage> PageOf(NodePtr node, v1::ListRequestAll request,
                                     runtime::Deadline deadline);
  runtime::Task<bool> TakePages(const std::vector<std::shared_ptr<Part>>& parts, bool last_nodes,
                                uint32_t page_size, v1::ListPage& page);
  struct Gathering {
    size_t left = 0;
    bool first_is_enough = false;
    runtime::AsyncEvent done;
  };
  boost::asio::awaitable<void> EventsOfNode(std::shared_ptr<Part> part, v1::EventsRequest request,
                                            std::shared_ptr<Gathering> gathering,
                                            runtime::Deadline deadline);
  runtime::Task<std::vector<std::shared_ptr<Part>>> GatherEvents(
      const std::vector<NodePtr>& nodes, const std::map<std::string, uint64_t>& cursor,
      uint32_t limit, std::chrono::milliseconds wait, runtime::Deadline deadline);
  runtime::Task<v1::EventsReply> EventsOfAll(v1::EventsRequest request, runtime::Deadline deadline);

  boost::asio::awaitable<void> KeepPlace();
  void KeepProject(const std::string& id, const std::string& project);
  std::optional<std::string> KnownProject(const std::string& id) const;

  store::Store& store_;
  const runtime::Executor executor_;
  const ClusterOptions options_;
  NodeTable nodes_;
  Load load_;
  LostBook lost_;
  Requests requests_;
  edge::FairQueue door_;
  edge::FairQueue room_;
  std::atomic<size_t> creating_ = 0;

  metrics::Counter& creates_;
  metrics::Counter& moved_;
  metrics::Counter& asked_again_;
  metrics::Histogram& create_seconds_;

  mutable std::mutex projects_mutex_;
  std::unordered_map<std::string, std::string> projects_;
  std::list<std::string> projects_order_;

  runtime::AsyncEvent ready_;  // on executor_
  store::LeaseId lease_ = 0;   // on executor_
  runtime::Gate gate_;
  std::vector<runtime::Running> running_;
};

}  // namespace dsec::router
