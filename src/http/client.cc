// SPDX-License-Identifier: Apache-2.0
#include "http/client.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <span>
#include <vector>

#include "http/line_buffer.h"
#include "http/parser.h"

namespace dsec::http {
namespace {

namespace asio = boost::asio;
using Socket = asio::generic::stream_protocol::socket;
using runtime::Deadline;
using runtime::Task;

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kMaxHeadBytes = 64 << 10;

Error Broken(std::string message) {
  return Error(Code::kUnavailable, "client.connection", std::move(message));
}

Error FromSystem(const boost::system::error_code& error, std::string_view what) {
  if (error == asio::error::operation_aborted) {
    return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
  }
  return Broken(fmt::format("{}: {}", what, error.message()));
}

iovec Piece(std::string_view text) { return {const_cast<char*>(text.data()), text.size()}; }

// One connection of the pool: bytes out, messages in.
class Link {
 public:
  explicit Link(Socket socket)
      : socket_(std::move(socket)), timer_(socket_.get_executor()), parser_(kMaxHeadBytes) {}

  Task<void> Send(std::span<iovec> pieces, Deadline deadline);
  // Reads the head of the reply proper: interim ones are passed over.
  Task<void> ReadHead(Deadline deadline);
  Task<std::string> ReadBody(size_t max, Deadline deadline);

  const ResponseHead& head() const { return parser_.head(); }
  bool body_done() const { return parser_.body_done(); }
  // Whether a further request may be sent: the last reply is complete and the server holds the
  // connection open.
  bool Reusable() const {
    return parser_.body_done() && parser_.head().keep_alive && input_.empty() && QuietNow();
  }
  bool Answered() const { return got_byte_; }
  // Something to read, be it the end.
  bool Readable() const { return !input_.empty() || !QuietNow(); }
  void StartRequest() {
    parser_.Reset();
    got_byte_ = false;
  }

