// SPDX-License-Identifier: Apache-2.0
#include "fn/fn_metrics.h"

namespace dsec::fn {

FnMetrics::FnMetrics(metrics::Registry& registry)
    : queued(registry.GetGauge("dsec_fn_queued", "Calls that wait for a worker")),
      running(registry.GetGauge("dsec_fn_running", "Calls that a worker runs")),
      workers(registry.GetGauge("dsec_fn_workers", "Workers, those being made included")),
      idle_workers(registry.GetGauge("dsec_fn_idle_workers", "Workers without a call")),
      gpu_waiting(registry.GetGauge("dsec_fn_gpu_waiting", "Calls that wait for devices")),
      queue_seconds(registry.GetHistogram("dsec_fn_queue_seconds",
                                          "Waiting of a call for workers and devices",
                                          metrics::LatencyBounds())),
      compile_seconds(registry.GetHistogram("dsec_fn_compile_seconds",
                                            "Wall time of compile steps that ran",
                                            metrics::LatencyBounds())),
      run_seconds(registry.GetHistogram("dsec_fn_run_seconds", "Wall time of run steps",
                                        metrics::LatencyBounds())),
      worker_make_seconds(registry.GetHistogram(
          "dsec_fn_worker_make_seconds", "Time to make one worker", metrics::LatencyBounds())),
      workers_made(registry.GetCounter("dsec_fn_workers_made_total", "Workers made")),
      make_failures(registry.GetCounter("dsec_fn_worker_make_failures_total",
                                        "Workers that could not be made")),
      reused(registry.GetCounter("dsec_fn_reuses_total",
                                 "Steps run by a worker that had run one before")),
      retried(registry.GetCounter("dsec_fn_retries_total",
                                  "Steps tried again after a fault of the platform")),
      cache_hits(registry.GetCounter("dsec_fn_compile_cache_hits_total",
                                     "Compile steps answered from the cache")),
      cache_misses(registry.GetCounter("dsec_fn_compile_cache_misses_total",
                                       "Compile steps that had to run")),
      cache_joins(registry.GetCounter("dsec_fn_compile_cache_joins_total",
                                      "Compile steps that waited for an equal one under way")),
      op_joins(registry.GetCounter("dsec_fn_op_joins_total",
                                   "Calls answered by an earlier call of their op_id")),
      artifact_bytes(registry.GetGauge("dsec_fn_artifact_bytes", "Bytes of kept artefacts")),
      artifacts_damaged(registry.GetCounter("dsec_fn_artifacts_damaged_total",
                                            "Kept artefacts whose bytes had changed")),
      registry_(registry) {}

metrics::Counter& FnMetrics::Calls(std::string_view verdict) {
  return registry_.GetCounter("dsec_fn_calls_total", "Calls that ended with a result",
                              {{"verdict", std::string(verdict)}});
}

metrics::Counter& FnMetrics::Refusals(std::string_view reason) {
  return registry_.GetCounter("dsec_fn_refusals_total", "Calls that ended with an error",
                              {{"reason", std::string(reason)}});
}

metrics::Counter& FnMetrics::WorkersEnded(std::string_view cause) {
  return registry_.GetCounter("dsec_fn_workers_ended_total", "Workers ended, by cause",
                              {{"cause", std::string(cause)}});
}

metrics::Gauge& FnMetrics::Gpus(std::string_view kind) {
  return registry_.GetGauge("dsec_fn_gpus", "Devices that calls may hold",
                            {{"kind", std::string(kind)}});
}

metrics::Gauge& FnMetrics::GpusFree(std::string_view kind) {
  return registry_.GetGauge("dsec_fn_gpus_free", "Devices without a holder",
                            {{"kind", std::string(kind)}});
}

std::string_view VerdictName(v1::FnVerdict verdict) {
  switch (verdict) {
    case v1::FN_OK:
      return "OK";
    case v1::FN_COMPILE_ERROR:
      return "COMPILE_ERROR";
    case v1::FN_WRONG_EXIT:
      return "WRONG_EXIT";
    case v1::FN_SIGNALED:
      return "SIGNALED";
    case v1::FN_TIME_LIMIT:
      return "TIME_LIMIT";
    case v1::FN_MEMORY_LIMIT:
      return "MEMORY_LIMIT";
    case v1::FN_OUTPUT_LIMIT:
      return "OUTPUT_LIMIT";
    case v1::FN_PROCESS_LIMIT:
      return "PROCESS_LIMIT";
    default:
      return "INFRASTRUCTURE";
  }
}

}  // namespace dsec::fn
