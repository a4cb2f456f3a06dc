// SPDX-License-Identifier: Apache-2.0
#include "edge/metrics.h"

#include <vector>

namespace dsec::edge {
namespace {

std::vector<double> WriteBounds() {
  return {10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 100e-3, 1.0};
}

}  // namespace

EdgeMetrics::EdgeMetrics(metrics::Registry& registry)
    : live(registry.GetGauge("dsec_edge_sandboxes",
                             "Sandboxes that have not ended and hold capacity")),
      stuck(registry.GetGauge("dsec_edge_stuck_sandboxes",
                              "Stopping sandboxes of which something could not be removed yet")),
      waiting_for_room(
          registry.GetGauge("dsec_edge_creates_waiting_for_room", "Creates in line for capacity")),
      waiting_for_turn(registry.GetGauge("dsec_edge_creates_waiting_for_turn",
                                         "Creates with capacity in line for their turn to work")),
      followers(registry.GetGauge("dsec_edge_followers", "Clients that follow an exec")),
      create_seconds(registry.GetHistogram("dsec_edge_create_seconds",
                                           "From the call to ready, creates that succeeded",
                                           metrics::LatencyBounds())),
      stop_seconds(registry.GetHistogram("dsec_edge_stop_seconds",
                                         "From the order to stop to nothing left",
                                         metrics::LatencyBounds())),
      record_write_seconds(registry.GetHistogram("dsec_edge_record_write_seconds",
                                                 "Writing of a record with its events to edge.db",
                                                 WriteBounds())),
      record_write_failures(registry.GetCounter("dsec_edge_record_write_failures_total",
                                                "Writes to edge.db that failed")),
      execs(registry.GetCounter("dsec_edge_execs_total", "Execs started")),
      disconnect_kills(registry.GetCounter("dsec_edge_disconnect_kills_total",
                                           "Execs killed because their last follower vanished")),
      repairs(registry.GetCounter("dsec_edge_repairs_total",
                                  "Things on the host that no record owned and that were removed")),
      events(registry.GetCounter("dsec_edge_events_total", "Events recorded")),
      registry_(registry) {}

metrics::Counter& EdgeMetrics::Creates(std::string_view result) {
  return registry_.GetCounter("dsec_edge_creates_total",
                              "Creates that came to an end, by reason or ok",
                              {{"result", std::string(result)}});
}

metrics::Counter& EdgeMetrics::Refusals(std::string_view resource) {
  return registry_.GetCounter("dsec_edge_refusals_total", "Creates refused for want of capacity",
                              {{"reason", std::string(resource)}});
}

metrics::Histogram& EdgeMetrics::CreatePhase(std::string_view phase) {
  return registry_.GetHistogram("dsec_edge_create_phase_seconds",
                                "Phases of creates that succeeded", metrics::LatencyBounds(),
                                {{"phase", std::string(phase)}});
}

metrics::Counter& EdgeMetrics::Ends(std::string_view cause) {
  return registry_.GetCounter("dsec_edge_ends_total", "Sandboxes ended, by cause",
                              {{"cause", std::string(cause)}});
}

metrics::Counter& EdgeMetrics::Adoptions(std::string_view result) {
  return registry_.GetCounter("dsec_edge_adoptions_total",
                              "Sandboxes found on record at start, by what became of them",
                              {{"result", std::string(result)}});
}

metrics::Counter& EdgeMetrics::ExecEnds(std::string_view kind) {
  return registry_.GetCounter("dsec_edge_exec_ends_total", "Execs whose end was seen, by kind",
                              {{"kind", std::string(kind)}});
}

}  // namespace dsec::edge
