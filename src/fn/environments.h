// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "dsec/v1/fncall.pb.h"
#include "runtime/async_event.h"
#include "runtime/task.h"
#include "sandbox/fn_backend.h"

namespace dsec::fn {

// Whether an error of the backend is about the layers that a call names: its client's to mend.
// Anything else that is not found is the platform's.
inline bool IsLayerError(const Error& error) {
  return (error.code() == Code::kNotFound || error.code() == Code::kInvalidArgument) &&
         error.reason().starts_with("layer.");
}

// Environments in canonical form. An answer of the backend holds for a moment, so that a flood of
// calls asks once, and a name that has been given to another layer is seen soon. One shard.
class Environments {
 public:
  Environments(sandbox::FnBackend& backend, const Clock& clock, std::chrono::milliseconds age)
      : backend_(backend), clock_(clock), age_(age) {}

  // The errors of FnBackend::Resolve.
  runtime::Task<v1::FnEnvironment> Resolve(v1::FnEnvironment environment,
                                           runtime::Deadline deadline);

 private:
  static constexpr size_t kMaxEntries = 1024;
  struct Entry {
    runtime::AsyncEvent answered;
    std::optional<Result<v1::FnEnvironment>> answer;
    MonoTime until{};
  };

  sandbox::FnBackend& backend_;
  const Clock& clock_;
  const std::chrono::milliseconds age_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

}  // namespace dsec::fn
