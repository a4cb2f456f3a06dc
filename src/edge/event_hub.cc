// SPDX-License-Identifier: Apache-2.0
#include "edge/event_hub.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

namespace dsec::edge {

EventHub::Subscription::Subscription(EventHub& hub, std::string id, runtime::Executor executor)
    : hub_(hub), id_(std::move(id)), waiter_(std::make_shared<Waiter>(std::move(executor))) {
  std::lock_guard lock(hub_.mutex_);
  hub_.topics_[id_].push_back(waiter_);
}

EventHub::Subscription::~Subscription() {
  std::lock_guard lock(hub_.mutex_);
  const auto topic = hub_.topics_.find(id_);
  std::erase(topic->second, waiter_);
  if (topic->second.empty()) hub_.topics_.erase(topic);
}

runtime::Task<void> EventHub::Subscription::Wait(runtime::Deadline deadline) {
  const auto waiter = waiter_;
  auto woken = co_await waiter->news.Wait(deadline);
  if (woken.ok()) waiter->news.Reset();
  co_return woken;
}

void EventHub::Announce(std::string_view id) {
  std::lock_guard lock(mutex_);
  AnnounceLocked(std::string(id));
  if (!id.empty()) AnnounceLocked(std::string());
}

void EventHub::AnnounceLocked(const std::string& id) {
  const auto topic = topics_.find(id);
  if (topic == topics_.end()) return;
  for (const auto& waiter : topic->second) {
    boost::asio::post(waiter->executor, [waiter] { waiter->news.Set(); });
  }
}

}  // namespace dsec::edge
