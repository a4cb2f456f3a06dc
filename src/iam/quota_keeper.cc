// SPDX-License-Identifier: Apache-2.0
#include "iam/quota_keeper.h"

#include <algorithm>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "dsec/v1/iam.pb.h"
#include "iam/layout.h"
#include "runtime/shards.h"

namespace dsec::iam {

using runtime::Deadline;
using runtime::Task;

namespace {

constexpr uint64_t kAhead = 64;  // sandboxes of the size that is asked for
constexpr uint64_t kStartsAhead = 64;
constexpr int kMaxConflicts = 64;
constexpr int kMaxTurns = 8;  // of one Reserve: others took what it had got
constexpr auto kStoreTime = std::chrono::seconds(5);
constexpr uint32_t kPage = 1000;

Deadline Soon() { return Deadline::After(kStoreTime); }

Amounts Times(const Amounts& unit, uint64_t count) {
  Amounts out;
  for (size_t i = 0; i < kResourceCount; ++i)
    out.of[i] = std::min(unit.of[i], kMaxAmount / count) * count;
  return out;
}

Error StoreAway(const Error& error) {
  return Error(Code::kUnavailable, "quota.store",
               fmt::format("the slice of the quota is used up and the store does not answer: {}",
                           error.message()));
}

Error NoProject(const ProjectPath& project) {
  return Error(Code::kNotFound, "iam.project_not_found",
               fmt::format("project: there is no project {}", project.str()))
      .WithField("project");
}

template <typename Message>
Result<Message> ParseEntry(const store::Entry& entry) {
  Message message;
  if (message.ParseFromString(entry.value)) return message;
  return Error(Code::kInternal, "iam.damaged", fmt::format("{} does not parse", entry.key));
}

}  // namespace

struct QuotaAccount {
  explicit QuotaAccount(ProjectPath of) : project(std::move(of)) {}
  const ProjectPath project;

  // Under QuotaState::mutex.
  Amounts granted;  // rises only by a commit that succeeded
  Amounts used;
  Amounts wanted;  // by those who wait for a refill
  uint64_t wanted_starts = 0;
  int64_t second = 0;   // that `starts` belongs to
  uint64_t starts = 0;  // left of it
  std::optional<Error> refusal;
  MonoTime touched{};
  bool asking = false;           // Background is under way
  std::optional<Limits> limits;  // when it was looked at last

  // On the keeper's executor.
  bool busy = false;
  // A commit's outcome is not known: it may still come. The next one, which makes it fail, is
  // written even if it changes nothing.
  bool unsure = false;
  runtime::AsyncEvent free;
};

struct QuotaState {
  mutable std::mutex mutex;
  std::map<ProjectPath, std::shared_ptr<QuotaAccount>> accounts;
  std::function<void()> freed;
  bool closed = false;

  void Freed() {
    std::function<void()> call;
    {
      std::lock_guard lock(mutex);
      if (!closed) call = freed;
    }
    if (call) call();
  }
};

// The ledgers of a path as they were read, from the project up, and the slice.
struct QuotaKeeper::Chain {
  struct Read {
    std::string key;
    v1::IamLedger ledger;
    store::Revision version = 0;
  };
  std::vector<Read> ledgers;
  std::string slice_key;
  Amounts slice;
  store::Revision slice_version = 0;

  // The transaction that gives the slice and adds the difference to each ledger.
  void Plan(const Amounts& slice_after, const Amounts& used, int64_t now_ms,
            std::vector<store::Condition>& conditions, std::vector<store::Write>& writes) {
    for (Read& read : ledgers) {
      const Amounts granted = Amounts::Of(read.ledger.granted()) - slice + slice_after;
      granted.Into(*read.ledger.mutable_granted());
      conditions.push_back({read.key, read.version});
      writes.push_back({read.key, read.ledger.SerializeAsString(), 0});
    }
    conditions.push_back({slice_key, slice_version});
    v1::IamSlice message;
    slice_after.Into(*message.mutable_granted());
    used.Into(*message.mutable_used());
    message.set_at_unix_ms(now_ms);
    writes.push_back({slice_key,
                      slice_after.zero() ? std::nullopt
                                         : std::optional<std::string>(message.SerializeAsString()),
                      0});
  }
};

// What somebody waits for, in the sum of the account while it exists.
class QuotaKeeper::Wish {
 public:
  Wish(std::shared_ptr<QuotaState> state, AccountPtr account, const Amounts& amounts)
      : state_(std::move(state)), account_(std::move(account)), amounts_(amounts) {
    std::lock_guard lock(state_->mutex);
    account_->wanted = account_->wanted + amounts_;
    ++account_->wanted_starts;
  }
  Wish(const Wish&) = delete;
  Wish& operator=(const Wish&) = delete;
  ~Wish() {
    std::lock_guard lock(state_->mutex);
    account_->wanted = account_->wanted - amounts_;
    --account_->wanted_starts;
  }

