// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "cluster/epoch_gate.h"
#include "edge/api.h"
#include "rpc/server.h"
#include "runtime/gate.h"

namespace dsec::cluster {

inline constexpr std::string_view kEdgeService = "dsec.v1.Edge";

// Options of an rpc server that an EdgeServer is registered with: each follower and each create
// under way is a call.
rpc::ServerOptions EdgeServerOptions();

// Serves an EdgeApi to other daemons as api/proto/dsec/v1/cluster.proto says. Lives on the shard of
// the rpc server. Nothing reaches the EdgeApi that the gate does not let through.
class EdgeServer {
 public:
  // Both must outlive it.
  EdgeServer(edge::EdgeApi& edge, EpochGate& gate) : edge_(edge), gate_(gate) {}
  // The rpc server must have stopped and Stop must have returned, or the shards must have been
  // stopped.
  ~EdgeServer() = default;
  EdgeServer(const EdgeServer&) = delete;
  EdgeServer& operator=(const EdgeServer&) = delete;

  // Before the server listens.
  void Register(rpc::Server& server);
  // After the rpc server has stopped: waits for what goes on without a caller.
  boost::asio::awaitable<void> Stop() { return packs_.Close(); }

 private:
  // A follower that is connected. Its entry ends before the stream's handler does.
  struct Follower {
    std::shared_ptr<edge::Attachment> attachment;
    std::string caller;  // who may use it
  };
  struct Asked;  // a call that was let through
  class Entry;
  struct PackUnderWay;

  static std::string CallerOf(const rpc::CallContext& context);
  // Parses the envelope and passes the gate.
  runtime::Task<Asked> Ask(std::string payload, rpc::CallContext context);
  template <typename Request, typename Work>
  void Unary(rpc::Server& server, std::string method, Work work);
  template <typename Reply>
  std::string Answer(const Result<Reply>& reply) const;
  std::string Answer(const Result<void>& reply) const;
  std::string Failed(const Error& error) const;
  Result<edge::Attachment*> FollowerOf(const Asked& asked) const;

  void RegisterReads(rpc::Server& server);
  void RegisterExecs(rpc::Server& server);
  void RegisterFiles(rpc::Server& server);
  runtime::Task<v1::ListPage> ListThatFits(v1::ListRequestAll request, runtime::Deadline deadline);
  runtime::Task<v1::EventsReply> EventsThatFit(v1::EventsRequest request,
                                               runtime::Deadline deadline);
  runtime::Task<void> Create(std::string payload, rpc::ServerStream& stream,
                             rpc::CallContext context);
  runtime::Task<void> Attach(std::string payload, rpc::ServerStream& stream,
                             rpc::CallContext context);
  runtime::Task<void> Pack(std::string payload, rpc::ServerStream& stream,
                           rpc::CallContext context);
  boost::asio::awaitable<void> RunPack(std::shared_ptr<PackUnderWay> pack, SandboxId id,
                                       v1::PackRequest request, runtime::Deadline deadline);

  edge::EdgeApi& edge_;
  EpochGate& gate_;
  uint64_t next_follower_ = 1;
  std::map<uint64_t, Follower> followers_;
  runtime::Gate packs_;
};

}  // namespace dsec::cluster
