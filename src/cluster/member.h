// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ca/key_files.h"
#include "cluster/epoch_gate.h"
#include "dsec/v1/cluster.pb.h"
#include "rpc/tls.h"
#include "runtime/gate.h"

namespace dsec::cluster {

struct MemberOptions {
  std::string folder;  // of identity.pem, trusted.pem and, while it joins, joining.pem
  std::string role;    // edge, watcher
  std::string id;
  std::vector<std::string> apiservers;  // HOST:PORT of their rpc servers; asked in turn
  std::string join_token;               // used when there is no identity, or it has expired
  std::chrono::milliseconds announce_period{60'000};
  std::chrono::milliseconds retry_pause{2'000};
  const Clock* clock = &Clock::System();
};

// What a daemon without the CA's key does about its name: it joins once, keeps its certificate
// renewed, and (an edge) announces itself. Its key is made here and never leaves. One shard.
class Member {
 public:
  // What an edge says of itself; state, epoch and certificate are filled in here.
  using Word = std::function<runtime::Task<v1::NodeRecord>()>;

  // With the identity of the folder, or by joining with the token. kFailedPrecondition
  // "member.no_identity": neither; "member.expired": it has expired, and there is no token;
  // kConflict "member.other_name": the folder is another daemon's; errors of Membership, and
  // kUnavailable "member.no_apiserver" when none could be asked.
  static runtime::Task<std::unique_ptr<Member>> Open(runtime::Executor home, MemberOptions options,
                                                     Word word, runtime::Deadline deadline);
  // Stop must have returned, or the shards must have been stopped.
  ~Member() = default;

  std::shared_ptr<const rpc::TlsHolder> holder() const { return holder_; }
  const rpc::TlsName& name() const { return identity_.view.name; }

  // From now on renews at two thirds of the certificate's life; with a gate (an edge's) also
  // announces the node, again and again, and has the gate take the epoch that the cluster knows.
  void Start(EpochGate* gate);
  boost::asio::awaitable<void> Stop();
  // Now. For tests, and what Start does.
  runtime::Task<void> Renew(runtime::Deadline deadline);
  runtime::Task<void> Announce(runtime::Deadline deadline);

 private:
  Member(runtime::Executor home, MemberOptions options, Word word);
  runtime::Task<void> JoinNow(runtime::Deadline deadline);
  // One call to whichever apiserver answers first; one that cannot now (kUnavailable,
  // kDeadlineExceeded, kInternal) is no answer.
  runtime::Task<std::string> Ask(const char* method, std::string request,
                                 std::shared_ptr<const rpc::TlsContext> context, std::string pin,
                                 runtime::Deadline deadline);
  Result<void> Take(const ca::KeyAndRequest& made, const v1::JoinReply& reply);
  boost::asio::awaitable<void> Run();

  const runtime::Executor home_;
  const MemberOptions options_;
  const Word word_;
  ca::Identity identity_;
  std::shared_ptr<rpc::TlsHolder> holder_;
  EpochGate* gate_ = nullptr;
  size_t next_apiserver_ = 0;
  runtime::Running running_;
  runtime::Gate work_;
};

}  // namespace dsec::cluster
