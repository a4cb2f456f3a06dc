// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/metrics.h"
#include "watcher/service.h"

namespace dsec::watcher {

// docs/metrics.md says what each means.
struct Watcher::Metrics {
  explicit Metrics(metrics::Registry& registry)
      : alive(registry.GetGauge("dsec_watcher_nodes", "Nodes by what this watcher thinks of them",
                                {{"state", "alive"}})),
        suspect(registry.GetGauge("dsec_watcher_nodes", "Nodes by what this watcher thinks of them",
                                  {{"state", "suspect"}})),
        dead(registry.GetGauge("dsec_watcher_nodes", "Nodes by what this watcher thinks of them",
                               {{"state", "dead"}})),
        mirrored(registry.GetGauge("dsec_watcher_sandboxes", "Live sandboxes in the mirror")),
        leads(registry.GetGauge("dsec_watcher_leads", "1 while this watcher leads")),
        slept(registry.GetCounter("dsec_watcher_slept_total",
                                  "Times that this watcher was not awake for a second or more")),
        probe_failures(
            registry.GetCounter("dsec_watcher_probe_failures_total", "Probes without an answer")),
        not_mirrored(registry.GetCounter("dsec_watcher_not_mirrored_total",
                                         "Answers of nodes of which something was not taken")),
        deaths(registry.GetCounter("dsec_watcher_deaths_total", "Nodes that were declared dead")),
        lost(registry.GetCounter("dsec_watcher_lost_sandboxes_total",
                                 "Sandboxes of nodes that were declared dead")) {}

  metrics::Gauge& alive;
  metrics::Gauge& suspect;
  metrics::Gauge& dead;
  metrics::Gauge& mirrored;
  metrics::Gauge& leads;
  metrics::Counter& slept;
  metrics::Counter& probe_failures;
  metrics::Counter& not_mirrored;
  metrics::Counter& deaths;
  metrics::Counter& lost;
};

}  // namespace dsec::watcher
