// SPDX-License-Identifier: Apache-2.0
#include "iam/directory.h"

#include "base/id.h"
#include "base/log.h"
#include "iam/layout.h"

namespace dsec::iam {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr uint32_t kPage = 1000;
constexpr auto kStoreTime = std::chrono::seconds(10);
constexpr auto kRetry = std::chrono::milliseconds(500);

Deadline Soon() { return Deadline::After(kStoreTime); }

}  // namespace

Directory::Directory(store::Store& store, runtime::Executor executor, DirectoryOptions options)
    : store_(store),
      executor_(std::move(executor)),
      options_(options),
      builder_(std::make_unique<runtime::BlockingPool>("iam", 1, 16)) {}

Directory::~Directory() = default;

Task<std::unique_ptr<Directory>> Directory::Open(store::Store& store, runtime::Executor executor,
                                                 DirectoryOptions options) {
  std::unique_ptr<Directory> made(new Directory(store, executor, options));
  Directory* const raw = made.get();
  auto rooted = co_await runtime::On(executor, raw->EnsureRoot());
  if (!rooted.ok()) co_return std::move(rooted).error();
  auto loaded = co_await runtime::On(executor, raw->Load());
  if (!loaded.ok()) co_return std::move(loaded).error();
  made->follower_ = runtime::SpawnCancellable(made->gate_, executor, raw->Follow());
  co_return std::move(made);
}

Task<void> Directory::Stop() {
  follower_.Cancel();
  co_await gate_.Close();
  co_return Ok();
}

Task<void> Directory::EnsureRoot() {
  const ProjectPath root;
  v1::IamProject project;
  project.set_uid(NewUlid(*options_.clock));
  project.set_created_unix_ms(NowMs());
  project.set_created_by(std::string(kRootPrincipal));
  v1::IamLedger ledger;
  ledger.set_project_uid(project.uid());
  std::vector<store::Condition> conditions = {{layout::Project(root), 0},
                                              {layout::Ledger(root), 0}};
  std::vector<store::Write> writes = {{layout::Project(root), project.SerializeAsString(), 0},
                                      {layout::Ledger(root), ledger.SerializeAsString(), 0}};
  auto made = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
  if (made.ok() || made.error().reason() == "store.version") co_return Ok();
  co_return std::move(made).error();
}

Task<void> Directory::Load() {
  Snapshot::Entries entries;
  std::optional<store::Revision> revision;
  store::KeyRange range = store::KeyRange::Prefix(std::string(layout::kConfig));
  for (bool more = true; more;) {
    auto page = co_await store_.Range(range, kPage, Soon());
    if (!page.ok()) co_return std::move(page).error();
    // What changes between two pages is told by the watch that begins at the first.
    if (!revision.has_value()) revision = page->revision;
    for (store::Entry& entry : page->entries) {
      range.begin = entry.key + '\0';
      entries[std::move(entry.key)] = {std::move(entry.value), entry.version};
    }
    more = page->more;
  }
  entries_ = std::move(entries);
  seen_ = *revision;
  loaded_ = true;
  auto published = co_await Publish();
  co_return published;
}

Task<void> Directory::Publish() {
  // Some milliseconds when there are many: not on a shard.
  auto copy = std::make_shared<const Snapshot::Entries>(entries_);
  auto build = [copy, revision = seen_]() -> Result<std::shared_ptr<const Snapshot>> {
    return Snapshot::Build(*copy, revision);
  };
  auto built = co_await builder_->Run(std::move(build), Deadline::Never());
  if (!built.ok()) co_return std::move(built).error();
  std::function<void()> changed;
  {
    std::lock_guard lock(mutex_);
    now_ = *std::move(built);
    heard_ = options_.clock->Mono();
    changed = changed_;
  }
  news_.Set();
  news_.Reset();
  if (changed) changed();
  co_return Ok();
}

