// SPDX-License-Identifier: Apache-2.0
#include "store/etcd_json.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "http/base64.h"
#include "store/rules.h"

namespace dsec::store::etcd {
namespace {

using Json = nlohmann::json;

// Codes of google.rpc.Code that etcd answers with.
constexpr int kInvalid = 3;
constexpr int kTimedOut = 4;
constexpr int kMissing = 5;
constexpr int kExhausted = 8;
constexpr int kFailedPrecondition = 9;  // of a grant: the id is taken
constexpr int kAway = 14;
constexpr size_t kMaxShown = 200;

std::string Base64(std::string_view bytes) {
  std::string out;
  http::AppendBase64(bytes, out);
  return out;
}

Error Protocol(std::string_view what) {
  return Error(Code::kInternal, "store.protocol", fmt::format("etcd's answer has {}", what));
}

Result<Json> Parse(std::string_view text) {
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return Protocol("no JSON object");
  return json;
}

const Json& Empty() {
  static const Json kEmpty = Json::object();
  return kEmpty;
}

// A member that is an object; an empty one when it was left out.
Result<const Json*> Object(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end()) return &Empty();
  if (!it->is_object()) return Protocol(fmt::format("\"{}\", which is no object", name));
  return &*it;
}

Result<const Json*> Array(const Json& json, const char* name) {
  static const Json kNone = Json::array();
  const auto it = json.find(name);
  if (it == json.end()) return &kNone;
  if (!it->is_array()) return Protocol(fmt::format("\"{}\", which is no array", name));
  return &*it;
}

Result<bool> Flag(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end()) return false;
  if (!it->is_boolean()) return Protocol(fmt::format("\"{}\", which is no boolean", name));
  return it->get<bool>();
}

// 64 bits as a string or, from other versions of the gateway, as a number; 0 when left out.
Result<int64_t> Number(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end()) return 0;
  if (it->is_number_integer()) return it->get<int64_t>();
  int64_t value = 0;
  if (it->is_string()) {
    const auto& text = it->get_ref<const std::string&>();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size()) return value;
  }
  return Protocol(fmt::format("\"{}\", which is no number", name));
}

Result<uint64_t> Positive(const Json& json, const char* name) {
  DSEC_TRY(const int64_t value, Number(json, name));
  if (value < 0) return Protocol(fmt::format("\"{}\" below zero", name));
  return static_cast<uint64_t>(value);
}

Result<std::string> Bytes(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end()) return std::string();
  if (it->is_string()) {
    auto bytes = http::DecodeBase64(it->get_ref<const std::string&>());
    if (bytes.has_value()) return *std::move(bytes);
  }
  return Protocol(fmt::format("\"{}\", which is not base64", name));
}

Result<Revision> HeaderRevision(const Json& json) {
  DSEC_TRY(const Json* header, Object(json, "header"));
  return Positive(*header, "revision");
}

Result<Entry> ParseEntry(const Json& json) {
  if (!json.is_object()) return Protocol("an entry, which is no object");
  Entry entry;
  DSEC_TRY(entry.key, Bytes(json, "key"));
  DSEC_TRY(entry.value, Bytes(json, "value"));
  DSEC_TRY(entry.version, Positive(json, "mod_revision"));
  DSEC_TRY(const int64_t lease, Number(json, "lease"));
  entry.lease = static_cast<LeaseId>(lease);
  return entry;
}

Result<Change> ParseEvent(const Json& json) {
  if (!json.is_object()) return Protocol("an event, which is no object");
  DSEC_TRY(const Json* kv, Object(json, "kv"));
  DSEC_TRY(Entry entry, ParseEntry(*kv));
  if (entry.key.empty()) return Protocol("an event without a key");
  Change change{std::move(entry.key), std::nullopt, entry.version};
  const auto type = json.find("type");  // PUT is the default
  const bool deleted = type != json.end() && (*type == "DELETE" || *type == 1);
  if (!deleted) change.value = std::move(entry.value);
  return change;
}

std::string Id(LeaseId lease) { return std::to_string(static_cast<int64_t>(lease)); }

Error FromCode(int64_t code, std::string message) {
  message = "etcd: " + message.substr(0, kMaxShown);
  switch (code) {
    case kMissing:
      return Error(Code::kNotFound, "store.lease", std::move(message));
    case kExhausted:
      return Error(Code::kResourceExhausted, "store.full", std::move(message));
    case kFailedPrecondition:
      return Error(Code::kAlreadyExists, "store.refused", std::move(message));
    case kInvalid:
      return Error(Code::kInvalidArgument, "store.refused", std::move(message));
    case kTimedOut:
    case kAway:
      return Error(Code::kUnavailable, "store.unavailable", std::move(message));
    default:
      return Error(Code::kInternal, "store.refused", std::move(message));
  }
}

Error ParseError(const Json& json) {
  // Within a stream the code has another name.
  const auto code = Number(json, json.contains("code") ? "code" : "grpc_code");
  if (!code.ok()) return code.error();
  const auto message = json.find("message");
  return FromCode(*code, message != json.end() && message->is_string() ? message->get<std::string>()
                                                                       : std::string("no message"));
}

}  // namespace

