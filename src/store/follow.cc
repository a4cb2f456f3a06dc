// SPDX-License-Identifier: Apache-2.0
#include "store/follow.h"

#include <map>
#include <optional>
#include <utility>

#include "base/log.h"
#include "runtime/async_event.h"

namespace dsec::store {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr uint32_t kPage = 1000;
constexpr auto kStoreTime = std::chrono::seconds(10);
constexpr auto kPoll = std::chrono::milliseconds(1'000);
constexpr auto kRetry = std::chrono::milliseconds(500);

Task<Update> Load(Store& store, KeyRange range) {
  Update update;
  update.whole = true;
  bool first = true;
  for (bool more = true; more;) {
    auto page = co_await store.Range(range, kPage, Deadline::After(kStoreTime));
    if (!page.ok()) co_return std::move(page).error();
    // What changes between two pages is told by the watch that begins at the first.
    if (std::exchange(first, false)) update.revision = page->revision;
    for (Entry& entry : page->entries) {
      range.begin = entry.key + '\0';
      update.set.push_back(std::move(entry));
    }
    more = page->more;
  }
  co_return update;
}

Task<Update> Next(Store& store, KeyRange range, Revision after) {
  auto changes = co_await store.Watch(std::move(range), after, Deadline::After(kPoll));
  if (!changes.ok()) co_return std::move(changes).error();
  // Of each key the last word; a key that comes and goes again is only removed.
  std::map<std::string, Change> last;
  for (Change& change : changes->changes) last.insert_or_assign(change.key, change);
  Update update;
  update.revision = changes->next;
  for (auto& [key, change] : last) {
    if (change.value.has_value()) {
      update.set.push_back({key, *std::move(change.value), change.revision, 0});
    } else {
      update.removed.push_back(key);
    }
  }
  co_return update;
}

}  // namespace

boost::asio::awaitable<void> Follow(Store& store, KeyRange range, std::string name,
                                    std::function<void(Update)> apply) {
  std::optional<Revision> seen;
  bool away = false;
  while (true) {
    auto step = seen.has_value() ? Next(store, range, *seen) : Load(store, range);
    auto update = co_await std::move(step);
    if (update.ok()) {
      if (std::exchange(away, false)) log::Info("store.back", {{"what", name}});
      seen = update->revision;
      apply(*std::move(update));
      continue;
    }
    if (update.error().code() == Code::kCancelled) co_return;
    if (update.error().reason() == "store.compacted") {
      seen.reset();
      continue;
    }
    if (!std::exchange(away, true))
      log::Warn("store.away", {{"what", name}, {"error", update.error()}});
    auto slept = co_await runtime::SleepUntil(Deadline::After(kRetry));
    if (!slept.ok()) co_return;
  }
}

}  // namespace dsec::store
