// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/result.h"
#include "sandbox/fn_backend.h"

namespace dsec::sandbox {

// The working folder of a call, in the root of its cell.
inline constexpr char kWorkFolder[] = "work";

// Files of a call as the daemon writes and reads them. Both blocking; nothing of the call may run
// meanwhile. Paths are resolved inside the root: no link is followed, no mount is entered.
class CallFiles {
 public:
  // `root` and `upper` are borrowed; `owner` is the host id of the call's user.
  CallFiles(int root, int upper, uint32_t owner) : root_(root), upper_(upper), owner_(owner) {}

  // Code and files of the run. kResourceExhausted "fn.files_too_large" when the writable layer is
  // too small for them.
  Result<void> Write(const FnRun& run);
  // What run.fetch names; what is not there, not a regular file or beyond run.fetch_bytes goes to
  // `missing`.
  void Fetch(const FnRun& run, FnReport& report) const;

 private:
  struct Found;
  Result<void> WriteOne(const std::string& path, std::string_view content, uint32_t mode);
  bool FetchOne(int dir, const std::string& path, const std::string& name, Found& found) const;
  void FetchBelow(int dir, const std::string& prefix, bool changed_only, int depth,
                  Found& found) const;

  const int root_;
  const int upper_;
  const uint32_t owner_;
  // Inode and time of the last change of what was written, which nothing inside can set.
  std::map<std::string, std::pair<uint64_t, int64_t>> written_;
};

}  // namespace dsec::sandbox
