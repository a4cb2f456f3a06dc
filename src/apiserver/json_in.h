// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "apiserver/layers_api.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"
#include "dsec/v1/edge.pb.h"
#include "http/target.h"

namespace dsec::apiserver {

// The strict reading of requests: unknown fields, wrong types, numbers that are no integers and
// values that do not fit are refused with the field named. Ranges of meaning are the edge's
// business. null and a missing field mean the default, an empty body is {}. All errors are
// kInvalidArgument request.{malformed,unknown_field,wrong_type,out_of_range,missing,duplicate,
// contradiction,invalid} as docs/design/http_api.md tells them apart.

struct CreateBody {
  v1::CreateRequest request;
  uint64_t timeout_ms = 60'000;
  bool has_capacity_wait = false;
};
struct BatchBody {
  CreateBody item;
  uint64_t count = 0;
};
struct ExecBody {
  v1::ExecRequest request;
  bool stream = true;
  bool keep_on_disconnect = false;
};
struct DeleteManyBody {
  std::vector<std::string> ids;
  std::vector<std::pair<std::string, std::string>> labels;
  uint64_t grace_ms = 0;
};

Result<CreateBody> ReadCreate(std::string_view body);
Result<BatchBody> ReadBatch(std::string_view body);
Result<ExecBody> ReadExec(std::string_view body);
Result<DeleteManyBody> ReadDeleteMany(std::string_view body);
Result<v1::RenewRequest> ReadRenew(std::string_view body);
Result<CollectOrder> ReadCollect(std::string_view body);
Result<v1::SignalRequest> ReadSignal(std::string_view body);
Result<v1::Tty> ReadTerminalSize(std::string_view body);
Result<uint64_t> ReadCancel(std::string_view body);  // grace_ms
Result<void> ReadEmpty(std::string_view body);
Result<v1::MkdirRequest> ReadMkdir(std::string_view body);
Result<v1::MoveRequest> ReadMove(std::string_view body);
Result<v1::ChmodRequest> ReadChmod(std::string_view body);

// "0755" -> 0755; a mode without the leading 0 is refused (755 could be meant either way).
Result<uint32_t> ParseMode(std::string_view text, std::string_view field);
// "TERM", "SIGTERM" or a number from 1 to 64.
Result<int32_t> ParseSignal(std::string_view text, std::string_view field);

// The parameters of a query. Each is asked for by name once; Finish refuses what nobody asked for
// and reports the first error.
class Query {
 public:
  explicit Query(std::string_view encoded);
  std::string Text(std::string_view name, bool required = false);
  std::vector<std::string> Texts(std::string_view name);
  // Each `name`=key=value; a key with two values is an error.
  std::map<std::string, std::string> Labels(std::string_view name);
  bool Has(std::string_view name) const;
  uint64_t Number(std::string_view name, uint64_t fallback, uint64_t min = 0,
                  uint64_t max = UINT64_MAX >> 1);
  bool Flag(std::string_view name, bool fallback);
  Result<void> Finish();

 private:
  void Fail(std::string_view name, std::string_view rule, std::string_view reason);
  http::QueryPairs pairs_;
  std::set<std::string, std::less<>> asked_;
  Result<void> status_;
};

}  // namespace dsec::apiserver
