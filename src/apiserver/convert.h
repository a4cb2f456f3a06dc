// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apiserver/layers_api.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/edge.pb.h"
#include "edge/api.h"
#include "http/json_writer.h"

// The public JSON of api/openapi.yaml to and from our messages; the one place that knows both.
// Readers check form, types and presence; what a value may be is the edge's and the agent's to say.
// Pure.
namespace dsec::apiserver {

// --- requests ---

inline constexpr std::chrono::milliseconds kDefaultTimeout{60'000};
inline constexpr uint64_t kMaxTimeoutMs = 600'000;
inline constexpr uint64_t kMaxGraceMs = 300'000;
inline constexpr uint64_t kMaxBatch = 4096;
inline constexpr uint64_t kMaxDeletes = 10'000;

struct CreateCall {
  v1::CreateRequest request;  // without principal and project
  std::chrono::milliseconds timeout = kDefaultTimeout;
};
struct BatchCall {
  std::string request_id;
  uint64_t count = 0;
  CreateCall item;
};
struct DeleteManyCall {
  std::vector<std::string> ids;  // or
  std::map<std::string, std::string> labels;
  uint64_t grace_ms = 0;
};
struct ExecCall {
  v1::ExecRequest request;  // op_id may be empty
  bool stream = true;
  bool detached = false;
  edge::OnDisconnect rule = edge::OnDisconnect::kKill;
};

Result<CreateCall> ReadCreate(std::string_view body);
Result<BatchCall> ReadBatch(std::string_view body);
Result<DeleteManyCall> ReadDeleteMany(std::string_view body);
Result<v1::RenewRequest> ReadRenew(std::string_view body);
Result<ExecCall> ReadExec(std::string_view body);
Result<v1::SignalRequest> ReadSignal(std::string_view body);
Result<v1::Tty> ReadResize(std::string_view body);
Result<uint64_t> ReadCancel(std::string_view body);  // grace_ms
Result<void> ReadEmpty(std::string_view body);
Result<v1::MkdirRequest> ReadMkdir(std::string_view body);
Result<v1::MoveRequest> ReadMove(std::string_view body);
Result<v1::ChmodRequest> ReadChmod(std::string_view body);

// --- replies: each writes one value where the writer stands ---

void WriteSandbox(http::JsonWriter& json, const v1::SandboxRecord& record,
                  std::optional<uint64_t> execs_running = {});
void WriteTermination(http::JsonWriter& json, const v1::Termination& termination);
void WriteStats(http::JsonWriter& json, const v1::SandboxRecord& record, const v1::Usage& usage);
void WriteEvent(http::JsonWriter& json, const v1::Event& event);
void WriteExecResult(http::JsonWriter& json, const v1::ExecResult& result);
void WriteExecStatus(http::JsonWriter& json, const v1::ExecSummary& summary);
void WriteStreamTotals(http::JsonWriter& json, const v1::StreamState& state);
void WriteSession(http::JsonWriter& json, const v1::SessionInfo& session);
void WriteFileStat(http::JsonWriter& json, const v1::FileInfo& info);
void WriteNode(http::JsonWriter& json, const v1::NodeInfo& node);
void WriteLayer(http::JsonWriter& json, const LayerView& layer);
// "0644"
std::string FormatMode(uint32_t mode);

}  // namespace dsec::apiserver
