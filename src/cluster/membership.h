// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "ca/authority.h"
#include "ca/join_token.h"
#include "cluster/node_record.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/cluster.pb.h"
#include "rpc/server.h"
#include "store/store.h"

namespace dsec::cluster {

inline constexpr std::string_view kClusterService = "dsec.v1.Cluster";

// How far a node may be ahead of its record: the store has come from an older copy.
inline constexpr uint64_t kMaxEpochStep = 64;

// The CA as a daemon uses it; replaced as a whole when it changes. Any thread.
class Issuer {
 public:
  struct State {
    std::shared_ptr<const ca::Authority> authority;
    std::string trusted;  // PEM: all CAs
  };
  explicit Issuer(State state) : state_(std::move(state)) {}
  State Get() const {
    const std::lock_guard lock(mutex_);
    return state_;
  }
  void Replace(State state) {
    const std::lock_guard lock(mutex_);
    state_ = std::move(state);
  }

 private:
  mutable std::mutex mutex_;
  State state_;
};

// How nodes become part of a cluster, on an apiserver: service dsec.v1.Cluster of
// api/proto/dsec/v1/cluster.proto. Holds nothing: each call is one transaction of the store, so it
// does not matter which apiserver is asked, or when one dies.
//
//  - Join, for which no certificate is asked. kUnauthenticated "join.token";
//    kPermissionDenied "join.name": the request asks for another name than the token allows;
//    kAlreadyExists "join.node_taken": a node of that id has a certificate that still holds;
//    kFailedPrecondition "join.capability": the row of `dsec doctor` that the node fails;
//    kInvalidArgument "ca.request", "node.record", "join.node".
//  - Renew, Announce: kUnauthenticated "join.certificate" without one;
//    kFailedPrecondition "join.unknown_node": it must join; kPermissionDenied "join.replaced":
//    another machine has joined under its id since. Renew: kFailedPrecondition "join.renew_early"
//    before half of the certificate's life. Announce: kFailedPrecondition "join.epoch" with one
//    that is more than kMaxEpochStep ahead.
//
// Who joins with the key that the node's certificate has is the same machine, asking again. Any
// other one (another machine, or one that has lost its state) gets a higher epoch, so that whatever
// the id had before counts as ended, and the certificates before stand for the id no more. A node
// that was declared dead is joined when it announces the epoch of its death, not before.
class Membership {
 public:
  // These must outlive it.
  Membership(store::Store& store, const Issuer& issuer, const Clock& clock)
      : store_(store), issuer_(issuer), clock_(clock) {}
  // Before the server listens; it must allow clients without a certificate.
  void Register(rpc::Server& server);

  runtime::Task<v1::JoinReply> Join(v1::JoinRequest request, runtime::Deadline deadline);
  runtime::Task<v1::JoinReply> Renew(v1::CertifyRequest request, rpc::TlsPeer peer,
                                     runtime::Deadline deadline);
  runtime::Task<v1::AnnounceReply> Announce(v1::AnnounceRequest request, rpc::TlsPeer peer,
                                            runtime::Deadline deadline);
  // For operators; kPermissionDenied "join.operator" for others.
  runtime::Task<v1::MakeTokenReply> MakeToken(v1::MakeTokenRequest request, rpc::TlsPeer peer,
                                              runtime::Deadline deadline);
  runtime::Task<v1::NodesReply> Nodes(v1::Empty request, rpc::TlsPeer peer,
                                      runtime::Deadline deadline);
  // Removes the record, so that the id may join again at once. Its epoch is lost: only for a
  // machine that does not come back. kNotFound "node.not_found".
  runtime::Task<v1::Empty> Forget(v1::ForgetNodeRequest request, rpc::TlsPeer peer,
                                  runtime::Deadline deadline);

 private:
  template <typename Request, typename Reply>
  void Serve(rpc::Server& server, const char* method,
             runtime::Task<Reply> (Membership::*call)(Request, rpc::TlsPeer, runtime::Deadline));
  struct Found;  // a node's record and its version
  struct Certified;
  runtime::Task<Found> Find(std::string node_id, runtime::Deadline deadline);
  runtime::Task<v1::JoinReply> JoinWith(const ca::SigningRequest& wanted, std::string token,
                                        v1::NodeRecord word, Certified& made,
                                        runtime::Deadline deadline);
  runtime::Task<v1::JoinReply> RenewWith(const ca::SigningRequest& wanted, const rpc::TlsPeer& peer,
                                         Certified& made, runtime::Deadline deadline);
  runtime::Task<void> Certify(const ca::SigningRequest& wanted, std::string principal,
                              Certified& made, runtime::Deadline deadline);
  runtime::Task<void> TakeBack(const Certified& made);
  int64_t NowMs() const { return UnixMillis(clock_.Wall()); }

  store::Store& store_;
  const Issuer& issuer_;
  const Clock& clock_;
};

// kFailedPrecondition "join.capability" with the first row that a node cannot be without.
Result<void> CheckCapabilitiesOf(const v1::NodeRecord& record);

}  // namespace dsec::cluster
