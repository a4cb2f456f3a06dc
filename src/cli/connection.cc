// SPDX-License-Identifier: Apache-2.0
#include "cli/connection.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

namespace dsec::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;

constexpr std::string_view kDefaultUrl = "http://127.0.0.1:7878";
constexpr std::string_view kDefaultKeyFile = "/var/lib/dsec/api_key";
constexpr size_t kMaxReply = size_t{64} << 20;
constexpr size_t kMaxLine = size_t{4} << 20;

Error Broken(const boost::system::error_code& error, std::string_view what) {
  return Error(Code::kUnavailable, "client.connection",
               fmt::format("{}: {}", what, error.message()));
}

Code CodeOf(int status, const std::string& name) {
  for (Code code :
       {Code::kInvalidArgument, Code::kUnauthenticated, Code::kPermissionDenied, Code::kNotFound,
        Code::kAlreadyExists, Code::kConflict, Code::kGone, Code::kPayloadTooLarge,
        Code::kFailedPrecondition, Code::kResourceExhausted, Code::kCancelled, Code::kInternal,
        Code::kUnavailable, Code::kDeadlineExceeded}) {
    if (name == CodeName(code)) return code;
  }
  return status >= 500 ? Code::kInternal : Code::kInvalidArgument;
}

Error ErrorOf(int status, const std::string& body) {
  const auto json = nlohmann::json::parse(body, nullptr, false);
  if (json.is_object() && json.contains("error") && json["error"].is_object()) {
    const auto& error = json["error"];
    const std::string field = error.value("field", "");
    std::string text = error.value("reason", "http.status") + ": " + error.value("message", "");
    if (!field.empty()) text += fmt::format(" (field {})", field);
    return Error(CodeOf(status, error.value("code", "")), "api.error", std::move(text));
  }
  return Error(CodeOf(status, ""), "api.error", fmt::format("http.status: {}", status));
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
  return endpoint;
}

class Connection::Impl {
 public:
  explicit Impl(Endpoint endpoint) : endpoint_(std::move(endpoint)), socket_(context_) {}

  // Opens the connection unless it is open.
  Result<void> Open() {
    if (socket_.is_open()) return {};
    buffer_.clear();
    boost::system::error_code error;
    if (endpoint_.url.starts_with("unix:")) {
      const asio::local::stream_protocol::endpoint address(endpoint_.url.substr(5));
      socket_.connect(asio::generic::stream_protocol::endpoint(address), error);
    } else {
      const std::string place = endpoint_.url.substr(7);
      const size_t colon = place.rfind(':');
      const std::string host = place.substr(0, colon);
      const std::string port = colon == std::string::npos ? "80" : place.substr(colon + 1);
      asio::ip::tcp::resolver resolver(context_);
      const auto found = resolver.resolve(host, port, error);
      if (error) return Broken(error, fmt::format("cannot resolve {}", place));
      for (const auto& entry : found) {
        socket_.close(error);
        socket_.connect(asio::generic::stream_protocol::endpoint(entry.endpoint()), error);
        if (!error) break;
      }
      if (!error) socket_.set_option(asio::ip::tcp::no_delay(true), error);
    }
    if (error) {
      Close();
      return Broken(error, fmt::format("cannot connect to {}", endpoint_.url));
    }
    return {};
  }

  void Close() {
    boost::system::error_code ignored;
    socket_.close(ignored);
  }

  template <typename Body>
  bhttp::request<Body> Request(std::string_view method, std::string_view target,
                               std::string_view type) {
    bhttp::request<Body> request;
    request.method_string({method.data(), method.size()});
    request.target({target.data(), target.size()});
    request.version(11);
    request.set(bhttp::field::host, "dsec");
    request.set(bhttp::field::authorization, "Bearer " + endpoint_.key);
    request.set(bhttp::field::user_agent, "dsec-cli/" DSEC_VERSION);
    if (!type.empty()) request.set(bhttp::field::content_type, {type.data(), type.size()});
    return request;
  }

  // Sends; a connection that the server had closed meanwhile is opened once more.
  Result<void> Write(bhttp::request<bhttp::string_body>& request) {
    request.prepare_payload();
    for (int attempt = 0;; ++attempt) {
      const bool fresh = !socket_.is_open();
      DSEC_TRY_VOID(Open());
      boost::system::error_code error;
      bhttp::write(socket_, request, error);
      if (!error) {
        parser_.emplace();
        parser_->body_limit(boost::none);
        bhttp::read_header(socket_, buffer_, *parser_, error);
        if (!error) return {};
      }
      Close();
      if (fresh || attempt > 0) return Broken(error, "the connection broke");
    }
  }

