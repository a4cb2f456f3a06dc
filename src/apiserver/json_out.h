// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "apiserver/layers_api.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/edge.pb.h"
#include "http/json_writer.h"

namespace dsec::apiserver {

// The public form of the internal messages (api/openapi.yaml). Each writes one JSON object.

std::string_view StateName(v1::State state);
Result<v1::State> ParseState(std::string_view text, std::string_view field);

void WriteTermination(http::JsonWriter& json, const v1::Termination& termination);
void WriteLimits(http::JsonWriter& json, const v1::Limits& limits);
void WriteUsage(http::JsonWriter& json, const v1::Usage& usage);
// `execs_running` below 0: left out.
void WriteSandbox(http::JsonWriter& json, const v1::SandboxRecord& record, int64_t execs_running);
void WriteEvent(http::JsonWriter& json, const v1::Event& event);
void WriteNode(http::JsonWriter& json, const v1::NodeInfo& node);
void WriteResult(http::JsonWriter& json, const v1::ExecResult& result);
void WriteExecSummary(http::JsonWriter& json, const v1::ExecSummary& exec);
void WriteFile(http::JsonWriter& json, const v1::FileInfo& info);
void WriteLayer(http::JsonWriter& json, const LayerView& layer);

// The records of an exec stream, each with its newline.
void AppendStarted(std::string& out, const v1::ExecReply& reply);
void AppendOutput(std::string& out, const v1::ExecReply& reply);
void AppendExit(std::string& out, const v1::ExecReply& reply);
void AppendMore(std::string& out, const v1::ExecReply& reply);

// 0644 and the like.
std::string ModeText(uint32_t mode);

}  // namespace dsec::apiserver
