// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/code.h"
#include "base/result.h"
#include "dsec/v1/model.pb.h"

namespace dsec::model {

// Why a sandbox ended: the values of Termination.cause.
namespace cause {
inline constexpr std::string_view kUserStop = "user_stop";
inline constexpr std::string_view kTtl = "ttl";
inline constexpr std::string_view kIdle = "idle";
inline constexpr std::string_view kUnclaimed = "unclaimed";
inline constexpr std::string_view kEntrypointExit = "entrypoint_exit";
inline constexpr std::string_view kCreateFailed = "create_failed";
inline constexpr std::string_view kOom = "oom";
inline constexpr std::string_view kAgentDied = "agent_died";
inline constexpr std::string_view kPurged = "purged";
inline constexpr std::string_view kNodeLost = "node_lost";
inline constexpr std::string_view kHostRestarted = "host_restarted";
inline constexpr std::string_view kJobEnded = "job_ended";
inline constexpr std::string_view kDrained = "drained";
}  // namespace cause

bool IsCause(std::string_view cause);

// STOPPED, FAILED or LOST.
bool IsTerminal(v1::State state);
// Whether the step is one of the life of a sandbox. Nothing leaves a terminal state; a step to the
// same state is none.
bool CanMove(v1::State from, v1::State to);
// The terminal state that a cause leads to. `cause` must be one of the above.
v1::State EndStateOf(std::string_view cause);
// Whose fault an end is. A create that failed because of what was asked (create_code says:
// malformed, unknown layer, a mechanism that this host lacks) is the workload's, any other is the
// infrastructure's; so is an entrypoint's exit code other than 0 the workload's.
v1::FaultClass FaultOf(std::string_view cause, int32_t exit_code, std::optional<Code> create_code);

// Moves record.state; kConflict "sandbox.state" if the step is not legal, with the record
// unchanged. Not for terminal states: those take Terminate.
Result<void> Move(v1::SandboxRecord& record, v1::State to);
// Ends the record: state, termination and time, from termination.cause (fault is filled in where it
// is FAULT_NONE by `create_code` and the exit code). kConflict "sandbox.ended" when it has ended
// before: there is exactly one end.
Result<void> Terminate(v1::SandboxRecord& record, v1::Termination termination,
                       std::optional<Code> create_code, int64_t now_unix_ms);

// Lower-case names of the public API: "running", "container", "workload".
std::string_view StateName(v1::State state);
std::optional<v1::State> ParseState(std::string_view name);
std::string_view BackendName(v1::Backend backend);
std::optional<v1::Backend> ParseBackend(std::string_view name);
std::string_view FaultName(v1::FaultClass fault);

}  // namespace dsec::model