Task<void> Directory::Watch() {
  auto range = store::KeyRange::Prefix(std::string(layout::kConfig));
  auto changes = co_await store_.Watch(range, seen_, Deadline::After(kPoll));
  if (!changes.ok()) co_return std::move(changes).error();
  for (store::Change& change : changes->changes) {
    if (change.value.has_value()) {
      entries_[change.key] = {*std::move(change.value), change.revision};
    } else {
      entries_.erase(change.key);
    }
  }
  seen_ = changes->next;
  if (changes->changes.empty()) {
    std::lock_guard lock(mutex_);
    heard_ = options_.clock->Mono();
    co_return Ok();
  }
  auto published = co_await Publish();
  co_return published;
}

boost::asio::awaitable<void> Directory::Follow() {
  bool away = false;
  while (true) {
    if (auto snapshot = Now(); snapshot != nullptr && !snapshot->leftovers().empty())
      co_await RemoveLeftovers(std::move(snapshot));
    auto step = loaded_ ? Watch() : Load();
    auto done = co_await std::move(step);
    if (done.ok()) {
      if (std::exchange(away, false)) log::Info("iam.store_back", {});
      continue;
    }
    if (done.error().code() == Code::kCancelled) co_return;
    if (done.error().reason() == "store.compacted") {
      loaded_ = false;
      continue;
    }
    if (!std::exchange(away, true)) log::Warn("iam.store_away", {{"error", done.error()}});
    auto slept = co_await runtime::SleepUntil(Deadline::After(kRetry));
    if (!slept.ok()) co_return;
  }
}

// A deleted principal's keys and grants count for nothing already; this only gives their space
// back. The condition keeps what was made again meanwhile.
boost::asio::awaitable<void> Directory::RemoveLeftovers(std::shared_ptr<const Snapshot> of) {
  for (const std::string& key : of->leftovers()) {
    const auto it = entries_.find(key);
    if (it == entries_.end()) continue;
    std::vector<store::Condition> conditions = {{key, it->second.version}};
    std::vector<store::Write> writes = {{key, std::nullopt, 0}};
    auto removed = co_await store_.Commit(std::move(conditions), std::move(writes), Soon());
    if (!removed.ok() && removed.error().reason() != "store.version") co_return;
  }
}

void Directory::OnChange(std::function<void()> changed) {
  std::lock_guard lock(mutex_);
  changed_ = std::move(changed);
}

std::shared_ptr<const Snapshot> Directory::Now() const {
  std::lock_guard lock(mutex_);
  return now_;
}

Result<void> Directory::Fresh() const {
  MonoTime heard;
  {
    std::lock_guard lock(mutex_);
    heard = heard_;
  }
  if (options_.clock->Mono() - heard <= options_.cache_max) return Ok();
  return Error(
      Code::kUnavailable, "iam.stale",
      fmt::format("the store has not answered for {} s: only the root key opens",
                  std::chrono::duration_cast<std::chrono::seconds>(options_.clock->Mono() - heard)
                      .count()));
}

Result<Caller> Directory::Authenticate(std::string_view key) const {
  DSEC_TRY(Caller caller, iam::Authenticate(Now(), options_.root_key, key, NowMs()));
  if (!caller.root()) DSEC_TRY_VOID(Fresh());
  return caller;
}

Result<void> Directory::StillGood(const Caller& caller) const {
  return iam::StillGood(*Now(), caller, NowMs());
}

Task<void> Directory::Reach(store::Revision revision, Deadline deadline) {
  if (Now()->revision() >= revision) return ReachHere(0, deadline);
  return runtime::On(executor_, ReachHere(revision, deadline));
}

Task<void> Directory::ReachHere(store::Revision revision, Deadline deadline) {
  while (Now()->revision() < revision) {
    auto waited = co_await news_.Wait(deadline);
    if (!waited.ok()) co_return std::move(waited).error();
  }
  co_return Ok();
}

}  // namespace dsec::iam
