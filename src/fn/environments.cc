// SPDX-License-Identifier: Apache-2.0
#include "fn/environments.h"

namespace dsec::fn {

runtime::Task<v1::FnEnvironment> Environments::Resolve(v1::FnEnvironment environment,
                                                       runtime::Deadline deadline) {
  const std::string key = environment.SerializeAsString();
  while (true) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) break;
    const std::shared_ptr<Entry> entry = found->second;
    if (entry->answer) {
      if (clock_.Mono() < entry->until) co_return *entry->answer;
      entries_.erase(found);
      break;
    }
    // Another call has asked. When it gives up, one of those who wait asks.
    DSEC_CO_TRY_VOID(co_await entry->answered.Wait(deadline));
    if (entry->answer) co_return *entry->answer;
  }
  // What is old goes before there is more.
  if (entries_.size() >= kMaxEntries) {
    std::erase_if(entries_, [&](const auto& item) {
      return item.second->answer && clock_.Mono() >= item.second->until;
    });
  }
  auto entry = std::make_shared<Entry>();
  entries_[key] = entry;
  struct Asking {
    ~Asking() {
      // Errors are not kept: what is missing may be there by the next call.
      const bool keep = entry->answer && entry->answer->ok();
      const auto mine = entries.find(key);
      if (!keep && mine != entries.end() && mine->second == entry) entries.erase(mine);
      entry->answered.Set();
    }
    std::map<std::string, std::shared_ptr<Entry>>& entries;
    const std::string& key;
    const std::shared_ptr<Entry>& entry;
  };
  const Asking asking{entries_, key, entry};
  auto resolved = co_await backend_.Resolve(std::move(environment), deadline);
  const bool given_up = !resolved.ok() && (resolved.error().code() == Code::kCancelled ||
                                           resolved.error().code() == Code::kDeadlineExceeded);
  if (!given_up) entry->answer = resolved;
  entry->until = clock_.Mono() + age_;
  co_return resolved;
}

}  // namespace dsec::fn
