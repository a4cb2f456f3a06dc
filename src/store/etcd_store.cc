// SPDX-License-Identifier: Apache-2.0
#include "store/etcd_store.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <span>
#include <utility>

#include "base/rng.h"
#include "http/client.h"
#include "runtime/shards.h"
#include "store/etcd_json.h"
#include "store/rules.h"

namespace dsec::store {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kMaxReply = 64 << 20;
// A watch without news is begun anew after this: its connection may have died without a word.
constexpr seconds kWatchIdle{30};
// A watch answers with so much at a time, and then up to the end of the transaction.
constexpr size_t kMaxChanges = 1000;
constexpr size_t kMaxChangeBytes = 8 << 20;

enum class Resend {
  kSafe,       // the call may be made twice
  kIfNotSent,  // only when it surely was not made
};

bool MayGoElsewhere(const Error& error, Resend resend) {
  if (error.reason() == "client.unreachable") return true;
  return resend == Resend::kSafe &&
         (error.code() == Code::kUnavailable || error.reason() == "client.timeout");
}

// What a caller of the store sees.
Error AsStoreError(Error error, const Deadline& deadline) {
  if (error.reason() == "client.timeout" && deadline.Expired()) return error;
  if (!error.reason().starts_with("client.")) return error;
  return Error(Code::kUnavailable, "store.unavailable", error.message());
}

LeaseId NewLeaseId() {
  uint8_t bytes[8];
  SecureRandom(std::span(bytes));
  uint64_t id = 0;
  for (const uint8_t byte : bytes) id = id << 8 | byte;
  id &= INT64_MAX;  // etcd's are signed
  return id == 0 ? 1 : id;
}

}  // namespace

// Lives on `executor`; every coroutine holds it.
struct EtcdStore::Impl {
  Impl(runtime::Executor on, EtcdOptions etcd_options)
      : executor(std::move(on)), options(std::move(etcd_options)) {}

  using Self = std::shared_ptr<Impl>;
  static Task<std::string> Call(Self self, const char* path, std::string body, Resend resend,
                                Deadline deadline);
  static Task<std::string> CallOne(Self self, size_t member, const char* path, std::string body,
                                   Deadline deadline);
  static Task<Page> Range(Self self, KeyRange range, uint32_t limit, Deadline deadline);
  static Task<LeaseId> Grant(Self self, seconds ttl, Deadline deadline);
  static Task<Changes> Watch(Self self, KeyRange range, Revision after, Deadline deadline);
  static Task<Changes> WatchOne(Self self, size_t member, KeyRange range, Revision after,
                                Deadline deadline);

  Deadline Patience(Deadline deadline) const {
    return clients.size() == 1 ? deadline : deadline.Sooner(Deadline::After(options.patience));
  }
  // After a failure of `member`.
  void LookElsewhere(size_t member) {
    if (current == member) current = (member + 1) % clients.size();
  }
  std::string Whole(const std::string& key) const { return options.prefix + key; }
  KeyRange Whole(const KeyRange& range) const {
    return {options.prefix + range.begin, options.prefix + range.end};
  }

  const runtime::Executor executor;
  const EtcdOptions options;
  std::vector<std::unique_ptr<http::Client>> clients;
  size_t current = 0;
};

Result<std::unique_ptr<EtcdStore>> EtcdStore::Open(runtime::Executor executor,
                                                   EtcdOptions options) {
  if (options.endpoints.empty()) {
    return Error(Code::kInvalidArgument, "store.endpoints", "a store needs at least one endpoint");
  }
  auto impl = std::make_shared<Impl>(std::move(executor), std::move(options));
  for (const std::string& endpoint : impl->options.endpoints) {
    http::ClientOptions client;
    client.endpoint = endpoint;
    // A call to a member that is cut off from the majority fails at once.
    client.headers = {{"Content-Type", "application/json"}, {"Grpc-Metadata-Hasleader", "true"}};
    DSEC_TRY(auto made, http::Client::Create(impl->executor, std::move(client)));
    impl->clients.push_back(std::move(made));
  }
  return std::unique_ptr<EtcdStore>(new EtcdStore(std::move(impl)));
}

