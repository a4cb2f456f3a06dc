// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cluster/node_record.h"
#include "edge/api.h"
#include "runtime/gate.h"
#include "runtime/shards.h"
#include "store/store.h"

namespace dsec::cluster {

// The edge at an address, for a node whose epoch the source tells.
using Dialler = std::function<Result<std::shared_ptr<edge::EdgeApi>>(
    const std::string& address, const std::string& node_id, std::function<uint64_t()> epoch)>;

// The nodes of the store as they are now, each with its edge. What was read last holds while the
// store is away. Thread-safe but for Open and Stop.
class NodeTable {
 public:
  struct Node {
    v1::NodeRecord record;
    std::shared_ptr<edge::EdgeApi> edge;
  };
  using Nodes = std::map<std::string, Node>;  // by id

  // Reads them, then follows the store on `home`. Errors of the store.
  static runtime::Task<std::unique_ptr<NodeTable>> Open(store::Store& store, runtime::Executor home,
                                                        Dialler dial);
  ~NodeTable() = default;
  boost::asio::awaitable<void> Stop();
  std::shared_ptr<const Nodes> Now() const {
    const std::lock_guard lock(mutex_);
    return nodes_;
  }

 private:
  struct Epoch {
    std::atomic<uint64_t> value = 0;
  };
  NodeTable(store::Store& store, Dialler dial) : store_(store), dial_(std::move(dial)) {}
  runtime::Task<void> Load();
  boost::asio::awaitable<void> Follow();
  // One node as the store has it; none: it is gone.
  void Put(Nodes& nodes, const std::string& key, const std::optional<std::string>& value);
  void Publish(Nodes nodes);

  store::Store& store_;
  const Dialler dial_;
  store::Revision next_ = 0;
  std::map<std::string, std::shared_ptr<Epoch>> epochs_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Nodes> nodes_ = std::make_shared<const Nodes>();
  runtime::Running follower_;
  runtime::Gate work_;
};

// The sandboxes of all nodes as one EdgeApi, without placement: a call goes to the node that the id
// names, a create to the node that its request_id hashes to among those that are joined, so that a
// repeat meets the first. kUnavailable "cluster.no_node": none is joined; kNotFound
// sandbox.not_found for an id of a node that there is not. A list goes through the nodes in order
// of id; a node that cannot be reached fails it.
class RoutedEdge final : public edge::EdgeApi {
 public:
  // `table` must outlive it.
  explicit RoutedEdge(const NodeTable& table) : table_(table) {}

#define DSEC_ROUTED(Reply, Name, Request) \
  runtime::Task<Reply> Name(SandboxId id, Request request, runtime::Deadline deadline) override;
#define DSEC_ROUTED_CALLS(X)                                   \
  X(v1::FirstTouchReply, FirstTouch, v1::FirstTouchRequest)    \
  X(v1::StdinReply, WriteStdin, v1::StdinRequest)              \
  X(void, Signal, v1::SignalRequest)                           \
  X(void, Resize, v1::ResizeRequest)                           \
  X(void, Ack, v1::AckRequest)                                 \
  X(void, CloseSession, v1::SessionRequest)                    \
  X(v1::FileInfo, StatFile, v1::PathRequest)                   \
  X(v1::ListReply, ListFiles, v1::ListRequest)                 \
  X(v1::ReadReply, ReadFile, v1::ReadRequest)                  \
  X(v1::WriteReply, WriteFile, v1::WriteRequest)               \
  X(void, Mkdir, v1::MkdirRequest)                             \
  X(void, Move, v1::MoveRequest)                               \
  X(void, Remove, v1::RemoveRequest)                           \
  X(void, Chmod, v1::ChmodRequest)                             \
  X(v1::WatchReply, Watch, v1::WatchRequest)                   \
  X(v1::PullArchiveReply, PullArchive, v1::PullArchiveRequest) \
  X(v1::PushArchiveReply, PushArchive, v1::PushArchiveRequest)
  DSEC_ROUTED_CALLS(DSEC_ROUTED)
#undef DSEC_ROUTED

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
  // Of one sandbox; those of a whole node are kFailedPrecondition "cluster.node_events".
  runtime::Task<v1::EventsReply> Events(v1::EventsRequest request,
                                        runtime::Deadline deadline) override;
  // Sums over the nodes that answer.
  runtime::Task<v1::NodeInfo> Node(runtime::Deadline deadline) override;
  runtime::Task<v1::PackReply> Pack(SandboxId id, v1::PackRequest request,
                                    edge::PackProgressFn progress,
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
  runtime::Task<v1::ListExecsReply> ListExecs(SandboxId id, runtime::Deadline deadline) override;
  runtime::Task<v1::ListSessionsReply> ListSessions(SandboxId id,
                                                    runtime::Deadline deadline) override;

 private:
  Result<std::shared_ptr<edge::EdgeApi>> Of(const SandboxId& id) const;

  const NodeTable& table_;
};

}  // namespace dsec::cluster
