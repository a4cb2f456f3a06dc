// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "dsec/v1/router.pb.h"
#include "iam/project.h"
#include "router/cluster_edge.h"
#include "runtime/gate.h"
#include "runtime/task.h"
#include "store/follow.h"

namespace dsec::router {

// A sandbox with this label belongs to the job of that name in its project, and ends with it...
inline constexpr std::string_view kJobLabel = "dsec.job";
// ...unless this one is "true".
inline constexpr std::string_view kKeepLabel = "dsec.keep";

// The lease by which a client holds its job.
struct JobLease {
  store::LeaseId lease = 0;
  std::chrono::milliseconds ttl{};
};

// Begins or takes over the job: it lives until the lease ends. `job` is a label's value of 1..63 of
// [A-Za-z0-9._-]. kInvalidArgument job.name, job.ttl (1 s..1 day), job.grace (up to 1 day);
// kConflict job.held: another lease holds it.
runtime::Task<JobLease> BeginJob(store::Store& store, iam::ProjectPath project, std::string job,
                                 v1::JobRecord record, std::chrono::milliseconds ttl,
                                 runtime::Deadline deadline);
// kGone job.ended when the lease has.
runtime::Task<void> RenewJob(store::Store& store, store::LeaseId lease, runtime::Deadline deadline);
// The client is done: the grace begins now. Any number of times.
runtime::Task<void> EndJob(store::Store& store, store::LeaseId lease, runtime::Deadline deadline);

// The states of nodes that an operator sets; the apiserver asks for the right to. Errors:
// kNotFound node.unknown; kConflict node.dead; kConflict node.raced after many tries.
runtime::Task<v1::NodeRecord> Cordon(store::Store& store, std::string node,
                                     runtime::Deadline deadline);
runtime::Task<v1::NodeRecord> Uncordon(store::Store& store, std::string node,
                                       runtime::Deadline deadline);
// Takes nothing new, and what is left `time` from now is ended with cause drained.
runtime::Task<v1::NodeRecord> Drain(store::Store& store, std::string node,
                                    std::chrono::milliseconds time, std::string who,
                                    const Clock& clock, runtime::Deadline deadline);

struct ReaperOptions {
  std::chrono::milliseconds look{1'000};
  const Clock* clock = &Clock::System();
  metrics::Registry* metrics = &metrics::Registry::Global();
};

// Ends what jobs have left and what drains come to. One in every apiserver: each does all of it,
// which does no harm, and each may die at any moment. A grace is counted here, from when the job
// was first seen without its lease: an apiserver that starts anew gives it in full again.
class Reaper {
 public:
  // All of them must outlive it.
  Reaper(store::Store& store, runtime::Executor executor, ClusterEdge& edge, ReaperOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~Reaper();
  void Start();
  runtime::Task<void> Stop();

 private:
  struct Job {
    v1::JobRecord record;
    store::Revision version = 0;
    bool free = false;  // nobody holds it
    MonoTime free_since{};
    bool ending = false;
  };
  struct Draining {
    v1::DrainRecord record;
    store::Revision version = 0;
    bool ending = false;
  };
  void OnJobs(const store::Update& update);
  void OnHolds(const store::Update& update);
  void OnDrains(const store::Update& update);
  boost::asio::awaitable<void> Run();
  void Look();
  boost::asio::awaitable<void> FinishJob(std::string name);
  boost::asio::awaitable<void> FinishDrain(std::string node);
  // Ends all that the list shows (of that project, if one is named); true when nothing was left and
  // every node has answered.
  runtime::Task<bool> EndAll(v1::ListRequestAll request, std::string node, std::string cause,
                             std::optional<std::string> project);
  runtime::Task<bool> EndPage(const v1::ListPage& page, const std::string& cause,
                              const std::optional<std::string>& project);

  store::Store& store_;
  const runtime::Executor executor_;
  ClusterEdge& edge_;
  const ReaperOptions options_;
  metrics::Counter& ended_;

  // On executor_ alone.
  bool holds_known_ = false;
  std::map<std::string, Job> jobs_;  // by <project>/<job> as in the key
  std::map<std::string, bool> holds_;
  std::map<std::string, Draining> drains_;  // by node
  runtime::Gate gate_;
  std::vector<runtime::Running> running_;
};

}  // namespace dsec::router