 private:
  const std::shared_ptr<QuotaState> state_;
  const AccountPtr account_;
  const Amounts amounts_;
};

// The right to write an account's slice, one at a time.
class QuotaKeeper::Turn {
 public:
  explicit Turn(AccountPtr account) : account_(std::move(account)) { account_->busy = true; }
  Turn(Turn&&) = default;
  Turn& operator=(Turn&&) = delete;
  ~Turn() {
    if (account_ == nullptr) return;
    account_->busy = false;
    account_->free.Set();
    account_->free.Reset();
  }
  static Task<Turn> Take(AccountPtr account, Deadline deadline) {
    while (account->busy) {
      auto waited = co_await account->free.Wait(deadline);
      if (!waited.ok()) co_return std::move(waited).error();
    }
    co_return Turn(account);
  }

 private:
  AccountPtr account_;
};

// --- charges ---

QuotaKeeper::Charge& QuotaKeeper::Charge::operator=(Charge&& other) noexcept {
  if (this != &other) {
    Release();
    state_ = std::move(other.state_);
    account_ = std::move(other.account_);
    amounts_ = other.amounts_;
  }
  return *this;
}

void QuotaKeeper::Charge::GiveBack(const Amounts& amounts) {
  {
    std::lock_guard lock(state_->mutex);
    account_->used = account_->used - amounts;
  }
  state_->Freed();
}

void QuotaKeeper::Charge::Settle() {
  if (account_ == nullptr || amounts_[Resource::kCreating] == 0) return;
  Amounts creating;
  std::swap(creating[Resource::kCreating], amounts_[Resource::kCreating]);
  GiveBack(creating);
}

void QuotaKeeper::Charge::Release() {
  if (account_ == nullptr) return;
  GiveBack(amounts_);
  account_ = nullptr;
  state_ = nullptr;
}

// --- the keeper ---

QuotaKeeper::QuotaKeeper(store::Store& store, runtime::Executor executor, QuotaOptions options)
    : store_(store),
      executor_(std::move(executor)),
      options_(std::move(options)),
      state_(std::make_shared<QuotaState>()) {
  state_->freed = options_.freed;
  periodic_ = std::make_unique<runtime::Periodic>(executor_, "iam.quota", options_.period,
                                                  [this] { return Tick(); });
}

QuotaKeeper::~QuotaKeeper() {
  std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->accounts.clear();
}

Task<void> QuotaKeeper::Stop() {
  co_await periodic_->Join();
  co_await gate_.Close();
  co_return Ok();
}

int64_t QuotaKeeper::Second() const { return UnixMillis(options_.clock->Wall()) / 1000; }

std::optional<Limits> QuotaKeeper::LimitsOf(const ProjectPath& project) const {
  return options_.limits ? options_.limits(project) : std::nullopt;
}

QuotaKeeper::AccountPtr QuotaKeeper::AccountOf(const ProjectPath& project) {
  std::lock_guard lock(state_->mutex);
  AccountPtr& account = state_->accounts[project];
  if (account == nullptr) account = std::make_shared<QuotaAccount>(project);
  return account;
}

std::vector<QuotaKeeper::AccountPtr> QuotaKeeper::Accounts() const {
  std::vector<AccountPtr> all;
  std::lock_guard lock(state_->mutex);
  for (const auto& [project, account] : state_->accounts) all.push_back(account);
  return all;
}

bool QuotaKeeper::Enough(const QuotaAccount& account, const Amounts& need, uint64_t starts,
                         const std::optional<Limits>& limits) const {
  for (size_t i = 0; i < kResourceCount; ++i) {
    // What nothing limits is written down afterwards.
    if (limits.has_value() && !limits->of[i].has_value()) continue;
    if (need.of[i] > account.granted.of[i]) return false;
  }
  if (!limits.has_value() || !limits->starts_per_second.has_value()) return true;
  return account.second == Second() && account.starts >= starts;
}

Result<QuotaKeeper::Charge> QuotaKeeper::Take(const AccountPtr& account, const Amounts& amounts) {
  const auto limits = LimitsOf(account->project);
  std::lock_guard lock(state_->mutex);
  if (!Enough(*account, account->used + amounts, 1, limits)) {
    return account->refusal.value_or(
        Error(Code::kResourceExhausted, "quota.wait",
              fmt::format("the quota of {} is being asked for", account->project.str())));
  }
  account->used = account->used + amounts;
  if (limits.has_value() && limits->starts_per_second.has_value()) --account->starts;
  account->refusal.reset();
  account->touched = options_.clock->Mono();
  Charge charge;
  charge.state_ = state_;
  charge.account_ = account;
  charge.amounts_ = amounts;
  return charge;
}

Task<QuotaKeeper::Charge> QuotaKeeper::Reserve(ProjectPath project, Amounts amounts,
                                               Deadline deadline) {
  const AccountPtr account = AccountOf(project);
  auto taken = Take(account, amounts);
  for (int turn = 0; !taken.ok() && turn < kMaxTurns; ++turn) {
    const Wish wish(state_, account, amounts);
    auto refilled = co_await runtime::On(executor_, Refill(account, amounts, deadline));
    if (!refilled.ok()) co_return std::move(refilled).error();
    taken = Take(account, amounts);
    if (!taken.ok() && taken.error().reason() != "quota.wait") break;
  }
  co_return taken;
}

Result<QuotaKeeper::Charge> QuotaKeeper::TryReserve(const ProjectPath& project,
                                                    const Amounts& amounts) {
  const AccountPtr account = AccountOf(project);
  auto taken = Take(account, amounts);
  if (taken.ok()) return taken;
  {
    std::lock_guard lock(state_->mutex);
    if (account->asking) return taken;
    account->asking = true;
  }
  if (!runtime::Spawn(gate_, executor_, Background(account, amounts))) {
    std::lock_guard lock(state_->mutex);
    account->asking = false;
  }
  return taken;
}

boost::asio::awaitable<void> QuotaKeeper::Background(AccountPtr account, Amounts unit) {
  Amounts before;
  {
    std::lock_guard lock(state_->mutex);
    before = account->granted;
  }
  {
    const Wish wish(state_, account, unit);
    (void)co_await Refill(account, unit, Soon());
  }
  bool more = false;
  {
    std::lock_guard lock(state_->mutex);
    account->asking = false;
    more = !account->granted.Within(before) || account->starts > 0;
  }
  if (more) state_->Freed();
}

QuotaKeeper::Charge QuotaKeeper::Readmit(const ProjectPath& project, const Amounts& amounts) {
  Charge charge;
  charge.state_ = state_;
  charge.account_ = AccountOf(project);
  charge.amounts_ = amounts;
  std::lock_guard lock(state_->mutex);
  charge.account_->used = charge.account_->used + amounts;
  return charge;
}

Amounts QuotaKeeper::Used(const ProjectPath& project) const {
  Amounts sum;
  std::lock_guard lock(state_->mutex);
  for (const auto& [path, account] : state_->accounts) {
    if (path.Within(project)) sum = sum + account->used;
  }
  return sum;
}

Amounts QuotaKeeper::Held(const ProjectPath& project) const {
  Amounts sum;
  std::lock_guard lock(state_->mutex);
  for (const auto& [path, account] : state_->accounts) {
    if (path.Within(project)) sum = sum + account->granted;
  }
  return sum;
}

// --- what talks to the store, on executor_ ---

Task<QuotaKeeper::Chain> QuotaKeeper::ReadChain(const AccountPtr& account, Deadline deadline) {
  Chain chain;
  for (const ProjectPath& path : account->project.Chain()) {
    auto entry = co_await store_.Get(layout::Ledger(path), deadline);
    if (!entry.ok()) co_return std::move(entry).error();
    if (!entry->has_value()) co_return NoProject(account->project);
    DSEC_CO_TRY(auto ledger, ParseEntry<v1::IamLedger>(**entry));
    chain.ledgers.push_back({(*entry)->key, std::move(ledger), (*entry)->version});
  }
  chain.slice_key = layout::Slice(options_.node_id, account->project);
  auto entry = co_await store_.Get(chain.slice_key, deadline);
  if (!entry.ok()) co_return std::move(entry).error();
  if (entry->has_value()) {
    DSEC_CO_TRY(const auto slice, ParseEntry<v1::IamSlice>(**entry));
    chain.slice = Amounts::Of(slice.granted());
    chain.slice_version = (*entry)->version;
  }
  co_return chain;
}

// Between two tries of a transaction that another node was ahead of.
Task<void> QuotaKeeper::Pause() {
  const auto wait = std::chrono::microseconds(500 + rng_.Below(8'000));
  return runtime::SleepUntil(Deadline::After(wait));
}

Task<void> QuotaKeeper::Refill(AccountPtr account, Amounts unit, Deadline deadline) {
  const Deadline by = deadline.Sooner(Soon());
  auto turn = co_await Turn::Take(account, by);
  if (!turn.ok()) co_return std::move(turn).error();
  for (int i = 0; i < kMaxConflicts; ++i) {
    auto done = co_await RefillOnce(account, unit, by);
    if (done.ok() && *done) co_return Ok();
    if (!done.ok()) {
      const Code code = done.error().code();
      const bool away = code == Code::kUnavailable || code == Code::kDeadlineExceeded;
      co_return away ? StoreAway(done.error()) : std::move(done).error();
    }
    auto paused = co_await Pause();
    if (!paused.ok()) co_return paused;
  }
  co_return Error(
      Code::kUnavailable, "quota.contended",
      fmt::format("too many nodes ask for the quota of {} at once", account->project.str()));
}

// False: another node was ahead.
Task<bool> QuotaKeeper::RefillOnce(AccountPtr account, Amounts unit, Deadline deadline) {
  const auto limits = LimitsOf(account->project);
  {
    // Whoever had the turn before may have brought enough for all.
    std::lock_guard lock(state_->mutex);
    if (Enough(*account, account->used + account->wanted, account->wanted_starts, limits))
      co_return true;
  }
  auto chain = co_await ReadChain(account, deadline);
  if (!chain.ok()) co_return std::move(chain).error();
  const int64_t now = Second();
  std::vector<LedgerState> ledgers;
  for (Chain::Read& read : chain->ledgers) {
    // A clock that is behind does not open a second again.
    if (read.ledger.second() < now) {
      read.ledger.set_second(now);
      read.ledger.set_starts(0);
    }
    ledgers.push_back({Limits::Of(read.ledger.limits()), Amounts::Of(read.ledger.granted()),
                       read.ledger.starts()});
  }
  const bool counts_starts = std::any_of(
      ledgers.begin(), ledgers.end(),
      [](const LedgerState& ledger) { return ledger.limits.starts_per_second.has_value(); });
  RefillWish wish;
  Amounts used;
  {
    std::lock_guard lock(state_->mutex);
    used = account->used;
    wish.missing = used + account->wanted - chain->slice;
    wish.ahead = Times(unit, kAhead) - (chain->slice - used);
    const uint64_t starts = account->second == now ? account->starts : 0;
    if (counts_starts && account->wanted_starts > starts) {
      wish.starts = account->wanted_starts - starts;
      wish.starts_ahead = kStartsAhead;
    }
  }
  const RefillGrant grant = Grantable(ledgers, wish);
  for (Chain::Read& read : chain->ledgers)
    read.ledger.set_starts(read.ledger.starts() + grant.starts);
  const Amounts after = chain->slice + grant.amounts;
  std::vector<store::Condition> conditions;
  std::vector<store::Write> writes;
  chain->Plan(after, used, UnixMillis(options_.clock->Wall()), conditions, writes);
  DSEC_CO_FAULT_POINT("iam.refill.before_commit");
  auto committed = co_await store_.Commit(std::move(conditions), std::move(writes), deadline);
  if (!committed.ok() && committed.error().reason() == "store.version") co_return false;
  account->unsure = !committed.ok();
  if (!committed.ok()) co_return std::move(committed).error();
  DSEC_CO_FAULT_POINT("iam.refill.after_commit");
  std::lock_guard lock(state_->mutex);
  account->granted = after;
  if (counts_starts) {
    account->starts = (account->second == now ? account->starts : 0) + grant.starts;
    account->second = now;
  }
  account->refusal.reset();
  if (grant.short_of.has_value()) {
    const auto& it = *grant.short_of;
    const std::string ledger = chain->ledgers[it.ledger].key.substr(layout::kLedgers.size());
    const auto path = ProjectPath::FromKey(ledger);
    const std::string name = path.ok() ? path->str() : ledger;
    account->refusal =
        it.resource.has_value()
            ? Error(Code::kResourceExhausted, QuotaReason(*it.resource),
                    fmt::format("{} of {}: {} of {} are in use or promised",
                                ResourceName(*it.resource), name, it.in_use, it.limit))
            : Error(Code::kResourceExhausted, "quota.starts_per_second",
                    fmt::format("starts_per_second of {}: {} of {} are used up", name, it.in_use,
                                it.limit));
  }
  co_return true;
}

Task<void> QuotaKeeper::Exact(AccountPtr account) {
  auto turn = co_await Turn::Take(account, Soon());
  if (!turn.ok()) co_return std::move(turn).error();
  for (int i = 0; i < kMaxConflicts; ++i) {
    auto done = co_await ExactOnce(account);
    if (!done.ok()) co_return std::move(done).error();
    if (*done) co_return Ok();
    auto paused = co_await Pause();
    if (!paused.ok()) co_return paused;
  }
  co_return Error(Code::kUnavailable, "quota.contended", "too many nodes at once");
}

// Makes the slice what is used, also above a limit. False: another node was ahead.
Task<bool> QuotaKeeper::ExactOnce(AccountPtr account) {
  Amounts used;
  {
    // First here: from now on nothing is taken that is about to go back.
    std::lock_guard lock(state_->mutex);
    used = account->used;
    account->granted = account->granted.Min(used);
  }
  auto chain = co_await ReadChain(account, Soon());
  if (!chain.ok() && chain.error().reason() == "iam.project_not_found") co_return true;
  if (!chain.ok()) co_return std::move(chain).error();
  if (chain->slice == used && !account->unsure) {
    std::lock_guard lock(state_->mutex);
    account->granted = used;
    co_return true;
  }
  std::vector<store::Condition> conditions;
  std::vector<store::Write> writes;
  chain->Plan(used, used, UnixMillis(options_.clock->Wall()), conditions, writes);
  DSEC_CO_FAULT_POINT("iam.trim.before_commit");
  auto committed = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
  if (!committed.ok() && committed.error().reason() == "store.version") co_return false;
  account->unsure = !committed.ok();
  if (!committed.ok()) co_return std::move(committed).error();
  std::lock_guard lock(state_->mutex);
  account->granted = used;
  co_return true;
}

boost::asio::awaitable<void> QuotaKeeper::Tick() {
  if (!restored_) (void)co_await RestoreHere();
  const MonoTime idle = options_.clock->Mono() - options_.idle_after;
  for (const AccountPtr& account : Accounts()) {
    const auto limits = LimitsOf(account->project);
    bool due = false;
    {
      std::lock_guard lock(state_->mutex);
      // What nothing limits was not asked for when it was taken.
      const bool unlimited = limits.has_value() && limits->none();
      due = account->granted != account->used && (unlimited || account->touched <= idle);
      if (!due && account->used.zero() && account->granted.zero()) {
        // Ours, and that of `Accounts`.
        const auto it = state_->accounts.find(account->project);
        if (it != state_->accounts.end() && account.use_count() == 2) state_->accounts.erase(it);
      }
    }
    if (!due) continue;
    auto done = co_await Exact(account);
    if (!done.ok() && done.error().code() != Code::kCancelled) {
      log::Warn("iam.slice_not_written",
                {{"project", account->project.str()}, {"error", done.error()}});
      co_return;  // the others would fare no better
    }
  }
}

void QuotaKeeper::LimitsChanged() { (void)runtime::Spawn(gate_, executor_, TrimChanged()); }

boost::asio::awaitable<void> QuotaKeeper::TrimChanged() {
  for (const AccountPtr& account : Accounts()) {
    const auto limits = LimitsOf(account->project);
    {
      std::lock_guard lock(state_->mutex);
      if (std::exchange(account->limits, limits) == limits) continue;
    }
    auto done = co_await Exact(account);
    if (!done.ok())
      log::Warn("iam.slice_not_written",
                {{"project", account->project.str()}, {"error", done.error()}});
  }
}

Task<void> QuotaKeeper::Restore() { return runtime::On(executor_, RestoreHere()); }

Task<void> QuotaKeeper::RestoreHere() {
  restored_ = false;
  const std::string prefix = layout::NodeSlices(options_.node_id);
  auto range = store::KeyRange::Prefix(prefix);
  for (bool more = true; more;) {
    auto page = co_await store_.Range(range, kPage, Soon());
    if (!page.ok()) co_return std::move(page).error();
    for (const store::Entry& entry : page->entries) {
      range.begin = entry.key + '\0';
      auto path = ProjectPath::FromKey(std::string_view(entry.key).substr(prefix.size()));
      if (path.ok()) (void)AccountOf(*path);
    }
    more = page->more;
  }
  for (const AccountPtr& account : Accounts()) {
    auto done = co_await Exact(account);
    if (!done.ok()) co_return done;
  }
  restored_ = true;
  co_return Ok();
}

Task<void> QuotaKeeper::Trim(ProjectPath project) {
  return runtime::On(executor_, TrimHere(std::move(project)));
}

Task<void> QuotaKeeper::TrimHere(ProjectPath project) {
  for (const AccountPtr& account : Accounts()) {
    if (!account->project.Within(project)) continue;
    auto done = co_await Exact(account);
    if (!done.ok()) co_return done;
  }
  co_return Ok();
}

// --- a node that is gone ---

Task<void> ReturnSlices(store::Store& store, std::string node_id,
                        std::vector<store::Condition> only_if) {
  const std::string prefix = layout::NodeSlices(node_id);
  while (true) {
    auto page = co_await store.Range(store::KeyRange::Prefix(prefix), 1, Soon());
    if (!page.ok()) co_return std::move(page).error();
    if (page->entries.empty()) co_return Ok();
    const store::Entry& entry = page->entries.front();
    std::vector<store::Condition> conditions = only_if;
    conditions.push_back({entry.key, entry.version});
    std::vector<store::Write> writes = {{entry.key, std::nullopt, 0}};
    DSEC_CO_TRY(const auto slice, ParseEntry<v1::IamSlice>(entry));
    DSEC_CO_TRY(const auto project,
                ProjectPath::FromKey(std::string_view(entry.key).substr(prefix.size())));
    for (const ProjectPath& path : project.Chain()) {
      auto read = co_await store.Get(layout::Ledger(path), Soon());
      if (!read.ok()) co_return std::move(read).error();
      if (!read->has_value()) continue;
      DSEC_CO_TRY(auto ledger, ParseEntry<v1::IamLedger>(**read));
      const Amounts rest = Amounts::Of(ledger.granted()) - Amounts::Of(slice.granted());
      rest.Into(*ledger.mutable_granted());
      conditions.push_back({(*read)->key, (*read)->version});
      writes.push_back({(*read)->key, ledger.SerializeAsString(), 0});
    }
    auto done = co_await store.Commit(std::move(conditions), std::move(writes), Soon());
    if (done.ok()) continue;
    if (done.error().reason() != "store.version") co_return std::move(done).error();
    for (const store::Condition& condition : only_if) {
      auto read = co_await store.Get(condition.key, Soon());
      if (!read.ok()) co_return std::move(read).error();
      if ((read->has_value() ? (*read)->version : 0) != condition.version)
        co_return std::move(done).error();
    }
  }
}

}  // namespace dsec::iam
