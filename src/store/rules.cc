// SPDX-License-Identifier: Apache-2.0
#include "store/rules.h"

#include <set>
#include <string_view>

namespace dsec::store {
namespace {

Error TooLarge(std::string message) {
  return Error(Code::kInvalidArgument, "store.too_large", std::move(message));
}

}  // namespace

Result<void> CheckKey(const std::string& key) {
  if (key.empty() || key.size() > kMaxKey) {
    return TooLarge(fmt::format("a key has 1..{} bytes, not {}", kMaxKey, key.size()));
  }
  return Ok();
}

Result<void> CheckCommit(const std::vector<Condition>& conditions,
                         const std::vector<Write>& writes) {
  if (conditions.size() > kMaxBatch || writes.size() > kMaxBatch) {
    return TooLarge(
        fmt::format("a transaction has at most {} conditions and {} writes", kMaxBatch, kMaxBatch));
  }
  for (const Condition& condition : conditions) DSEC_TRY_VOID(CheckKey(condition.key));
  std::set<std::string_view> keys;
  size_t bytes = 0;
  for (const Write& write : writes) {
    DSEC_TRY_VOID(CheckKey(write.key));
    const size_t size = write.value.has_value() ? write.value->size() : 0;
    if (size > kMaxValue) {
      return TooLarge(fmt::format("a value has at most {} bytes, not {}", kMaxValue, size));
    }
    bytes += write.key.size() + size;
    if (!keys.insert(write.key).second) {
      return Error(Code::kInvalidArgument, "store.duplicate",
                   "a key is written twice in one transaction");
    }
  }
  if (bytes > kMaxCommit) {
    return TooLarge(fmt::format("keys and values of a transaction have at most {} bytes, not {}",
                                kMaxCommit, bytes));
  }
  return Ok();
}

Result<void> CheckPage(uint32_t limit) {
  if (limit == 0 || limit > kMaxPage) {
    return TooLarge(fmt::format("a page has 1..{} entries, not {}", kMaxPage, limit));
  }
  return Ok();
}

Result<void> CheckTtl(std::chrono::milliseconds ttl) {
  if (ttl < kMinTtl || ttl > kMaxTtl) {
    return Error(Code::kInvalidArgument, "store.ttl",
                 fmt::format("a lease has {}..{} ms, not {}", kMinTtl.count(), kMaxTtl.count(),
                             ttl.count()));
  }
  return Ok();
}

Error NoLease(LeaseId lease) {
  return Error(Code::kNotFound, "store.lease",
               fmt::format("lease {} has ended or never was", lease));
}

Error WrongVersion(const std::string& key, Revision found, Revision expected) {
  return Error(Code::kConflict, "store.version",
               fmt::format("key \"{}\" is at version {}, not {}", key, found, expected));
}

// --- what all implementations share of the interface ---

KeyRange KeyRange::Prefix(std::string prefix) {
  std::string end = prefix;
  while (!end.empty() && static_cast<unsigned char>(end.back()) == 0xff) end.pop_back();
  if (end.empty()) return {std::move(prefix), std::string(kMaxKey + 1, '\xff')};
  end.back() = static_cast<char>(static_cast<unsigned char>(end.back()) + 1);
  return {std::move(prefix), std::move(end)};
}

runtime::Task<Revision> Store::Put(std::string key, std::string value,
                                   std::optional<Revision> expected, LeaseId lease,
                                   runtime::Deadline deadline) {
  std::vector<Condition> conditions;
  if (expected.has_value()) conditions.push_back({key, *expected});
  std::vector<Write> writes;
  writes.push_back({std::move(key), std::move(value), lease});
  return Commit(std::move(conditions), std::move(writes), deadline);
}

}  // namespace dsec::store
