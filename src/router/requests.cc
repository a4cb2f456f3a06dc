// SPDX-License-Identifier: Apache-2.0
#include "router/requests.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "runtime/shards.h"
#include "store/rules.h"

namespace dsec::router {

using runtime::Deadline;
using runtime::Task;

namespace {

constexpr auto kStoreTime = std::chrono::seconds(5);
constexpr auto kRetry = std::chrono::milliseconds(50);

Result<RequestState> Parse(const store::Entry& entry) {
  RequestState state;
  if (!state.record.ParseFromString(entry.value)) {
    return Error(Code::kInternal, "create.record_damaged",
                 fmt::format("{} has {} bytes that are none of it", entry.key, entry.value.size()));
  }
  state.version = entry.version;
  return state;
}

bool Same(const v1::RequestRecord& a, const v1::RequestRecord& b) {
  return a.sandbox_id() == b.sandbox_id() && a.ready() == b.ready() && a.deleted() == b.deleted() &&
         a.digest() == b.digest();
}

bool Unknown(const Error& error) {
  return error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded;
}

}  // namespace

std::string RequestKey(const iam::ProjectPath& project, std::string_view request_id) {
  return fmt::format("req/{}/{}", project.Key(), request_id);
}

struct Requests::Item {
  std::string key;
  std::optional<std::string> value;  // none: remove
  store::Revision expected = 0;
  // Its outcome: written at this revision, not (another version), or an error.
  std::optional<Result<store::Revision>> outcome;
  bool conflict = false;
  runtime::AsyncEvent done;

