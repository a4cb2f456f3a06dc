// SPDX-License-Identifier: Apache-2.0
#include "fn/compile_cache.h"

namespace dsec::fn {

std::shared_ptr<const Compiled> CompileCache::Find(const std::string& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.end(), entries_, found->second);
  return found->second->compiled;
}

void CompileCache::Put(const std::string& key, std::shared_ptr<const Compiled> compiled) {
  Drop(key);
  uint64_t bytes = key.size() + compiled->step.ByteSizeLong();
  for (const v1::FnFile& file : compiled->files) bytes += file.ByteSizeLong();
  if (bytes > max_bytes_) return;
  entries_.push_back({key, std::move(compiled), bytes});
  index_[key] = std::prev(entries_.end());
  bytes_ += bytes;
  while (entries_.size() > max_entries_ || bytes_ > max_bytes_) {
    const std::string oldest = entries_.front().key;
    Drop(oldest);
  }
}

void CompileCache::Drop(const std::string& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return;
  bytes_ -= found->second->bytes;
  entries_.erase(found->second);
  index_.erase(found);
}

std::shared_ptr<CompileFlight> CompileCache::Flight(const std::string& key) const {
  const auto found = flights_.find(key);
  return found == flights_.end() ? nullptr : found->second;
}

std::shared_ptr<CompileFlight> CompileCache::Begin(const std::string& key) {
  auto flight = std::make_shared<CompileFlight>();
  flights_[key] = flight;
  return flight;
}

void CompileCache::End(const std::string& key, const std::shared_ptr<CompileFlight>& flight) {
  const auto found = flights_.find(key);
  if (found != flights_.end() && found->second == flight) flights_.erase(found);
  flight->done.Set();
}

}  // namespace dsec::fn