EtcdStore::EtcdStore(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

EtcdStore::~EtcdStore() {
  // Its connections end on their shard.
  boost::asio::post(impl_->executor, [impl = impl_] {});
}

// --- one call ---

Task<std::string> EtcdStore::Impl::CallOne(Self self, size_t member, const char* path,
                                           std::string body, Deadline deadline) {
  http::ClientRequest request{"POST", path};
  request.body = std::move(body);
  auto reply = co_await self->clients[member]->Call(std::move(request), deadline, kMaxReply);
  if (!reply.ok()) co_return std::move(reply).error();
  if (reply->status != 200) co_return etcd::ErrorOf(reply->status, reply->body);
  co_return std::move(reply->body);
}

Task<std::string> EtcdStore::Impl::Call(Self self, const char* path, std::string body,
                                        Resend resend, Deadline deadline) {
  for (size_t tries = 1;; ++tries) {
    const size_t member = self->current;
    auto reply = co_await CallOne(self, member, path, body, self->Patience(deadline));
    if (reply.ok()) co_return reply;
    const Error& error = reply.error();
    if (error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded)
      self->LookElsewhere(member);
    if (tries >= self->clients.size() || deadline.Expired() || !MayGoElsewhere(error, resend))
      co_return AsStoreError(error, deadline);
  }
}

// --- keys ---

Task<std::optional<Entry>> EtcdStore::Get(std::string key, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckKey(key));
  const std::shared_ptr<Impl> impl = impl_;
  DSEC_CO_TRY(const std::string text,
              co_await runtime::On(impl->executor,
                                   Impl::Call(impl, "/v3/kv/range", etcd::GetBody(impl->Whole(key)),
                                              Resend::kSafe, deadline)));
  DSEC_CO_TRY(Page page, etcd::ParsePage(text));
  if (page.entries.empty()) co_return std::optional<Entry>();
  Entry entry = std::move(page.entries.front());
  entry.key = std::move(key);
  co_return std::optional(std::move(entry));
}

// Halves the page for as long as it is more than an answer may hold.
Task<Page> EtcdStore::Impl::Range(Self self, KeyRange range, uint32_t limit, Deadline deadline) {
  for (;; limit /= 2) {
    auto text = co_await Call(self, "/v3/kv/range", etcd::RangeBody(self->Whole(range), limit),
                              Resend::kSafe, deadline);
    if (text.ok()) co_return etcd::ParsePage(*text);
    // The gateway refuses what its own client does (4 MiB), as etcd's quota does.
    const Code code = text.error().code();
    const bool large = code == Code::kPayloadTooLarge || code == Code::kResourceExhausted;
    if (!large || limit == 1) co_return std::move(text).error();
  }
}

Task<Page> EtcdStore::Range(KeyRange range, uint32_t limit, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckPage(limit));
  const std::shared_ptr<Impl> impl = impl_;
  DSEC_CO_TRY(Page page, co_await runtime::On(
                             impl->executor, Impl::Range(impl, std::move(range), limit, deadline)));
  for (Entry& entry : page.entries) entry.key.erase(0, impl->options.prefix.size());
  co_return page;
}

Task<Revision> EtcdStore::Commit(std::vector<Condition> conditions, std::vector<Write> writes,
                                 Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckCommit(conditions, writes));
  const std::shared_ptr<Impl> impl = impl_;
  LeaseId lease = 0;
  for (Condition& condition : conditions) condition.key = impl->Whole(condition.key);
  for (Write& write : writes) {
    write.key = impl->Whole(write.key);
    if (write.lease != 0) lease = write.lease;
  }
  auto text = co_await runtime::On(
      impl->executor, Impl::Call(impl, "/v3/kv/txn", etcd::CommitBody(conditions, writes),
                                 Resend::kIfNotSent, deadline));
  if (!text.ok() && text.error().reason() == "store.lease") co_return NoLease(lease);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(const etcd::CommitReply reply, etcd::ParseCommit(*text, conditions.size()));
  if (reply.done) co_return reply.revision;
  for (size_t i = 0; i < conditions.size(); ++i) {
    if (reply.found[i] == conditions[i].version) continue;
    co_return WrongVersion(conditions[i].key.substr(impl->options.prefix.size()), reply.found[i],
                           conditions[i].version);
  }
  co_return Error(Code::kInternal, "store.protocol",
                  "etcd refused a transaction whose conditions hold");
}

// --- leases ---

// The id is ours, so that to ask twice is not to get two.
Task<LeaseId> EtcdStore::Impl::Grant(Self self, seconds ttl, Deadline deadline) {
  const LeaseId lease = NewLeaseId();
  auto granted =
      co_await Call(self, "/v3/lease/grant", etcd::GrantBody(lease, ttl), Resend::kSafe, deadline);
  if (!granted.ok() && granted.error().code() != Code::kAlreadyExists)
    co_return std::move(granted).error();
  co_return lease;
}

Task<LeaseId> EtcdStore::Grant(milliseconds ttl, Deadline deadline) {
  DSEC_CO_TRY_VOID(CheckTtl(ttl));
  const std::shared_ptr<Impl> impl = impl_;
  co_return co_await runtime::On(impl->executor,
                                 Impl::Grant(impl, std::chrono::ceil<seconds>(ttl), deadline));
}