  void End(Result<store::Revision> result) {
    outcome.emplace(std::move(result));
    done.Set();
  }
};

Requests::Requests(store::Store& store, runtime::Executor executor, Options options)
    : store_(store),
      executor_(std::move(executor)),
      options_(options),
      transactions_(options.metrics->GetCounter("dsec_router_request_transactions_total",
                                                "Transactions with records of creates")),
      records_(options.metrics->GetCounter("dsec_router_request_records_total",
                                           "Records of creates written")),
      conflicts_(options.metrics->GetCounter(
          "dsec_router_request_conflicts_total",
          "Records of creates that somebody else had written before")) {}

Requests::~Requests() = default;

Task<void> Requests::Stop() {
  co_await gate_.Close();
  co_return Ok();
}

Task<Requests::Written> Requests::Write(std::string key, v1::RequestRecord record,
                                        store::Revision expected, Deadline deadline) {
  return runtime::On(executor_, WriteHere(std::move(key), std::move(record), expected, deadline));
}

Task<void> Requests::Forget(std::string key, store::Revision expected, Deadline deadline) {
  auto written =
      co_await runtime::On(executor_, WriteHere(std::move(key), std::nullopt, expected, deadline));
  if (!written.ok()) co_return std::move(written).error();
  co_return Ok();
}

Task<std::optional<RequestState>> Requests::Read(std::string key, Deadline deadline) {
  auto entry = co_await store_.Get(std::move(key), deadline);
  if (!entry.ok()) co_return std::move(entry).error();
  if (!entry->has_value()) co_return std::optional<RequestState>();
  DSEC_CO_TRY(auto state, Parse(**entry));
  co_return std::optional<RequestState>(std::move(state));
}

Task<Requests::Written> Requests::WriteHere(std::string key,
                                            std::optional<v1::RequestRecord> record,
                                            store::Revision expected, Deadline deadline) {
  runtime::GatePass pass(gate_);
  if (!pass) co_return Error(Code::kUnavailable, "edge.stopping", "this daemon is being stopped");
  if (waiting_ >= options_.max_waiting) {
    co_return Error(Code::kResourceExhausted, "create.too_many",
                    fmt::format("{} creates wait for the store", waiting_.load()));
  }
  ++waiting_;
  struct Leave {
    std::atomic<size_t>& count;
    ~Leave() { --count; }
  } leave{waiting_};
  const Deadline patience = Deadline::After(options_.patience);
  const auto away = [&key](const std::string& why) {
    return Error(Code::kUnavailable, "create.store_away",
                 fmt::format("{} cannot be put on record now: {}", key, why));
  };
  for (bool repeated = false;; repeated = true) {
    auto item = std::make_shared<Item>();
    item->key = key;
    if (record.has_value()) item->value = record->SerializeAsString();
    item->expected = expected;
    queue_.push_back(item);
    Flush();
    auto waited = co_await item->done.Wait(deadline.Sooner(patience));
    if (!waited.ok() && patience.Expired()) co_return away(waited.error().message());
    if (!waited.ok()) co_return std::move(waited).error();
    Result<store::Revision>& outcome = *item->outcome;
    Written written;
    if (outcome.ok() && !item->conflict) {
      written.written = true;
      if (record.has_value()) written.now = {*std::move(record), *outcome};
      co_return written;
    }
    if (!outcome.ok() && !Unknown(outcome.error())) co_return std::move(outcome).error();
    if (outcome.ok()) {
      conflicts_.Add();
      auto found = co_await Read(key, deadline);
      if (!found.ok()) co_return std::move(found).error();
      if (found->has_value()) written.now = **std::move(found);
      // The first try has arrived after all.
      written.written = repeated && record.has_value() && Same(written.now.record, *record);
      co_return written;
    }
    if (patience.Expired()) co_return away(outcome.error().message());
    if (deadline.Expired()) co_return std::move(outcome).error();
    auto slept = co_await runtime::SleepUntil(deadline.Sooner(Deadline::After(kRetry)));
    if (!slept.ok()) co_return std::move(slept).error();
  }
}

void Requests::Flush() {
  if (flush_due_ || queue_.empty() || committing_ >= options_.at_once) return;
  flush_due_ = runtime::Spawn(gate_, executor_, FlushSoon());
}

boost::asio::awaitable<void> Requests::FlushSoon() {
  if (queue_.size() < store::kMaxBatch)
    (void)co_await runtime::SleepUntil(Deadline::After(options_.window));
  flush_due_ = false;
  while (!queue_.empty() && committing_ < options_.at_once) {
    ++committing_;
    auto batch = TakeBatch();
    if (!runtime::Spawn(gate_, executor_, CommitBatch(batch))) {
      --committing_;
      for (const ItemPtr& item : batch)
        item->End(Error(Code::kCancelled, "task.cancelled", "this daemon is being stopped"));
    }
    if (queue_.size() < store::kMaxBatch) break;
  }
  Flush();
}

// In order of arrival, each key once: the second of a key waits for the outcome of the first.
std::vector<Requests::ItemPtr> Requests::TakeBatch() {
  std::vector<ItemPtr> batch;
  std::set<std::string_view> keys;
  std::deque<ItemPtr> left;
  size_t bytes = 0;
  while (!queue_.empty() && batch.size() < store::kMaxBatch && bytes < store::kMaxValue / 2) {
    ItemPtr item = std::move(queue_.front());
    queue_.pop_front();
    if (!keys.insert(item->key).second) {
      left.push_back(std::move(item));
      continue;
    }
    bytes += item->key.size() + (item->value ? item->value->size() : 0);
    batch.push_back(std::move(item));
  }
  queue_.insert(queue_.begin(), left.begin(), left.end());
  return batch;
}

boost::asio::awaitable<void> Requests::CommitBatch(std::vector<ItemPtr> batch) {
  auto lease = co_await Lease();
  if (lease.ok()) {
    co_await Commit(std::move(batch), *lease);
  } else {
    for (const ItemPtr& item : batch) item->End(lease.error());
  }
  --committing_;
  Flush();
}

// All of it or, when somebody else has written one of them, each half by itself.
boost::asio::awaitable<void> Requests::Commit(std::vector<ItemPtr> batch, store::LeaseId lease) {
  std::vector<store::Condition> conditions;
  std::vector<store::Write> writes;
  for (const ItemPtr& item : batch) {
    conditions.push_back({item->key, item->expected});
    writes.push_back({item->key, item->value, item->value ? lease : 0});
  }
  transactions_.Add();
  auto done =
      co_await store_.Commit(std::move(conditions), std::move(writes), Deadline::After(kStoreTime));
  if (done.ok()) {
    records_.Add(batch.size());
    for (const ItemPtr& item : batch) item->End(*done);
    co_return;
  }
  if (done.error().reason() == "store.lease") lease_ = 0;
  if (done.error().reason() != "store.version") {
    // A lease that has ended is taken anew, as if nothing were known.
    const Error error = done.error().reason() == "store.lease"
                            ? Error(Code::kUnavailable, "store.lease", done.error().message())
                            : done.error();
    for (const ItemPtr& item : batch) item->End(error);
    co_return;
  }
  if (batch.size() == 1) {
    batch[0]->conflict = true;
    batch[0]->End(store::Revision{0});
    co_return;
  }
  const auto middle = batch.begin() + static_cast<std::ptrdiff_t>(batch.size() / 2);
  std::vector<ItemPtr> first(batch.begin(), middle);
  std::vector<ItemPtr> second(middle, batch.end());
  co_await Commit(std::move(first), lease);
  co_await Commit(std::move(second), lease);
}

Task<store::LeaseId> Requests::Lease() {
  const MonoTime now = std::chrono::steady_clock::now();
  if (lease_ != 0 && now < lease_until_) co_return lease_;
  auto granted = co_await store_.Grant(options_.lease, Deadline::After(kStoreTime));
  if (!granted.ok()) {
    if (lease_ != 0) co_return lease_;  // an hour old at least, and good for most of a day
    co_return std::move(granted).error();
  }
  lease_ = *granted;
  lease_until_ = now + options_.renew;
  co_return lease_;
}

}  // namespace dsec::router
