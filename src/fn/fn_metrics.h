// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/metrics.h"
#include "dsec/v1/fncall.pb.h"

namespace dsec::fn {

// The engine's metrics; docs/metrics.md says what each means. Thread-safe.
class FnMetrics {
 public:
  explicit FnMetrics(metrics::Registry& registry);

  metrics::Gauge& queued;
  metrics::Gauge& running;
  metrics::Gauge& workers;
  metrics::Gauge& idle_workers;
  metrics::Gauge& gpu_waiting;
  metrics::Histogram& queue_seconds;
  metrics::Histogram& compile_seconds;
  metrics::Histogram& run_seconds;
  metrics::Histogram& worker_make_seconds;
  metrics::Counter& workers_made;
  metrics::Counter& make_failures;
  metrics::Counter& reused;
  metrics::Counter& retried;
  metrics::Counter& cache_hits;
  metrics::Counter& cache_misses;
  metrics::Counter& cache_joins;
  metrics::Counter& op_joins;
  metrics::Gauge& artifact_bytes;
  metrics::Counter& artifacts_damaged;

  // By label; found anew at each call.
  metrics::Counter& Calls(std::string_view verdict);
  metrics::Counter& Refusals(std::string_view reason);
  metrics::Counter& WorkersEnded(std::string_view cause);
  metrics::Gauge& Gpus(std::string_view kind);
  metrics::Gauge& GpusFree(std::string_view kind);

 private:
  metrics::Registry& registry_;
};

// FN_OK -> "OK"; the names of the public API.
std::string_view VerdictName(v1::FnVerdict verdict);

}  // namespace dsec::fn
