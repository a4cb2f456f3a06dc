// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "dsec/v1/fncall.pb.h"
#include "runtime/async_event.h"

namespace dsec::fn {

// What a compile step gave: its report and, after FN_OK, the files for the run step. A file has its
// content, or the digest under which the artefact store may still have it.
struct Compiled {
  v1::FnStep step;
  std::vector<v1::FnFile> files;
  std::string message;  // why a command that ended well is an error all the same
};

// One compile under way; equal ones wait for it. It has an outcome, or a fault of the platform that
// all who wait share, or neither when it was given up: the next one then begins it anew.
struct CompileFlight {
  runtime::AsyncEvent done;
  std::shared_ptr<const Compiled> outcome;
  std::optional<Error> fault;
  bool retriable = false;
};

// Outcomes of compile steps by the digest of all that decides them, least recently used first out;
// bounded in number and in the bytes of their reports. The files lie in the artefact store. One
// shard.
class CompileCache {
 public:
  CompileCache(size_t max_entries, uint64_t max_bytes)
      : max_entries_(max_entries), max_bytes_(max_bytes) {}

  // Null when it is not there.
  std::shared_ptr<const Compiled> Find(const std::string& key);
  // `compiled` has digests in place of contents.
  void Put(const std::string& key, std::shared_ptr<const Compiled> compiled);
  void Drop(const std::string& key);

  // The one under way, null if none is.
  std::shared_ptr<CompileFlight> Flight(const std::string& key) const;
  std::shared_ptr<CompileFlight> Begin(const std::string& key);
  // Wakes who waits and forgets it.
  void End(const std::string& key, const std::shared_ptr<CompileFlight>& flight);

  size_t size() const { return entries_.size(); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const Compiled> compiled;
    uint64_t bytes;
  };

  const size_t max_entries_;
  const uint64_t max_bytes_;
  std::list<Entry> entries_;  // least recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  std::unordered_map<std::string, std::shared_ptr<CompileFlight>> flights_;
  uint64_t bytes_ = 0;
};

}  // namespace dsec::fn
