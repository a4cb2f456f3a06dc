// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "edge/sandbox.h"

namespace dsec::edge {

// The sandboxes that have not ended, by id, request and name. A request_id or name of one project
// is no concern of another. Thread-safe.
class Registry {
 public:
  // Null when there is none.
  std::shared_ptr<Sandbox> Find(std::string_view id) const;
  // `key` is the RequestKey of the request.
  std::shared_ptr<Sandbox> FindRequest(std::string_view key) const;
  // Takes `sandbox` in and returns it, or returns the one that has its request_id. kAlreadyExists
  // sandbox.name_in_use / sandbox.id_in_use.
  Result<std::shared_ptr<Sandbox>> Enter(std::shared_ptr<Sandbox> sandbox);
  // Its create has failed: a repeat of the request makes a new one.
  void FreeRequest(const Sandbox& sandbox);
  // The caller holds a reference.
  void Remove(const Sandbox& sandbox);
  // In order of id, after `after`, at most `limit`.
  std::vector<std::shared_ptr<Sandbox>> After(std::string_view after, size_t limit) const;
  std::vector<std::shared_ptr<Sandbox>> All() const { return After("", SIZE_MAX); }
  size_t size() const;
  // For the end of the process: lets go of all.
  void Clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Sandbox>, std::less<>> by_id_;
  std::map<std::string, std::shared_ptr<Sandbox>, std::less<>> by_request_;
  std::map<std::string, std::shared_ptr<Sandbox>, std::less<>> by_name_;
};

}  // namespace dsec::edge
