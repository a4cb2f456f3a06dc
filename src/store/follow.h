// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/task.h"
#include "store/store.h"

namespace dsec::store {

// What has become of a range that is followed.
struct Update {
  bool whole = false;      // `set` is all that there is: whatever else was known is gone
  std::vector<Entry> set;  // without leases
  std::vector<std::string> removed;
  Revision revision = 0;  // of the store, as far as this goes
};

// Reads the range and watches it until it is cancelled. `apply` is called on the executor of this
// coroutine: first with everything, then with each change in order, again with everything when the
// store has forgotten changes, and with an empty update at least each second while the store
// answers. While it does not, it is asked each half second. `name` is for the log.
boost::asio::awaitable<void> Follow(Store& store, KeyRange range, std::string name,
                                    std::function<void(Update)> apply);

}  // namespace dsec::store
