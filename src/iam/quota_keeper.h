// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "iam/amounts.h"
#include "iam/project.h"
#include "runtime/gate.h"
#include "runtime/periodic.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::iam {

struct QuotaOptions {
  std::string node_id;
  // Limits of a project and all above it, as far as is known; nullopt: nothing is known.
  std::function<std::optional<Limits>(const ProjectPath&)> limits;
  // Something came back; any thread.
  std::function<void()> freed;
  std::chrono::milliseconds period{1'000};      // of giving back what is idle
  std::chrono::milliseconds idle_after{2'000};  // since the last use
  const Clock* clock = &Clock::System();
};

struct QuotaState;
struct QuotaAccount;

// What the sandboxes of one node take of their projects' quotas: charges in memory, within slices
// that the ledgers of the store have granted to this node (docs/design/iam.md, section 5).
// Sandboxes that live are the only thing that is counted, so a node that is killed counts them
// again and is right. Thread-safe.
class QuotaKeeper {
 public:
  // What one sandbox takes, given back on destruction. May outlive the keeper. Move only.
  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept = default;
    Charge& operator=(Charge&& other) noexcept;
    ~Charge() { Release(); }
    // Its creation is over.
    void Settle();
    void Release();
    explicit operator bool() const { return account_ != nullptr; }

   private:
    friend class QuotaKeeper;
    void GiveBack(const Amounts& amounts);
    std::shared_ptr<QuotaState> state_;
    std::shared_ptr<QuotaAccount> account_;
    Amounts amounts_;
  };

  // `executor` runs what talks to the store. `store` must outlive it.
  QuotaKeeper(store::Store& store, runtime::Executor executor, QuotaOptions options);
  // Stop must have returned, or the shards must have been stopped.
  ~QuotaKeeper();
  runtime::Task<void> Stop();

  // Takes from the slice, asking the store for more when that is used up. kResourceExhausted
  // quota.<resource> names project, limit and use; kNotFound iam.project_not_found; kUnavailable
  // quota.store: the slice is used up and the store does not answer.
  runtime::Task<Charge> Reserve(ProjectPath project, Amounts amounts, runtime::Deadline deadline);
  // From the slice alone; else what was refused last, and the store is asked in the background,
  // after which `freed` is called if that has brought anything.
  Result<Charge> TryReserve(const ProjectPath& project, const Amounts& amounts);
  // Of a sandbox that is there already, whatever the quota is.
  Charge Readmit(const ProjectPath& project, const Amounts& amounts);

  // Brings the slices of the store in line with what is here: after all Readmit, at the start. An
  // error is tried again each period.
  runtime::Task<void> Restore();
  // Gives back what no sandbox of the project, and of those below it, uses.
  runtime::Task<void> Trim(ProjectPath project);
  // What is idle under limits that have changed goes back now.
  void LimitsChanged();

  // Used here, and held here, by the project and all below it.
  Amounts Used(const ProjectPath& project) const;
  Amounts Held(const ProjectPath& project) const;

 private:
  using AccountPtr = std::shared_ptr<QuotaAccount>;
  struct Chain;
  class Wish;
  class Turn;

  AccountPtr AccountOf(const ProjectPath& project);
  Result<Charge> Take(const AccountPtr& account, const Amounts& amounts);
  // Whether what is wished for is there, under the limits there are.
  bool Enough(const QuotaAccount& account, const Amounts& need, uint64_t starts,
              const std::optional<Limits>& limits) const;
  runtime::Task<Chain> ReadChain(const AccountPtr& account, runtime::Deadline deadline);
  runtime::Task<void> Refill(AccountPtr account, Amounts unit, runtime::Deadline deadline);
  runtime::Task<bool> RefillOnce(AccountPtr account, Amounts unit, runtime::Deadline deadline);
  runtime::Task<void> Exact(AccountPtr account);
  runtime::Task<bool> ExactOnce(AccountPtr account);
  runtime::Task<void> Pause();
  boost::asio::awaitable<void> Background(AccountPtr account, Amounts unit);
  boost::asio::awaitable<void> Tick();
  boost::asio::awaitable<void> TrimChanged();
  runtime::Task<void> RestoreHere();
  runtime::Task<void> TrimHere(ProjectPath project);
  std::vector<AccountPtr> Accounts() const;
  std::optional<Limits> LimitsOf(const ProjectPath& project) const;
  int64_t Second() const;

  store::Store& store_;
  const runtime::Executor executor_;
  const QuotaOptions options_;
  const std::shared_ptr<QuotaState> state_;
  Rng rng_ = Rng::FromSystem();  // on executor_
  bool restored_ = true;         // on executor_; false: a Restore has failed
  runtime::Gate gate_;
  std::unique_ptr<runtime::Periodic> periodic_;
};

// Gives back all slices of a node that will not come back, after it was declared dead. Safe to
// repeat. kConflict store.version: `only_if` does not hold any more, and what was left is left.
runtime::Task<void> ReturnSlices(store::Store& store, std::string node_id,
                                 std::vector<store::Condition> only_if = {});

}  // namespace dsec::iam
