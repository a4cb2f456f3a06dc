// SPDX-License-Identifier: Apache-2.0
#include "cli/connection.h"

#include <chrono>
#include <cstdlib>
#include <fstream>

#include "http/blocking_client.h"
#include "http/error_body.h"

namespace dsec::cli {
namespace {

constexpr std::string_view kDefaultUrl = "http://127.0.0.1:7878";
constexpr std::string_view kDefaultKeyFile = "/var/lib/dsec/api_key";
constexpr size_t kPiece = size_t{256} << 10;
constexpr uint64_t kMaxErrorBody = 1 << 20;
// A stream says something every 5 s (docs/design/http_api.md); six silences are a dead peer.
constexpr std::chrono::seconds kSilence{30};
constexpr std::chrono::nanoseconds kNoTimeout{0};  // the server bounds every call

http::ClientRequest Request(std::string_view method, std::string_view target,
                            std::string_view body = {}, const char* type = "application/json") {
  http::ClientRequest request;
  request.method = method;
  request.target = target;
  request.body = body;
  if (!body.empty()) request.headers = {{"Content-Type", type}};
  return request;
}

// The error that a stream's head announces.
Error ErrorOf(http::BlockingClient::Stream& stream) {
  std::string body;
  while (body.size() < kMaxErrorBody) {
    auto piece = stream.Read(kPiece, kSilence);
    if (!piece.ok() || piece->empty()) break;
    body += *piece;
  }
  return http::ErrorFromReply(stream.head().status, body);
}

}  // namespace

Result<Endpoint> FindEndpoint(const std::string& url_flag, const std::string& key_flag) {
  const auto variable = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  Endpoint endpoint{url_flag, key_flag};
  if (endpoint.url.empty()) endpoint.url = variable("DSEC_URL");
  if (endpoint.url.empty()) endpoint.url = kDefaultUrl;
  while (endpoint.url.ends_with('/')) endpoint.url.pop_back();
  if (!endpoint.url.starts_with("http://") && !endpoint.url.starts_with("unix:")) {
    return Error(
        Code::kInvalidArgument, "client.url",
        fmt::format("{} is not an address: expected http://HOST:PORT or unix:/PATH", endpoint.url));
  }
  if (endpoint.key.empty()) endpoint.key = variable("DSEC_API_KEY");
  if (endpoint.key.empty()) {
    std::string path = variable("DSEC_API_KEY_FILE");
    if (path.empty()) path = kDefaultKeyFile;
    std::ifstream file(path);
    if (!std::getline(file, endpoint.key) || endpoint.key.empty()) {
      return Error(Code::kUnauthenticated, "auth.missing",
                   fmt::format("no API key: set DSEC_API_KEY or make {} readable", path));
    }
  }
  if (endpoint.key.find_first_of("\r\n") != std::string::npos) {
    return Error(Code::kInvalidArgument, "auth.invalid", "the API key holds a line break");
  }
  return endpoint;
}

Connection::Connection(Endpoint endpoint) {
  http::ClientOptions options;
  options.endpoint = std::move(endpoint.url);
  options.headers = {{"Authorization", "Bearer " + endpoint.key},
                     {"User-Agent", "dsec-cli/" DSEC_VERSION}};
  auto client = http::BlockingClient::Create(std::move(options));
  if (client.ok()) {
    client_ = *std::move(client);
  } else {
    error_ = client.error().message();
  }
}
Connection::~Connection() = default;

void Connection::Abort() {
  if (client_ != nullptr) client_->Abort();
}

Result<Reply> Connection::Finish(http::ClientRequest request) {
  if (client_ == nullptr) return Error(Code::kInvalidArgument, "client.url", error_);
  DSEC_TRY(http::Reply reply, client_->Call(std::move(request), kNoTimeout));
  if (reply.status >= 400) return http::ErrorFromReply(reply.status, reply.body);
  return Reply{reply.status, std::move(reply.body)};
}

Result<Reply> Connection::Call(std::string_view method, std::string_view target,
                               std::string_view json) {
  return Finish(Request(method, target, json));
}

Result<Reply> Connection::Send(std::string_view method, std::string_view target,
                               std::string_view bytes) {
  return Finish(Request(method, target, bytes, "application/octet-stream"));
}

Result<Reply> Connection::Upload(std::string_view target, const Source& source) {
  http::ClientRequest request = Request("PUT", target);
  request.headers = {{"Content-Type", "application/octet-stream"}};
  request.source = http::BlockingClient::Source(source);
  return Finish(std::move(request));
}

Result<void> Connection::Download(std::string_view target, const OnData& on_data) {
  if (client_ == nullptr) return Error(Code::kInvalidArgument, "client.url", error_);
  DSEC_TRY(const auto stream, client_->Open(Request("GET", target), kNoTimeout));
  if (stream->head().status >= 400) return ErrorOf(*stream);
  while (true) {
    DSEC_TRY(const std::string piece, stream->Read(kPiece, kNoTimeout));
    if (piece.empty() || !on_data(piece)) return Ok();
  }
}

Result<void> Connection::Stream(std::string_view method, std::string_view target,
                                std::string_view json, const OnData& on_line) {
  if (client_ == nullptr) return Error(Code::kInvalidArgument, "client.url", error_);
  DSEC_TRY(const auto stream, client_->Open(Request(method, target, json), kNoTimeout));
  if (stream->head().status >= 400) return ErrorOf(*stream);
  while (true) {
    DSEC_TRY(const auto line, stream->ReadLine(kSilence));
    if (!line.has_value()) return Ok();
    if (*line == R"({"type":"keepalive"})") continue;
    if (!on_line(*line)) return Ok();
  }
}

}  // namespace dsec::cli