 private:
  bool QuietNow() const {
    char byte = 0;
    const ssize_t count =
        ::recv(const_cast<Socket&>(socket_).native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return count < 0 && errno == EAGAIN;
  }
  Task<void> Wait(Socket::wait_type type, Deadline deadline);
  Task<size_t> Receive(Deadline deadline);  // 0 = end

  Socket socket_;
  asio::steady_timer timer_;
  ResponseParser parser_;
  std::string input_;
  bool got_byte_ = false;
};

Task<void> Link::Wait(Socket::wait_type type, Deadline deadline) {
  // Outlives this frame: a timer that has fired may still have its handler in the queue when the
  // wait is over.
  enum class State { kWaiting, kTimedOut, kOver };
  auto state = std::make_shared<State>(State::kWaiting);
  if (!deadline.never()) {
    timer_.expires_at(deadline.at());
    timer_.async_wait([this, state](const boost::system::error_code& cancelled) {
      if (cancelled || *state != State::kWaiting) return;
      *state = State::kTimedOut;
      boost::system::error_code ignored;
      socket_.cancel(ignored);
    });
  }
  const auto [error] = co_await socket_.async_wait(type, kTuple);
  const bool timed_out = *state == State::kTimedOut;
  *state = State::kOver;
  timer_.cancel();
  if (timed_out)
    co_return Error(Code::kDeadlineExceeded, "client.timeout", "the server did not answer in time");
  if (error) co_return FromSystem(error, "wait");
  co_return Ok();
}

Task<void> Link::Send(std::span<iovec> pieces, Deadline deadline) {
  for (;;) {
    while (!pieces.empty() && pieces.front().iov_len == 0) pieces = pieces.subspan(1);
    if (pieces.empty()) co_return Ok();
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    ssize_t count = ::sendmsg(socket_.native_handle(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) co_return Broken(fmt::format("send: {}", strerrordesc_np(errno)));
      DSEC_CO_TRY_VOID(co_await Wait(Socket::wait_write, deadline));
      continue;
    }
    for (iovec& piece : pieces) {
      const size_t part = std::min(piece.iov_len, static_cast<size_t>(count));
      piece.iov_base = static_cast<char*>(piece.iov_base) + part;
      piece.iov_len -= part;
      count -= static_cast<ssize_t>(part);
    }
  }
}

Task<size_t> Link::Receive(Deadline deadline) {
  for (;;) {
    const size_t old = input_.size();
    input_.resize(old + kReadBytes);
    const ssize_t count =
        ::recv(socket_.native_handle(), input_.data() + old, kReadBytes, MSG_DONTWAIT);
    const int error = errno;
    input_.resize(old + static_cast<size_t>(std::max<ssize_t>(count, 0)));
    if (count >= 0) {
      got_byte_ = got_byte_ || count > 0;
      co_return static_cast<size_t>(count);
    }
    if (error == EINTR) continue;
    if (error != EAGAIN) co_return Broken(fmt::format("receive: {}", strerrordesc_np(error)));
    DSEC_CO_TRY_VOID(co_await Wait(Socket::wait_read, deadline));
  }
}

Error Protocol(const Error& error) {
  return Error(Code::kInternal, "client.protocol", error.message());
}

Task<void> Link::ReadHead(Deadline deadline) {
  for (;;) {
    auto used = parser_.Head(input_);
    if (!used.ok()) co_return Protocol(used.error());
    input_.erase(0, *used);
    if (parser_.head_done()) {
      if (parser_.head().status / 100 != 1) co_return Ok();
      parser_.Reset();
      continue;
    }
    DSEC_CO_TRY(const size_t count, co_await Receive(deadline));
    if (count == 0) co_return Broken("the server closed the connection before its reply");
  }
}

Task<std::string> Link::ReadBody(size_t max, Deadline deadline) {
  std::string body;
  while (body.empty() && !parser_.body_done()) {
    auto used = parser_.Body(input_, max, body);
    if (!used.ok()) co_return Protocol(used.error());
    input_.erase(0, *used);
    if (!body.empty() || parser_.body_done()) break;
    if (*used > 0 && !input_.empty()) continue;
    DSEC_CO_TRY(const size_t count, co_await Receive(deadline));
    if (count == 0 && !parser_.End().ok())
      co_return Broken("the server closed the connection within its reply");
  }
  co_return body;
}

}  // namespace

struct Client::Impl : std::enable_shared_from_this<Client::Impl> {
  Impl(runtime::Executor on, ClientOptions client_options)
      : executor(std::move(on)), options(std::move(client_options)) {}

  Task<std::unique_ptr<Link>> Connect(Deadline deadline);
  Task<std::unique_ptr<Link>> Exchange(ClientRequest& request, Deadline deadline);
  Task<void> SendRequest(Link& link, ClientRequest& request, Deadline deadline);
  void Return(std::unique_ptr<Link> link) {
    if (idle.size() < options.max_idle && link->Reusable()) idle.push_back(std::move(link));
  }

  const runtime::Executor executor;
  const ClientOptions options;
  std::string unix_path;  // or
  std::string host;
  std::string port;
  std::vector<std::unique_ptr<Link>> idle;
};

namespace {

class Stream final : public ReplyStream {
 public:
  // `done` gets the connection back after the last byte of the body.
  Stream(std::unique_ptr<Link> link, size_t max_line,
         std::function<void(std::unique_ptr<Link>)> done)
      : link_(std::move(link)), lines_(max_line), done_(std::move(done)) {}
  ~Stream() override {
    if (link_->body_done()) done_(std::move(link_));
  }
  const ResponseHead& head() const override { return link_->head(); }
  Task<std::string> Read(size_t max, Deadline deadline) override {
    return link_->ReadBody(max, deadline);
  }
  Task<std::optional<std::string>> ReadLine(Deadline deadline) override {
    for (;;) {
      DSEC_CO_TRY(std::optional<std::string> line, lines_.Next());
      if (line) co_return line;
      DSEC_CO_TRY(const std::string more, co_await link_->ReadBody(kReadBytes, deadline));
      if (more.empty()) {
        if (!lines_.empty()) co_return Broken("the reply ended within a line");
        co_return std::optional<std::string>();
      }
      lines_.Append(more);
    }
  }

