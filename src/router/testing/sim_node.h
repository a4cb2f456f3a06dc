// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/id.h"
#include "base/rng.h"
#include "edge/api.h"
#include "iam/quota_keeper.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

namespace dsec::router::testing {

// What one simulated node is like.
struct SimNodeOptions {
  std::string id;
  uint64_t capacity = 3'200;
  std::chrono::microseconds rtt{500};           // of a call to it and back
  std::chrono::milliseconds create_time{40};    // the work of one create
  std::chrono::milliseconds create_jitter{40};  // and up to that much more
  std::chrono::milliseconds claim_grace{60'000};
  uint64_t seed = 1;
  bool forgetful = false;  // does not know a request again: what the checks of a run must find
  // With a store: the node's real quota keeper, with these limits.
  store::Store* store = nullptr;
  std::function<std::optional<iam::Limits>(const iam::ProjectPath&)> limits;
};

// A node of a simulation: what EdgeApi promises of sandboxes without any sandbox in it. It lives on
// one executor, keeps the rule of epochs, and can be cut off, killed, and come back.
class SimNode {
 public:
  SimNode(SimNodeOptions options, runtime::Executor executor);
  ~SimNode();

  enum class Link { kUp, kHangs, kRefuses };
  // kHangs: calls get no answer until their deadline, those under way neither: a cut or a stopped
  // machine. kRefuses: they fail at once, as those to a daemon that is not there.
  void SetLink(Link link) { link_ = link; }
  Link link() const { return link_; }
  // The machine has lost everything; the next epoch begins with nothing.
  void LoseAll();
  // The next creates are refused so, one each.
  void RefuseNext(std::vector<Error> errors);
  // Does everything, but the answer is lost: the next `count` creates.
  void LoseAnswers(int count) { lose_answers_ = count; }
  // Puts sandboxes there that live already.
  void Preload(uint64_t count, const std::string& project);

  struct Sandbox {
    std::string id;
    std::string project;
    std::string request_key;
    std::string digest;
    std::string name;
    std::map<std::string, std::string> labels;
    v1::State state = v1::STATE_STARTING;
    std::string cause;  // once ended
    int64_t created_ms = 0;
    int64_t ended_ms = 0;
    int64_t claim_until_ms = 0;
    uint64_t events = 0;
    std::optional<Error> failed;
    bool done = false;
    bool delivered = false;  // somebody knows of it
    int joiners = 0;
    std::shared_ptr<runtime::AsyncEvent> change;  // while it is being made
    iam::QuotaKeeper::Charge charge;

    bool live() const { return ended_ms == 0; }
  };

  // For the checks of a test.
  const std::map<std::string, std::shared_ptr<Sandbox>>& sandboxes() const { return sandboxes_; }
  size_t live() const { return live_; }
  // Live ones that hold a charge of their project's quota.
  size_t charged() const;
  const std::string& id() const { return options_.id; }
  uint64_t epoch() const { return epoch_; }
  uint64_t creates() const { return creates_; }

  // The way to it for one that knows it under this epoch.
  std::shared_ptr<edge::EdgeApi> Way(uint64_t epoch);
  // Ends one of its own accord.
  void End(const std::string& id, const std::string& cause);

 private:
  friend class SimEdge;
  class SimClaim;
  // There and back, with what lies between.
  runtime::Task<void> Arrive(uint64_t epoch, runtime::Deadline deadline);
  runtime::Task<void> Return(runtime::Deadline deadline);
  runtime::Task<edge::Created> Create(v1::CreateRequest request, runtime::Deadline deadline);
  boost::asio::awaitable<void> Make(std::shared_ptr<Sandbox> sandbox);
  boost::asio::awaitable<void> EndUnclaimed(std::shared_ptr<Sandbox> sandbox);
  v1::SandboxRecord RecordOf(const Sandbox& sandbox) const;
  void Announce(const Sandbox& sandbox, const std::string& type);
  void EndOne(Sandbox& sandbox, const std::string& cause);
  static int64_t NowMs();

  const SimNodeOptions options_;
  const runtime::Executor executor_;
  Rng rng_;
  Link link_ = Link::kUp;
  uint64_t epoch_ = 1;
  std::map<std::string, std::shared_ptr<Sandbox>> sandboxes_;  // by id
  std::map<std::string, std::shared_ptr<Sandbox>> requests_;
  size_t live_ = 0;
  uint64_t creates_ = 0;
  int lose_answers_ = 0;
  std::deque<Error> refusals_;
  struct SimEvent {
    std::string sandbox_id;
    uint64_t seq = 0;
    int64_t at_ms = 0;
    std::string type;
    v1::State state = v1::STATE_UNSPECIFIED;
    std::string cause;
  };
  std::deque<SimEvent> events_;
  uint64_t first_event_ = 1;  // node_seq of events_.front()
  std::unique_ptr<iam::QuotaKeeper> quota_;
  runtime::Gate gate_;
};

}  // namespace dsec::router::testing
