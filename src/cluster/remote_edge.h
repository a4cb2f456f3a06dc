// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "edge/api.h"
#include "rpc/channel.h"
#include "rpc/tls.h"
#include "runtime/shards.h"

namespace dsec::cluster {

struct RemoteEdgeOptions {
  std::string address;  // HOST:PORT
  std::string node_id;  // the name that its certificate must have
  std::shared_ptr<const rpc::TlsHolder> tls;
  // The epoch of the node as this daemon knows it now; any thread.
  std::function<uint64_t()> epoch;
  std::chrono::milliseconds connect_time{5'000};
  // After a failure to connect nobody tries again for so long.
  std::chrono::milliseconds connect_pause{200};
};

// An edge on another machine: EdgeServer at the other end. One connection for each shard that makes
// calls, made by the first call and again by the first after it has ended.
//
// In addition to the errors of EdgeApi:
//  - kUnavailable edge.unreachable: no connection, or it ended before the answer. What a call that
//    was under way has done is not known. Calls that only read (Get, ProjectOf, List, Stats,
//    Events, Node, ListExecs, ListSessions, StatFile, ListFiles, ReadFile) are made once more on a
//    new connection first; no other call is ever repeated here.
//  - kDeadlineExceeded rpc.deadline: connected, but no answer within two seconds after the
//  deadline.
//  - kFailedPrecondition edge.epoch_stale, kUnavailable edge.fencing, edge.follower_gone: of
//    cluster/epoch_gate.h and EdgeServer.
//
// A follower whose connection ends has vanished, and so has a Claim.
class RemoteEdge final : public edge::EdgeApi {
 public:
  // kInvalidArgument "node.address".
  static Result<std::shared_ptr<RemoteEdge>> Make(runtime::Shards& shards,
                                                  RemoteEdgeOptions options);
  // Any thread, also after the shards have been stopped, but before they are destroyed. No call may
  // be under way.
  ~RemoteEdge() override;

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
  struct Line;  // the connection of one shard
  class End;    // this side of a stream
  class RemoteClaim;
  class RemoteAttachment;
  enum class Repeat { kNever, kOnce };

  RemoteEdge(runtime::Shards& shards, RemoteEdgeOptions options);
  runtime::Task<std::shared_ptr<Line>> LineHere();
  runtime::Task<std::shared_ptr<rpc::Channel>> Connected(std::shared_ptr<Line> line,
                                                         runtime::Deadline deadline);
  runtime::Task<std::shared_ptr<rpc::Channel>> Dial(std::shared_ptr<Line> line,
                                                    runtime::Deadline deadline);
  std::string Envelope(const SandboxId& id, std::string body, uint64_t follower,
                       runtime::Deadline deadline) const;
  // The body of the answer.
  runtime::Task<std::string> CallRaw(const char* method, SandboxId id, std::string body,
                                     uint64_t follower, Repeat repeat, runtime::Deadline deadline);
  template <typename Reply, typename Request>
  runtime::Task<Reply> Call(const char* method, SandboxId id, const Request& request, Repeat repeat,
                            runtime::Deadline deadline, uint64_t follower = 0);
  template <typename Request>
  runtime::Task<void> CallVoid(const char* method, SandboxId id, const Request& request,
                               runtime::Deadline deadline);
  template <typename Reply>
  static runtime::Task<Reply> Parsed(runtime::Task<std::string> call);
  static runtime::Task<void> Dropped(runtime::Task<std::string> call);
  Error Lost(const Error& error) const;
  runtime::Task<std::shared_ptr<End>> Open(const char* method, SandboxId id, std::string body,
                                           runtime::Deadline deadline);
  // The body of the next answer of a stream; nullopt at its end.
  runtime::Task<std::optional<std::string>> Next(End& end, runtime::Deadline deadline);

  runtime::Shards& shards_;
  const RemoteEdgeOptions options_;
  std::string host_;
  uint16_t port_ = 0;
  std::vector<std::shared_ptr<Line>> lines_;  // by shard
};

}  // namespace dsec::cluster
