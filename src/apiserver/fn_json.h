// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "http/json_writer.h"

namespace dsec::apiserver {

// FnCall in JSON (docs/design/fncall.md), read with the strictness of json_in.h. What a type, a
// path or a limit may be is the engine's business.

inline constexpr size_t kMaxFnCalls = 4096;  // of one batch
// Calls of one batch that run, wait in the engine or have a result not written yet: a client that
// reads slowly holds its own batch back and no memory but this many results.
inline constexpr size_t kMaxFnConcurrency = 256;

Result<v1::FnCall> ReadFnCall(std::string_view body);
struct FnCallsBody {
  std::vector<v1::FnCall> calls;
  uint64_t concurrency = kMaxFnConcurrency;
};
// One item at fault refuses them all, before any has run; the field is named "calls[3].type".
Result<FnCallsBody> ReadFnCalls(std::string_view body);

// "OK", "TIME_LIMIT" and so on.
std::string_view FnVerdictName(v1::FnVerdict verdict);
void WriteFnResult(http::JsonWriter& json, const v1::FnResult& result);
void WriteFnPool(http::JsonWriter& json, const v1::FnPoolInfo& pool);

}  // namespace dsec::apiserver