Task<void> EtcdStore::KeepAlive(LeaseId lease, Deadline deadline) {
  const std::shared_ptr<Impl> impl = impl_;
  auto text = co_await runtime::On(
      impl->executor,
      Impl::Call(impl, "/v3/lease/keepalive", etcd::LeaseBody(lease), Resend::kSafe, deadline));
  if (!text.ok()) {
    co_return text.error().reason() == "store.lease" ? NoLease(lease) : std::move(text).error();
  }
  DSEC_CO_TRY(const int64_t left, etcd::ParseKeepAlive(*text));
  if (left <= 0) co_return NoLease(lease);
  co_return Ok();
}

Task<void> EtcdStore::Revoke(LeaseId lease, Deadline deadline) {
  const std::shared_ptr<Impl> impl = impl_;
  auto text = co_await runtime::On(
      impl->executor,
      Impl::Call(impl, "/v3/lease/revoke", etcd::LeaseBody(lease), Resend::kIfNotSent, deadline));
  if (text.ok()) co_return Ok();
  if (text.error().reason() == "store.lease") co_return NoLease(lease);
  co_return std::move(text).error();
}

// --- watch ---

namespace {

// Takes the changes of a watch's lines until they are enough.
struct Collector {
  Changes found;
  size_t bytes = 0;

  void Take(std::vector<Change> changes, size_t prefix) {
    for (Change& change : changes) {
      change.key.erase(0, prefix);
      bytes += change.key.size() + (change.value.has_value() ? change.value->size() : 0);
      found.changes.push_back(std::move(change));
    }
  }
  bool Full() const { return found.changes.size() >= kMaxChanges || bytes >= kMaxChangeBytes; }
  // After a line that may end within a transaction: whether what was before it can be answered.
  bool CutBeforeLast() {
    const Revision last = found.changes.back().revision;
    if (found.changes.front().revision == last) return false;
    while (found.changes.back().revision == last) found.changes.pop_back();
    return true;
  }
  Changes Done() {
    found.next = found.changes.back().revision;
    return std::move(found);
  }
};

}  // namespace

Task<Changes> EtcdStore::Impl::WatchOne(Self self, size_t member, KeyRange range, Revision after,
                                        Deadline deadline) {
  http::ClientRequest request{"POST", "/v3/watch"};
  request.body = etcd::WatchBody(self->Whole(range), after + 1);
  // Its first line comes at once.
  Deadline until = deadline.Sooner(Deadline::After(self->options.patience));
  DSEC_CO_TRY(const auto stream, co_await self->clients[member]->Open(std::move(request), until));
  if (stream->head().status != 200) {
    DSEC_CO_TRY(const std::string text, co_await stream->Read(4096, until));
    co_return etcd::ErrorOf(stream->head().status, text);
  }
  Collector collector;
  for (;;) {
    DSEC_CO_TRY(const std::optional<std::string> text, co_await stream->ReadLine(until));
    if (!text.has_value()) {
      co_return Error(Code::kUnavailable, "store.unavailable", "etcd ended the watch");
    }
    DSEC_CO_TRY(etcd::WatchLine line, etcd::ParseWatchLine(*text));
    if (line.error.has_value()) co_return *std::move(line.error);
    if (line.cancelled && line.compacted != 0) {
      co_return Error(Code::kGone, "store.compacted",
                      fmt::format("changes before revision {} are forgotten, those after {} were "
                                  "asked for",
                                  line.compacted, after));
    }
    if (line.cancelled) {
      co_return Error(Code::kUnavailable, "store.unavailable", "etcd cancelled the watch");
    }
    collector.Take(std::move(line.changes), self->options.prefix.size());
    if (collector.found.changes.empty()) {
      until = deadline.Sooner(Deadline::After(kWatchIdle));
      continue;
    }
    if (!line.fragment) co_return collector.Done();
    if (collector.Full() && collector.CutBeforeLast()) co_return collector.Done();
  }
}

Task<Changes> EtcdStore::Impl::Watch(Self self, KeyRange range, Revision after, Deadline deadline) {
  for (size_t failures = 0;;) {
    const size_t member = self->current;
    const MonoTime begun = std::chrono::steady_clock::now();
    auto changes = co_await WatchOne(self, member, range, after, deadline);
    if (changes.ok()) co_return changes;
    const Error& error = changes.error();
    const bool silent = error.reason() == "client.timeout";
    if (silent && deadline.Expired()) co_return Changes{{}, after};
    if (silent && std::chrono::steady_clock::now() - begun >= kWatchIdle) continue;
    if (!MayGoElsewhere(error, Resend::kSafe)) co_return AsStoreError(error, deadline);
    self->LookElsewhere(member);
    if (++failures >= self->clients.size()) co_return AsStoreError(error, deadline);
  }
}

Task<Changes> EtcdStore::Watch(KeyRange range, Revision after, Deadline deadline) {
  const std::shared_ptr<Impl> impl = impl_;
  co_return co_await runtime::On(impl->executor,
                                 Impl::Watch(impl, std::move(range), after, deadline));
}

}  // namespace dsec::store
