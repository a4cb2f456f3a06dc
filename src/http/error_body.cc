// SPDX-License-Identifier: Apache-2.0
#include "http/error_body.h"

#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

namespace dsec::http {
namespace {

constexpr Code kCodes[] = {
    Code::kInvalidArgument,
    Code::kUnauthenticated,
    Code::kPermissionDenied,
    Code::kNotFound,
    Code::kAlreadyExists,
    Code::kConflict,
    Code::kGone,
    Code::kPayloadTooLarge,
    Code::kFailedPrecondition,
    Code::kResourceExhausted,
    Code::kCancelled,
    Code::kInternal,
    Code::kUnavailable,
    Code::kDeadlineExceeded,
};

Code CodeOfStatus(int status) {
  for (const Code code : kCodes) {
    if (HttpStatus(code) == status) return code;
  }
  return status >= 500 ? Code::kUnavailable : Code::kInvalidArgument;
}

// A static text equal to `reason`.
std::string_view Intern(std::string_view reason) {
  constexpr size_t kMax = 512;
  static std::mutex mutex;
  static auto& known = *new std::set<std::string, std::less<>>();
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(reason); found != known.end()) return *found;
  if (known.size() >= kMax || reason.size() > 128) return "http.other";
  return *known.emplace(reason).first;
}

}  // namespace

void WriteError(JsonWriter& json, const Error& error, std::string_view request_id,
                std::string_view details) {
  json.BeginObject();
  json.Field("code", CodeName(error.code()));
  json.Field("reason", error.reason());
  json.Field("message", error.message());
  if (!error.field().empty()) json.Field("field", error.field());
  json.Field("retriable", Retriable(error.code()));
  json.Field("request_id", request_id);
  if (!details.empty() || error.sys_errno() != 0) {
    json.BeginObject("details");
    json.Members(details);
    if (error.sys_errno() != 0) {
      json.Field("errno", error.sys_errno());
      if (const char* name = strerrorname_np(error.sys_errno()); name != nullptr)
        json.Field("errno_name", name);
    }
    json.EndObject();
  }
  json.EndObject();
}

std::string ErrorBody(const Error& error, std::string_view request_id, std::string_view details) {
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Key("error");
  WriteError(json, error, request_id, details);
  json.EndObject();
  return body;
}

Error ErrorFromReply(int status, std::string_view body) {
  const auto parsed = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  const auto text = [](const nlohmann::json& object, const char* key) -> std::string {
    const auto found = object.find(key);
    return found != object.end() && found->is_string() ? found->get<std::string>() : "";
  };
  if (!parsed.is_object() || !parsed.contains("error") || !parsed["error"].is_object()) {
    return Error(CodeOfStatus(status), "http.status", fmt::format("HTTP status {}", status));
  }
  const nlohmann::json& wire = parsed["error"];
  Code code = CodeOfStatus(status);
  for (const Code known : kCodes) {
    if (CodeName(known) == text(wire, "code")) code = known;
  }
  return Error(code, Intern(text(wire, "reason")), text(wire, "message"))
      .WithField(text(wire, "field"));
}

}  // namespace dsec::http