  // Hands the body out in pieces; stops early when `on_data` says so.
  Result<void> ReadBody(const OnData& on_data) {
    std::string chunk(size_t{1} << 16, '\0');
    while (!parser_->is_done()) {
      parser_->get().body().data = chunk.data();
      parser_->get().body().size = chunk.size();
      boost::system::error_code error;
      bhttp::read(socket_, buffer_, *parser_, error);
      if (error == bhttp::error::need_buffer) error = {};
      if (error) {
        Close();
        return Broken(error, "the reply broke off");
      }
      const size_t got = chunk.size() - parser_->get().body().size;
      if (got > 0 && !on_data({chunk.data(), got})) {
        Close();
        return {};
      }
    }
    if (!parser_->keep_alive()) Close();
    return {};
  }

  Result<Reply> ReadReply() {
    Reply reply;
    reply.status = static_cast<int>(parser_->get().result_int());
    for (const auto& field : parser_->get()) {
      std::string name(field.name_string());
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      reply.headers[name] = std::string(field.value());
    }
    bool too_large = false;
    DSEC_TRY_VOID(ReadBody([&](std::string_view data) {
      too_large = reply.body.size() + data.size() > kMaxReply;
      if (!too_large) reply.body += data;
      return !too_large;
    }));
    if (too_large) {
      return Error(Code::kPayloadTooLarge, "client.reply", "the reply is larger than 64 MiB");
    }
    if (reply.status >= 400) return ErrorOf(reply.status, reply.body);
    return reply;
  }

  bool Failed() const { return parser_->get().result_int() >= 400; }

  Endpoint endpoint_;
  asio::io_context context_;
  asio::generic::stream_protocol::socket socket_;
  beast::flat_buffer buffer_;
  std::optional<bhttp::response_parser<bhttp::buffer_body>> parser_;
};

Connection::Connection(Endpoint endpoint) : impl_(std::make_unique<Impl>(std::move(endpoint))) {}
Connection::~Connection() = default;

Result<Reply> Connection::Call(std::string_view method, std::string_view target,
                               std::string_view json) {
  auto request =
      impl_->Request<bhttp::string_body>(method, target, json.empty() ? "" : "application/json");
  request.body() = json;
  DSEC_TRY_VOID(impl_->Write(request));
  return impl_->ReadReply();
}

Result<Reply> Connection::Send(std::string_view method, std::string_view target,
                               std::string_view bytes) {
  auto request = impl_->Request<bhttp::string_body>(method, target, "application/octet-stream");
  request.body() = bytes;
  DSEC_TRY_VOID(impl_->Write(request));
  return impl_->ReadReply();
}

Result<Reply> Connection::Upload(std::string_view target, const Source& source) {
  auto request = impl_->Request<bhttp::empty_body>("PUT", target, "application/octet-stream");
  request.chunked(true);
  impl_->Close();  // the body cannot be sent twice, so the connection must be fresh
  DSEC_TRY_VOID(impl_->Open());
  boost::system::error_code error;
  bhttp::request_serializer<bhttp::empty_body> serializer(request);
  bhttp::write_header(impl_->socket_, serializer, error);
  while (!error) {
    DSEC_TRY(const std::string data, source());
    if (data.empty()) {
      asio::write(impl_->socket_, bhttp::make_chunk_last(), error);
      break;
    }
    asio::write(impl_->socket_, bhttp::make_chunk(asio::buffer(data)), error);
  }
  // A server that refuses early answers and closes: its answer is worth more than the broken write.
  impl_->parser_.emplace();
  impl_->parser_->body_limit(boost::none);
  boost::system::error_code read_error;
  bhttp::read_header(impl_->socket_, impl_->buffer_, *impl_->parser_, read_error);
  if (read_error) {
    impl_->Close();
    return Broken(error ? error : read_error, "the upload broke off");
  }
  return impl_->ReadReply();
}

Result<void> Connection::Download(std::string_view target, const OnData& on_data) {
  auto request = impl_->Request<bhttp::string_body>("GET", target, "");
  DSEC_TRY_VOID(impl_->Write(request));
  if (impl_->Failed()) return impl_->ReadReply().error();
  return impl_->ReadBody(on_data);
}

Result<void> Connection::Stream(std::string_view method, std::string_view target,
                                std::string_view json, const OnData& on_line) {
  auto request =
      impl_->Request<bhttp::string_body>(method, target, json.empty() ? "" : "application/json");
  request.body() = json;
  DSEC_TRY_VOID(impl_->Write(request));
  if (impl_->Failed()) return impl_->ReadReply().error();
  std::string rest;
  bool too_long = false;
  DSEC_TRY_VOID(impl_->ReadBody([&](std::string_view data) {
    rest += data;
    size_t start = 0;
    for (size_t end; (end = rest.find('\n', start)) != std::string::npos; start = end + 1) {
      const std::string_view line(rest.data() + start, end - start);
      if (line == R"({"type":"keepalive"})") continue;
      if (!on_line(line)) return false;
    }
    rest.erase(0, start);
    too_long = rest.size() > kMaxLine;
    return !too_long;
  }));
  if (too_long) {
    return Error(Code::kInternal, "client.protocol", "a record of the stream is over 4 MiB");
  }
  return {};
}

}  // namespace dsec::cli