std::string GetBody(std::string_view key) { return Json{{"key", Base64(key)}}.dump(); }

std::string RangeBody(const KeyRange& range, uint32_t limit) {
  return Json{{"key", Base64(range.begin)},
              {"range_end", Base64(range.end)},
              {"limit", std::to_string(limit)}}
      .dump();
}

std::string CommitBody(const std::vector<Condition>& conditions, const std::vector<Write>& writes) {
  Json compare = Json::array();
  Json failure = Json::array();
  for (const Condition& condition : conditions) {
    const std::string key = Base64(condition.key);
    compare.push_back({{"result", "EQUAL"},
                       {"target", "MOD"},
                       {"key", key},
                       {"mod_revision", std::to_string(condition.version)}});
    failure.push_back({{"request_range", {{"key", key}, {"keys_only", true}}}});
  }
  Json success = Json::array();
  for (const Write& write : writes) {
    Json request = {{"key", Base64(write.key)}};
    if (!write.value.has_value()) {
      success.push_back({{"request_delete_range", std::move(request)}});
      continue;
    }
    request["value"] = Base64(*write.value);
    if (write.lease != 0) request["lease"] = Id(write.lease);
    success.push_back({{"request_put", std::move(request)}});
  }
  return Json{{"compare", std::move(compare)},
              {"success", std::move(success)},
              {"failure", std::move(failure)}}
      .dump();
}

std::string GrantBody(LeaseId lease, std::chrono::seconds ttl) {
  return Json{{"ID", Id(lease)}, {"TTL", std::to_string(ttl.count())}}.dump();
}

std::string LeaseBody(LeaseId lease) { return Json{{"ID", Id(lease)}}.dump(); }

std::string WatchBody(const KeyRange& range, Revision first) {
  return Json{{"create_request",
               {{"key", Base64(range.begin)},
                {"range_end", Base64(range.end)},
                {"start_revision", std::to_string(first)},
                {"fragment", true}}}}
      .dump();
}

Result<Page> ParsePage(std::string_view text) {
  DSEC_TRY(const Json json, Parse(text));
  Page page;
  DSEC_TRY(page.revision, HeaderRevision(json));
  DSEC_TRY(page.more, Flag(json, "more"));
  DSEC_TRY(const Json* kvs, Array(json, "kvs"));
  for (const Json& kv : *kvs) {
    DSEC_TRY(Entry entry, ParseEntry(kv));
    page.entries.push_back(std::move(entry));
  }
  return page;
}

Result<CommitReply> ParseCommit(std::string_view text, size_t conditions) {
  DSEC_TRY(const Json json, Parse(text));
  CommitReply reply;
  DSEC_TRY(reply.done, Flag(json, "succeeded"));
  DSEC_TRY(reply.revision, HeaderRevision(json));
  if (reply.done) return reply;
  DSEC_TRY(const Json* responses, Array(json, "responses"));
  if (responses->size() != conditions) return Protocol("another number of responses");
  for (const Json& response : *responses) {
    if (!response.is_object()) return Protocol("a response, which is no object");
    DSEC_TRY(const Json* range, Object(response, "response_range"));
    DSEC_TRY(const Json* kvs, Array(*range, "kvs"));
    Revision version = 0;
    if (!kvs->empty()) {
      DSEC_TRY(const Entry entry, ParseEntry((*kvs)[0]));
      version = entry.version;
    }
    reply.found.push_back(version);
  }
  return reply;
}

Result<int64_t> ParseKeepAlive(std::string_view text) {
  DSEC_TRY(const Json json, Parse(text));
  if (json.contains("error")) {
    DSEC_TRY(const Json* error, Object(json, "error"));
    return ParseError(*error);
  }
  DSEC_TRY(const Json* result, Object(json, "result"));
  return Number(*result, "TTL");
}

Result<WatchLine> ParseWatchLine(std::string_view text) {
  DSEC_TRY(const Json json, Parse(text));
  WatchLine line;
  if (json.contains("error")) {
    DSEC_TRY(const Json* error, Object(json, "error"));
    line.error = ParseError(*error);
    return line;
  }
  DSEC_TRY(const Json* result, Object(json, "result"));
  DSEC_TRY(line.fragment, Flag(*result, "fragment"));
  DSEC_TRY(line.cancelled, Flag(*result, "canceled"));
  DSEC_TRY(line.compacted, Positive(*result, "compact_revision"));
  DSEC_TRY(const Json* events, Array(*result, "events"));
  for (const Json& event : *events) {
    DSEC_TRY(Change change, ParseEvent(event));
    line.changes.push_back(std::move(change));
  }
  return line;
}

Error ErrorOf(int status, std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_object() && json.contains("code")) return ParseError(json);
  return Error(status >= 500 ? Code::kUnavailable : Code::kInternal, "store.unavailable",
               fmt::format("etcd answered with HTTP status {}", status));
}

}  // namespace dsec::store::etcd
