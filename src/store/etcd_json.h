// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "store/store.h"

// The bodies of etcd's HTTP gateway (v3 API, etcd 3.4: bytes in base64, 64-bit numbers as strings,
// fields with their default value left out). Keys here are whole, the prefix of a store included.
// What does not parse is kInternal "store.protocol".
namespace dsec::store::etcd {

std::string GetBody(std::string_view key);
std::string RangeBody(const KeyRange& range, uint32_t limit);
// All writes if every condition holds, else the versions of the keys in the conditions.
std::string CommitBody(const std::vector<Condition>& conditions, const std::vector<Write>& writes);
std::string GrantBody(LeaseId lease, std::chrono::seconds ttl);
std::string LeaseBody(LeaseId lease);  // of keepalive and revoke
// Changes from `first` on; long answers come in fragments.
std::string WatchBody(const KeyRange& range, Revision first);

Result<Page> ParsePage(std::string_view text);

struct CommitReply {
  bool done = false;
  Revision revision = 0;
  std::vector<Revision> found;  // when not done: version of each condition's key, 0: none
};
Result<CommitReply> ParseCommit(std::string_view text, size_t conditions);

// The seconds that the lease has left; 0: it has ended.
Result<int64_t> ParseKeepAlive(std::string_view text);

// One line of a watch.
struct WatchLine {
  std::vector<Change> changes;
  bool fragment = false;            // the transaction at the end may go on in the next line
  bool cancelled = false;           // by the server
  Revision compacted = 0;           // with `cancelled`: changes before it are forgotten
  std::optional<Error> error = {};  // in place of all else
};
Result<WatchLine> ParseWatchLine(std::string_view text);

// What an answer with an error status means.
Error ErrorOf(int status, std::string_view text);

}  // namespace dsec::store::etcd
