// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/metrics.h"

namespace dsec::edge {

// The edge's metrics; docs/metrics.md says what each means. Thread-safe.
class EdgeMetrics {
 public:
  explicit EdgeMetrics(metrics::Registry& registry);

  metrics::Gauge& live;
  metrics::Gauge& stuck;
  metrics::Gauge& waiting_for_room;
  metrics::Gauge& waiting_for_turn;
  metrics::Gauge& followers;
  metrics::Histogram& create_seconds;
  metrics::Histogram& stop_seconds;
  metrics::Histogram& record_write_seconds;
  metrics::Counter& record_write_failures;
  metrics::Counter& execs;
  metrics::Counter& disconnect_kills;
  metrics::Counter& repairs;
  metrics::Counter& events;

  // By label; found anew at each call.
  metrics::Counter& Creates(std::string_view result);
  metrics::Counter& Refusals(std::string_view resource);
  metrics::Histogram& CreatePhase(std::string_view phase);
  metrics::Counter& Ends(std::string_view cause);
  metrics::Counter& Adoptions(std::string_view result);
  metrics::Counter& ExecEnds(std::string_view kind);

 private:
  metrics::Registry& registry_;
};

}  // namespace dsec::edge