 private:
  std::unique_ptr<Link> link_;
  LineBuffer lines_;
  const std::function<void(std::unique_ptr<Link>)> done_;
};

}  // namespace

Task<std::unique_ptr<Link>> Client::Impl::Connect(Deadline deadline) {
  Socket socket(executor);
  asio::steady_timer timer(executor);
  bool timed_out = false;
  asio::ip::tcp::resolver resolver(executor);
  auto flag = std::make_shared<bool>(false);  // set when this frame has ended
  if (!deadline.never()) {
    timer.expires_at(deadline.at());
    timer.async_wait([&, flag](const boost::system::error_code& error) {
      if (error || *flag) return;
      timed_out = true;
      resolver.cancel();
      boost::system::error_code ignored;
      socket.close(ignored);
    });
  }
  const std::string name = unix_path.empty() ? fmt::format("{}:{}", host, port) : unix_path;
  boost::system::error_code failure;
  if (!unix_path.empty()) {
    const asio::local::stream_protocol::endpoint endpoint(unix_path);
    const auto [error] = co_await socket.async_connect(endpoint, kTuple);
    failure = error;
  } else {
    const auto [error, found] = co_await resolver.async_resolve(host, port, kTuple);
    failure = error;
    for (const auto& entry : found) {
      socket = Socket(executor);
      const asio::ip::tcp::endpoint endpoint = entry.endpoint();
      const auto [refused] = co_await socket.async_connect(endpoint, kTuple);
      failure = refused;
      if (!failure || timed_out) break;
    }
    if (!failure) {
      const int on = 1;
      (void)::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
  }
  *flag = true;
  timer.cancel();
  if (timed_out) {
    co_return Error(Code::kDeadlineExceeded, "client.timeout",
                    fmt::format("no connection to {} in time", name));
  }
  if (failure == asio::error::operation_aborted) co_return FromSystem(failure, "connect");
  if (failure) {
    co_return Error(Code::kUnavailable, "client.unreachable",
                    fmt::format("connect to {}: {}", name, failure.message()));
  }
  co_return std::make_unique<Link>(std::move(socket));
}

Task<void> Client::Impl::SendRequest(Link& link, ClientRequest& request, Deadline deadline) {
  std::string head =
      fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\n", request.method, request.target,
                  host.empty() ? std::string("localhost") : fmt::format("{}:{}", host, port));
  for (const Headers* headers : {&options.headers, &std::as_const(request.headers)}) {
    for (const auto& [name, value] : *headers) head += fmt::format("{}: {}\r\n", name, value);
  }
  const bool chunked = request.source && !request.source_length;
  const bool bodiless = request.body.empty() && !request.source && request.method != "POST" &&
                        request.method != "PUT";
  if (chunked) {
    head += "Transfer-Encoding: chunked\r\n";
  } else if (!bodiless) {
    head += fmt::format("Content-Length: {}\r\n",
                        request.source ? *request.source_length : request.body.size());
  }
  head += "\r\n";
  std::array pieces = {Piece(head), Piece(request.body)};
  DSEC_CO_TRY_VOID(co_await link.Send(pieces, deadline));
  if (!request.source) co_return Ok();
  for (;;) {
    auto data = co_await request.source();
    if (!data.ok()) co_return std::move(data).error();
    if (data->empty()) break;
    if (link.Readable())
      co_return Ok();  // the server has answered already: it does not want the rest
    const std::string before = chunked ? fmt::format("{:x}\r\n", data->size()) : "";
    std::array chunk = {Piece(before), Piece(*data), Piece(chunked ? "\r\n" : "")};
    DSEC_CO_TRY_VOID(co_await link.Send(chunk, deadline));
  }
  std::array last = {Piece(chunked ? "0\r\n\r\n" : "")};
  co_return co_await link.Send(last, deadline);
}

Task<std::unique_ptr<Link>> Client::Impl::Exchange(ClientRequest& request, Deadline deadline) {
  for (;;) {
    std::unique_ptr<Link> link;
    while (!idle.empty() && link == nullptr) {
      link = std::move(idle.back());
      idle.pop_back();
      if (!link->Reusable()) link.reset();
    }
    const bool kept = link != nullptr;
    if (!kept) {
      auto fresh = co_await Connect(deadline);
      if (!fresh.ok()) co_return std::move(fresh).error();
      link = std::move(fresh).value();
    }
    link->StartRequest();
    auto sent = co_await SendRequest(*link, request, deadline);
    // A server that refuses a body may answer and close while we send: its answer says more than
    // our broken pipe.
    if (!sent.ok() && sent.error().reason() != "client.connection")
      co_return std::move(sent).error();
    auto read = co_await link->ReadHead(deadline);
    if (read.ok()) co_return link;
    const bool closed_idle = kept && !link->Answered() && request.method == "GET" &&
                             read.error().code() == Code::kUnavailable;
    if (!closed_idle) co_return sent.ok() ? std::move(read).error() : std::move(sent).error();
  }
}

Client::Client(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

Result<std::unique_ptr<Client>> Client::Create(runtime::Executor executor, ClientOptions options) {
  auto impl = std::make_shared<Impl>(std::move(executor), std::move(options));
  std::string_view endpoint = impl->options.endpoint;
  constexpr std::string_view kHttp = "http://";
  constexpr std::string_view kUnix = "unix:";
  const auto bad = [&](std::string_view rule) {
    return Error(Code::kInvalidArgument, "client.endpoint",
                 fmt::format("\"{}\": {}", endpoint, rule))
        .WithField("endpoint");
  };
  if (endpoint.starts_with(kUnix)) {
    impl->unix_path = endpoint.substr(kUnix.size());
    if (!impl->unix_path.starts_with('/') || impl->unix_path.size() > 107) {
      return bad("a Unix socket needs an absolute path of at most 107 bytes");
    }
    return std::unique_ptr<Client>(new Client(std::move(impl)));
  }
  if (!endpoint.starts_with(kHttp)) return bad("must begin with http:// or unix:/");
  std::string_view rest = endpoint.substr(kHttp.size());
  if (rest.ends_with('/')) rest.remove_suffix(1);
  if (rest.find('/') != std::string_view::npos) return bad("must not have a path");
  const size_t colon = rest.rfind(':');
  const bool has_port =
      colon != std::string_view::npos && colon + 1 < rest.size() && rest[rest.size() - 1] != ']';
  std::string_view host = has_port ? rest.substr(0, colon) : rest;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.empty()) return bad("must name a host");
  impl->host = host;
  impl->port = has_port ? rest.substr(colon + 1) : "80";
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Task<Reply> Client::Call(ClientRequest request, Deadline deadline, uint64_t max_body) {
  auto exchanged = co_await impl_->Exchange(request, deadline);
  if (!exchanged.ok()) co_return std::move(exchanged).error();
  std::unique_ptr<Link> link = std::move(exchanged).value();
  Reply reply;
  reply.status = link->head().status;
  reply.fields = link->head().fields;
  while (!link->body_done()) {
    auto more = co_await link->ReadBody(kReadBytes, deadline);
    if (!more.ok()) co_return std::move(more).error();
    if (reply.body.size() + more->size() > max_body) {
      co_return Error(Code::kPayloadTooLarge, "reply.too_large",
                      fmt::format("the reply is above {} bytes", max_body));
    }
    reply.body += *more;
  }
  impl_->Return(std::move(link));
  co_return reply;
}

Task<std::unique_ptr<ReplyStream>> Client::Open(ClientRequest request, Deadline deadline) {
  auto exchanged = co_await impl_->Exchange(request, deadline);
  if (!exchanged.ok()) co_return std::move(exchanged).error();
  co_return std::make_unique<Stream>(std::move(exchanged).value(), impl_->options.max_line_bytes,
                                     [impl = std::weak_ptr(impl_)](std::unique_ptr<Link> link) {
                                       if (const auto alive = impl.lock())
                                         alive->Return(std::move(link));
                                     });
}

}  // namespace dsec::http
