// SPDX-License-Identifier: Apache-2.0
#include "model/lifecycle.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"

namespace dsec::model {
namespace {

struct CauseRow {
  std::string_view cause;
  v1::State state;
  v1::FaultClass fault;
};

constexpr std::array<CauseRow, 13> kCauses = {{
    {cause::kUserStop, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kTtl, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kIdle, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kUnclaimed, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kEntrypointExit, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kPurged, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kJobEnded, v1::STATE_STOPPED, v1::FAULT_NONE},
    {cause::kDrained, v1::STATE_STOPPED, v1::FAULT_INFRASTRUCTURE},
    {cause::kCreateFailed, v1::STATE_FAILED, v1::FAULT_INFRASTRUCTURE},
    {cause::kOom, v1::STATE_FAILED, v1::FAULT_WORKLOAD},
    {cause::kAgentDied, v1::STATE_FAILED, v1::FAULT_INFRASTRUCTURE},
    {cause::kNodeLost, v1::STATE_LOST, v1::FAULT_INFRASTRUCTURE},
    {cause::kHostRestarted, v1::STATE_LOST, v1::FAULT_INFRASTRUCTURE},
}};

const CauseRow* FindCause(std::string_view cause) {
  const auto* row = std::find_if(kCauses.begin(), kCauses.end(), [&](const CauseRow& candidate) {
    return candidate.cause == cause;
  });
  return row == kCauses.end() ? nullptr : row;
}

constexpr std::array<std::pair<v1::State, std::string_view>, 8> kStates = {{
    {v1::STATE_PENDING, "pending"},
    {v1::STATE_STARTING, "starting"},
    {v1::STATE_RUNNING, "running"},
    {v1::STATE_PAUSED, "paused"},
    {v1::STATE_STOPPING, "stopping"},
    {v1::STATE_STOPPED, "stopped"},
    {v1::STATE_FAILED, "failed"},
    {v1::STATE_LOST, "lost"},
}};

constexpr std::array<std::pair<v1::Backend, std::string_view>, 4> kBackends = {{
    {v1::BACKEND_CONTAINER, "container"},
    {v1::BACKEND_FNCALL, "fncall"},
    {v1::BACKEND_MICROVM, "microvm"},
    {v1::BACKEND_FULLVM, "fullvm"},
}};

template <typename T, size_t N>
std::string_view NameIn(const std::array<std::pair<T, std::string_view>, N>& table, T value) {
  for (const auto& [candidate, name] : table) {
    if (candidate == value) return name;
  }
  return "unspecified";
}

template <typename T, size_t N>
std::optional<T> ValueIn(const std::array<std::pair<T, std::string_view>, N>& table,
                         std::string_view name) {
  for (const auto& [value, candidate] : table) {
    if (candidate == name) return value;
  }
  return std::nullopt;
}

}  // namespace

bool IsCause(std::string_view cause) { return FindCause(cause) != nullptr; }

bool IsTerminal(v1::State state) {
  return state == v1::STATE_STOPPED || state == v1::STATE_FAILED || state == v1::STATE_LOST;
}

bool CanMove(v1::State from, v1::State to) {
  const bool alive = from == v1::STATE_PENDING || from == v1::STATE_STARTING ||
                     from == v1::STATE_RUNNING || from == v1::STATE_PAUSED;
  if (IsTerminal(to)) return alive || from == v1::STATE_STOPPING;
  switch (to) {
    case v1::STATE_PENDING:
      return from == v1::STATE_UNSPECIFIED;
    case v1::STATE_STARTING:
      return from == v1::STATE_PENDING;
    case v1::STATE_RUNNING:
      return from == v1::STATE_STARTING || from == v1::STATE_PAUSED;
    case v1::STATE_PAUSED:
      return from == v1::STATE_RUNNING;
    case v1::STATE_STOPPING:
      return alive;
    default:
      return false;
  }
}

v1::State EndStateOf(std::string_view cause) {
  const CauseRow* row = FindCause(cause);
  DSEC_CHECK(row != nullptr);
  return row->state;
}

v1::FaultClass FaultOf(std::string_view cause, int32_t exit_code, std::optional<Code> create_code) {
  const CauseRow* row = FindCause(cause);
  DSEC_CHECK(row != nullptr);
  if (cause == cause::kEntrypointExit) return exit_code == 0 ? v1::FAULT_NONE : v1::FAULT_WORKLOAD;
  if (cause == cause::kCreateFailed && create_code.has_value()) {
    switch (*create_code) {
      case Code::kInvalidArgument:
      case Code::kNotFound:
      case Code::kAlreadyExists:
      case Code::kFailedPrecondition:
      case Code::kPayloadTooLarge:
        return v1::FAULT_WORKLOAD;
      default:
        break;
    }
  }
  return row->fault;
}

Result<void> Move(v1::SandboxRecord& record, v1::State to) {
  if (IsTerminal(to) || !CanMove(record.state(), to)) {
    return Error(Code::kConflict, "sandbox.state",
                 fmt::format("a sandbox that is {} cannot become {}", StateName(record.state()),
                             StateName(to)));
  }
  record.set_state(to);
  return Ok();
}

Result<void> Terminate(v1::SandboxRecord& record, v1::Termination termination,
                       std::optional<Code> create_code, int64_t now_unix_ms) {
  DSEC_CHECK(IsCause(termination.cause()));
  if (IsTerminal(record.state())) {
    return Error(Code::kConflict, "sandbox.ended",
                 fmt::format("has already ended by {}", record.termination().cause()));
  }
  const v1::State state = EndStateOf(termination.cause());
  if (!CanMove(record.state(), state)) {
    return Error(Code::kConflict, "sandbox.state",
                 fmt::format("a sandbox that is {} cannot become {}", StateName(record.state()),
                             StateName(state)));
  }
  if (termination.fault() == v1::FAULT_NONE) {
    termination.set_fault(FaultOf(termination.cause(), termination.exit_code(), create_code));
  }
  if (termination.at_unix_ms() == 0) termination.set_at_unix_ms(now_unix_ms);
  record.set_state(state);
  record.set_ended_unix_ms(now_unix_ms);
  record.clear_stop();
  *record.mutable_termination() = std::move(termination);
  return Ok();
}

std::string_view StateName(v1::State state) { return NameIn(kStates, state); }
std::optional<v1::State> ParseState(std::string_view name) { return ValueIn(kStates, name); }
std::string_view BackendName(v1::Backend backend) { return NameIn(kBackends, backend); }
std::optional<v1::Backend> ParseBackend(std::string_view name) { return ValueIn(kBackends, name); }

std::string_view FaultName(v1::FaultClass fault) {
  switch (fault) {
    case v1::FAULT_WORKLOAD:
      return "workload";
    case v1::FAULT_INFRASTRUCTURE:
      return "infrastructure";
    default:
      return "none";
  }
}

}  // namespace dsec::model
