// SPDX-License-Identifier: Apache-2.0
// The reading of request bodies and queries. The first byte says which: 'a' create, 'b' batch and
// so on in the order of kReaders.
#include <nlohmann/json.hpp>
#include <string>

#include "apiserver/fn_json.h"
#include "apiserver/fusion_json.h"
#include "apiserver/json_in.h"
#include "base/check.h"
#include "http/error_body.h"

namespace {

using dsec::Result;
using namespace dsec::apiserver;

template <auto kRead>
Result<void> Read(std::string_view body) {
  auto result = kRead(body);
  if (!result.ok()) return std::move(result).error();
  return {};
}

Result<void> ReadQuery(std::string_view text) {
  Query query(text);
  (void)query.Text("path", true);
  (void)query.Texts("label");
  (void)query.Number("page_size", 100, 1, 1000);
  (void)query.Flag("follow", true);
  return query.Finish();
}

template <auto kRead>
Result<void> ReadFusion(std::string_view body) {
  auto result = kRead(body, 3'600'000);
  if (!result.ok()) return std::move(result).error();
  return {};
}

// These ignore members that they do not know.
bool Lenient(Result<void> (*read)(std::string_view)) {
  return read == ReadFusion<ReadFusionRun> || read == ReadFusion<ReadFusionSubmission>;
}

constexpr Result<void> (*kReaders[])(std::string_view) = {Read<ReadCreate>,
                                                          Read<ReadBatch>,
                                                          Read<ReadDeleteMany>,
                                                          Read<ReadExec>,
                                                          Read<ReadRenew>,
                                                          Read<ReadSignal>,
                                                          Read<ReadTerminalSize>,
                                                          Read<ReadCancel>,
                                                          Read<ReadEmpty>,
                                                          Read<ReadMkdir>,
                                                          Read<ReadMove>,
                                                          Read<ReadChmod>,
                                                          ReadQuery,
                                                          Read<ReadFnCall>,
                                                          Read<ReadFnCalls>,
                                                          ReadFusion<ReadFusionRun>,
                                                          ReadFusion<ReadFusionSubmission>};

// Every refusal can be told to the client.
void CheckError(const dsec::Error& error) {
  const bool no_dataset = error.reason() == "fusion.no_dataset";
  DSEC_CHECK(error.code() == dsec::Code::kInvalidArgument || no_dataset);
  DSEC_CHECK(error.reason().starts_with("request.") || no_dataset);
  DSEC_CHECK(!error.message().empty());
  DSEC_CHECK(nlohmann::json::accept(dsec::http::ErrorBody(error, "r")));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t which = static_cast<uint8_t>(data[0] - 'a') % std::size(kReaders);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto read = kReaders[which];
  const auto result = read(text);
  if (!result.ok()) {
    CheckError(result.error());
    return 0;
  }
  if (read == ReadQuery) return 0;
  // What was taken is an object, is taken again when written anew, and not with one member more.
  auto object = text.empty() ? nlohmann::json::object() : nlohmann::json::parse(text);
  DSEC_CHECK(object.is_object() && read(object.dump()).ok());
  if (Lenient(read)) return 0;
  object["fuzz"] = nullptr;
  const auto more = read(object.dump());
  DSEC_CHECK(!more.ok() && more.error().reason() == "request.unknown_field" &&
             more.error().field() == "fuzz");
  return 0;
}
