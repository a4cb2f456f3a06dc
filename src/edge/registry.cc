// SPDX-License-Identifier: Apache-2.0
#include "edge/registry.h"

#include <utility>

#include "edge/record_store.h"

namespace dsec::edge {
namespace {

template <typename Map>
std::shared_ptr<Sandbox> FindIn(const Map& map, std::string_view key) {
  const auto it = map.find(key);
  return it == map.end() ? nullptr : it->second;
}

// The key may have gone to another since.
template <typename Map>
void EraseIf(Map& map, const std::string& key, const Sandbox& holder) {
  const auto it = map.find(key);
  if (it != map.end() && it->second.get() == &holder) map.erase(it);
}

}  // namespace

std::shared_ptr<Sandbox> Registry::Find(std::string_view id) const {
  std::lock_guard lock(mutex_);
  return FindIn(by_id_, id);
}

std::shared_ptr<Sandbox> Registry::FindRequest(std::string_view key) const {
  std::lock_guard lock(mutex_);
  return FindIn(by_request_, key);
}

Result<std::shared_ptr<Sandbox>> Registry::Enter(std::shared_ptr<Sandbox> sandbox) {
  const auto record = sandbox->record();
  std::lock_guard lock(mutex_);
  const bool holds_request = HoldsRequest(*record);
  const std::string request = RequestKey(record->project(), record->request_id());
  if (auto holder = holds_request ? FindIn(by_request_, request) : nullptr) return holder;
  if (by_id_.contains(record->id())) {
    return Error(Code::kAlreadyExists, "sandbox.id_in_use", fmt::format("{} is live", record->id()))
        .WithField("sandbox_id");
  }
  const std::string& name = record->spec().name();
  const std::string name_key = RequestKey(record->project(), name);
  if (const auto holder = name.empty() ? nullptr : FindIn(by_name_, name_key)) {
    return Error(Code::kAlreadyExists, "sandbox.name_in_use",
                 fmt::format("the live sandbox {} is named \"{}\"", holder->id(), name))
        .WithField("name");
  }
  by_id_.emplace(record->id(), sandbox);
  if (holds_request) by_request_.emplace(request, sandbox);
  if (!name.empty()) by_name_.emplace(name_key, sandbox);
  return sandbox;
}

void Registry::FreeRequest(const Sandbox& sandbox) {
  const auto record = sandbox.record();
  std::lock_guard lock(mutex_);
  EraseIf(by_request_, RequestKey(record->project(), record->request_id()), sandbox);
}

void Registry::Remove(const Sandbox& sandbox) {
  const auto record = sandbox.record();
  std::lock_guard lock(mutex_);
  EraseIf(by_request_, RequestKey(record->project(), record->request_id()), sandbox);
  EraseIf(by_name_, RequestKey(record->project(), record->spec().name()), sandbox);
  EraseIf(by_id_, record->id(), sandbox);
}

std::vector<std::shared_ptr<Sandbox>> Registry::After(std::string_view after, size_t limit) const {
  std::vector<std::shared_ptr<Sandbox>> found;
  std::lock_guard lock(mutex_);
  for (auto it = by_id_.upper_bound(after); it != by_id_.end() && found.size() < limit; ++it) {
    found.push_back(it->second);
  }
  return found;
}

size_t Registry::size() const {
  std::lock_guard lock(mutex_);
  return by_id_.size();
}

void Registry::Clear() {
  decltype(by_id_) held;
  std::lock_guard lock(mutex_);
  held.swap(by_id_);
  by_request_.clear();
  by_name_.clear();
}

}  // namespace dsec::edge
