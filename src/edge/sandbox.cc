// SPDX-License-Identifier: Apache-2.0
#include "edge/sandbox.h"

#include <algorithm>

namespace dsec::edge {

v1::SandboxRecord Sandbox::View() const {
  v1::SandboxRecord view = *record();
  view.set_last_activity_unix_ms(std::max<int64_t>(
      view.last_activity_unix_ms(), last_activity_ms_.load(std::memory_order_relaxed)));
  return view;
}

v1::Event Sandbox::NewEvent(std::string_view type, int64_t now_ms) {
  v1::Event event;
  event.set_sandbox_id(id_);
  event.set_at_unix_ms(now_ms);
  event.set_type(std::string(type));
  Change([&](v1::SandboxRecord& record) {
    event.set_seq(std::max<uint64_t>(record.next_event_seq(), 1));
    record.set_next_event_seq(event.seq() + 1);
    record.set_last_activity_unix_ms(std::max<int64_t>(
        record.last_activity_unix_ms(), last_activity_ms_.load(std::memory_order_relaxed)));
    event.set_state(record.state());
  });
  return event;
}

}  // namespace dsec::edge
