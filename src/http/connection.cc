// SPDX-License-Identifier: Apache-2.0
#include "http/connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>

#include "base/log.h"
#include "http/address.h"
#include "http/error_body.h"

namespace dsec::http {
namespace {

constexpr size_t kFirstRead = 4096;         // bytes asked for when nothing is known yet
constexpr size_t kBodyRead = 64 << 10;      // and within a body
constexpr size_t kMaxPipelined = 64 << 10;  // received ahead of the request that is being served
constexpr size_t kDrainLimit =
    64 << 10;  // of a body that the handler did not want: read over to keep the connection
constexpr size_t kKeepBuffer = 16 << 10;  // capacity that an idle connection may hold
constexpr size_t kDirectRead = 16 << 10;  // from here on a body is received where it belongs
constexpr uint64_t kDirectStep = 128 << 10;
constexpr auto kProbePeriod = std::chrono::seconds(5);

constexpr auto kTuple = boost::asio::as_tuple(boost::asio::use_awaitable);

iovec Piece(std::string_view text) { return {const_cast<char*>(text.data()), text.size()}; }

bool IsRequestId(std::string_view text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           c == '.' || c == '-';
  });
}

void AppendDecimal(std::string& out, uint64_t value) {
  const fmt::format_int text(value);
  out.append(text.data(), text.size());
}

}  // namespace

void ShardState::Sweep(MonoTime now) {
  date = HttpDate(Clock::System().Wall());
  // Sweeping ends no coroutine by itself: what it cancels runs later, so the list stands still.
  for (Connection* connection : connections) {
    if (now >= cut_at) connection->Cancel();
    connection->Sweep(now);
  }
}

Connection::Connection(Socket socket, bool tcp, std::shared_ptr<ServerShared> shared,
                       std::shared_ptr<ShardState> shard)
    : socket_(std::move(socket)),
      tcp_(tcp),
      shared_ptr_(std::move(shared)),
      shard_ptr_(std::move(shard)),
      shared_(*shared_ptr_),
      shard_(*shard_ptr_),
      parser_(shared_.options.max_head_bytes) {
  shared_.open->Add(1);
}

Connection::~Connection() {
  shared_.open->Add(-1);
  shared_.connections.fetch_sub(1, std::memory_order_relaxed);
}

boost::asio::awaitable<void> Connection::Serve(std::shared_ptr<Connection> self) {
  self->place_ = self->shard_.connections.insert(self->shard_.connections.end(), self.get());
  try {
    co_await self->Run();
  } catch (const std::exception& error) {
    log::Error("http.exception", {{"request_id", self->request_id_}, {"what", error.what()}});
  }
  self->shard_.connections.erase(*self->place_);
  // A watch under way holds the object until its handler has run.
  boost::system::error_code ignored;
  self->socket_.close(ignored);
}

boost::asio::awaitable<void> Connection::Run() {
  for (;;) {
    if (Pending().empty() && input_.capacity() > kKeepBuffer) {
      input_ = {};
      input_used_ = 0;
    }
    parser_.Reset();
    auto head = co_await ReadHead();
    if (!head.ok()) {
      if (head.error().code() != Code::kCancelled) co_await Refuse(head.error());
      co_return;
    }
    if (!*head) co_return;
    first_ = false;
    co_await Handle();
    if (!finished_ || broken_) co_return;
    // Small remains of a body are read over, so that the connection can go on.
    while (keep_ && !parser_.body_done()) {
      auto more = co_await ReadBody(kDrainLimit);
      if (!more.ok()) co_return;
    }
    if (!keep_ || (eof_ && Pending().empty())) {
      co_await Linger();
      co_return;
    }
  }
}

runtime::Task<bool> Connection::ReadHead() {
  const auto& options = shared_.options;
  bool started = first_;
  deadline_ = Clock::System().Mono() + (first_ ? options.head_timeout : options.idle_timeout);
  for (;;) {
    if (!Pending().empty()) {
      if (!started) deadline_ = Clock::System().Mono() + options.head_timeout;
      started = true;
      auto used = parser_.Head(Pending());
      if (!used.ok()) co_return std::move(used).error();
      Consume(*used);
      if (parser_.head_done()) {
        deadline_ = MonoTime::max();
        co_return true;
      }
    }
    const bool idle = Pending().empty() && !parser_.head_started();
    if (eof_ || (idle && shared_.stopping.load(std::memory_order_relaxed))) co_return false;
    auto more = co_await Fill();
    if (more.ok()) continue;
    if (idle || more.error().code() != Code::kDeadlineExceeded) co_return false;
    co_return Error(Code::kDeadlineExceeded, "request.timeout",
                    "the head of the request did not come in time");
  }
}

void Connection::StartRequest() {
  const RequestHead& head = parser_.head();
  const auto given = head.fields.Find("X-Request-Id");
  if (given && IsRequestId(*given)) {
    request_id_ = *given;
  } else {
    request_id_ = shared_.request_prefix;
    AppendDecimal(request_id_, shared_.next_request.fetch_add(1, std::memory_order_relaxed));
  }
  body_read_ = 0;
  body_waited_ = {};
  continue_owed_ = head.expect_continue;
  out_.clear();
  begun_ = false;
  finished_ = false;
  chunked_ = false;
  left_to_write_.reset();
  keep_ = head.keep_alive;
  attention_.Reset();
}

boost::asio::awaitable<void> Connection::Handle() {
  StartRequest();
  Exchange exchange(*this);
  const size_t before = shared_.in_flight.fetch_add(1, std::memory_order_relaxed);
  if (before >= shared_.options.max_in_flight) {
    shared_.in_flight.fetch_sub(1, std::memory_order_relaxed);
    shared_.refused_in_flight->Add();
    const Error error(Code::kUnavailable, "http.overloaded",
                      fmt::format("{} requests are being served", before));
    (void)co_await exchange.Reply(503, {{"Content-Type", "application/json"}, {"Retry-After", "1"}},
                                  ErrorBody(error, request_id_));
    co_return;
  }
  in_handler_ = true;
  try {
    co_await shared_.handler(exchange);
  } catch (const std::exception& error) {
    log::Error("http.exception", {{"request_id", request_id_}, {"what", error.what()}});
  }
  in_handler_ = false;
  probe_at_ = MonoTime::max();
  deadline_ = MonoTime::max();
  shared_.in_flight.fetch_sub(1, std::memory_order_relaxed);
  if (begun_) co_return;
  const Error error(Code::kInternal, "internal.no_reply", "the request was not answered");
  (void)co_await exchange.Reply(500, {{"Content-Type", "application/json"}},
                                ErrorBody(error, request_id_));
}

boost::asio::awaitable<void> Connection::Refuse(const Error& error) {
  StartRequest();
  keep_ = false;
  Exchange exchange(*this);
  (void)co_await exchange.Reply(StatusOf(error), {{"Content-Type", "application/json"}},
                                ErrorBody(error, request_id_));
  co_await Linger();
}

boost::asio::awaitable<void> Connection::Linger() {
  // Closing with unread bytes would send a reset, which may destroy the reply before the client has
  // read it.
  if (broken_ || (parser_.body_done() && Pending().empty())) co_return;
  (void)::shutdown(socket_.native_handle(), SHUT_WR);
  const MonoTime end = Clock::System().Mono() + 6 * shared_.options.linger;
  while (!eof_ && !shared_.stopping.load(std::memory_order_relaxed)) {
    Consume(Pending().size());
    deadline_ = std::min(end, Clock::System().Mono() + shared_.options.linger);
    auto more = co_await Fill();
    if (!more.ok() || Clock::System().Mono() >= end) co_return;
  }
}

// --- input ---

void Connection::Consume(size_t bytes) {
  input_used_ += bytes;
  if (input_used_ == input_.size()) {
    input_.clear();
    input_used_ = 0;
  }
}

ssize_t Connection::ReceiveSome() {
  if (input_used_ > 0) {
    input_.erase(0, input_used_);
    input_used_ = 0;
  }
  const size_t old = input_.size();
  const size_t want = parser_.head_done() && !parser_.body_done() ? kBodyRead : kFirstRead;
  input_.resize(old + want);
  const ssize_t count = ::recv(socket_.native_handle(), input_.data() + old, want, MSG_DONTWAIT);
  const int error = errno;
  input_.resize(old + static_cast<size_t>(std::max<ssize_t>(count, 0)));
  errno = error;
  return count;
}

// A client with Nagle's algorithm that sends head and body apart holds the body back until the head
// is acknowledged, which the kernel delays by 40 ms (tcp(7), TCP_QUICKACK).
void Connection::Acknowledge() {
  if (!tcp_) return;
  const int on = 1;
  (void)::setsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_QUICKACK, &on, sizeof(on));
}

runtime::Task<size_t> Connection::Fill() {
  for (;;) {
    if (broken_) co_return GoneError();
    if (eof_) co_return size_t{0};
    if (watching_) {
      const size_t before = input_.size() - input_used_;
      input_event_.Reset();
      (void)co_await input_event_.Wait(runtime::Deadline::Never());
      if (std::exchange(timed_out_, false)) {
        co_return Error(Code::kDeadlineExceeded, "request.timeout", "the client is too slow");
      }
      const size_t now = input_.size() - input_used_;
      if (now > before) co_return now - before;
      continue;
    }
    const ssize_t count = ReceiveSome();
    if (count > 0) co_return static_cast<size_t>(count);
    if (count == 0) {
      SetGone(/*broken=*/false);
      co_return size_t{0};
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      SetGone(/*broken=*/true);
      co_return GoneError();
    }
    if (parser_.head_started()) Acknowledge();
    const auto [error] = co_await socket_.async_wait(Socket::wait_read, kTuple);
    if (std::exchange(timed_out_, false)) {
      co_return Error(Code::kDeadlineExceeded, "request.timeout", "the client is too slow");
    }
    if (error) co_return GoneError();
  }
}

// As Fill, into the caller's memory; only while nothing is pending and no watch runs.
runtime::Task<size_t> Connection::ReceiveInto(char* to, size_t size) {
  for (;;) {
    if (broken_) co_return GoneError();
    const ssize_t count = ::recv(socket_.native_handle(), to, size, MSG_DONTWAIT);
    if (count > 0) co_return static_cast<size_t>(count);
    if (count == 0) {
      SetGone(/*broken=*/false);
      co_return size_t{0};
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      SetGone(/*broken=*/true);
      co_return GoneError();
    }
    const MonoTime before = Clock::System().Mono();
    ArmBodyDeadline();
    Acknowledge();
    const auto [error] = co_await socket_.async_wait(Socket::wait_read, kTuple);
    deadline_ = MonoTime::max();
    body_waited_ += Clock::System().Mono() - before;
    if (std::exchange(timed_out_, false)) {
      co_return Error(Code::kDeadlineExceeded, "request.timeout",
                      "the body of the request comes too slowly");
    }
    if (error) co_return GoneError();
  }
}

// Only time spent waiting for the client counts against it.
void Connection::ArmBodyDeadline() {
  const std::chrono::nanoseconds earned(body_read_ * 1'000'000'000 / shared_.options.min_body_rate);
  deadline_ = Clock::System().Mono() + shared_.options.body_patience + earned - body_waited_;
}

runtime::Task<void> Connection::SendContinue() {
  continue_owed_ = false;
  if (begun_ || !Pending().empty()) co_return Ok();
  std::array pieces = {Piece("HTTP/1.1 100 Continue\r\n\r\n")};
  co_return co_await Send(pieces);
}

runtime::Task<std::string> Connection::ReadBody(size_t max) {
  if (continue_owed_) {
    auto sent = co_await SendContinue();
    if (!sent.ok()) co_return std::move(sent).error();
  }
  std::string body;
  while (body.size() < max && !parser_.body_done()) {
    if (!Pending().empty()) {
      const size_t before = body.size();
      auto used = parser_.Body(Pending(), max - body.size(), body);
      if (!used.ok()) {
        keep_ = false;
        co_return std::move(used).error();
      }
      Consume(*used);
      body_read_ += body.size() - before;
      if (*used > 0) continue;
    }
    Result<size_t> more = size_t{0};
    // In steps, so that memory follows what has come and not what was announced.
    const auto direct = static_cast<size_t>(
        std::min<uint64_t>({parser_.plain_left(), max - body.size(), kDirectStep}));
    if (direct >= kDirectRead && Pending().empty() && !watching_) {
      const size_t before = body.size();
      body.resize(before + direct);
      more = co_await ReceiveInto(body.data() + before, direct);
      const size_t count = more.ok() ? *more : 0;
      body.resize(before + count);
      parser_.Skip(count);
      body_read_ += count;
    } else {
      const MonoTime before = Clock::System().Mono();
      ArmBodyDeadline();
      more = co_await Fill();
      deadline_ = MonoTime::max();
      body_waited_ += Clock::System().Mono() - before;
    }
    if (!more.ok()) {
      keep_ = false;
      co_return std::move(more).error();
    }
    if (*more == 0) {
      SetGone(
          /*broken=*/true);  // half a body: whatever the reply is, nobody may take it for the whole
      co_return GoneError();
    }
  }
  co_return body;
}

// --- watching a client whose request is being served ---

void Connection::Watch() {
  if (watching_ || eof_ || broken_ || input_.size() - input_used_ >= kMaxPipelined) return;
  watching_ = true;
  socket_.async_wait(Socket::wait_read,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       self->watching_ = false;
                       self->OnReadable(static_cast<bool>(error));
                     });
}

void Connection::OnReadable(bool failed) {
  if (!socket_.is_open()) return;
  if (!failed) {
    const ssize_t count = ReceiveSome();
    if (count == 0) {
      SetGone(/*broken=*/false);
    } else if (count < 0 && errno != EAGAIN && errno != EINTR) {
      SetGone(/*broken=*/true);
    } else if (in_handler_) {
      Watch();
    }
  } else if (in_handler_ && !timed_out_) {
    Watch();  // a wait of the writing side was cancelled together with ours
  }
  input_event_.Set();
}

void Connection::SetGone(bool broken) {
  eof_ = true;
  broken_ = broken_ || broken;
  attention_.Set();
  input_event_.Set();
}

bool Connection::PeerIsSilent() {
  if (!tcp_) return false;
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return info.tcpi_unacked > 0 &&
         std::chrono::milliseconds(info.tcpi_last_ack_recv) >= shared_.options.peer_patience;
}

void Connection::Sweep(MonoTime now) {
  if (now >= probe_at_) {
    probe_at_ =
        now + std::min<std::chrono::nanoseconds>(kProbePeriod, shared_.options.peer_patience);
    if (PeerIsSilent()) Cut();
  }
  if (now < deadline_) return;
  deadline_ = MonoTime::max();
  timed_out_ = true;
  boost::system::error_code ignored;
  socket_.cancel(ignored);
}

void Connection::Stop() {
  if (in_handler_) {
    attention_.Set();
  } else if (Pending().empty()) {
    Cut();
  }
}

void Connection::Cut() {
  SetGone(/*broken=*/true);
  boost::system::error_code ignored;
  socket_.cancel(ignored);
}

void Connection::Cancel() {
  Cut();
  running_.Cancel();
}

Error Connection::GoneError() const {
  return Error(Code::kCancelled, "client.gone", "the client has gone");
}

// --- output ---

void Connection::ComposeHead(int status, const Headers& headers, std::optional<uint64_t> length) {
  const RequestHead& head = parser_.head();
  begun_ = true;
  status_ = status;
  chunked_ = !length && status != 204 && head.http11;
  left_to_write_ = status == 204 ? 0 : length;
  if (!length && status != 204 && !head.http11) keep_ = false;
  // A client that waits for 100, or still has much to send, cannot be held to what it may do next.
  if (!parser_.body_done() &&
      (continue_owed_ || parser_.plain_left() == 0 || parser_.plain_left() > kDrainLimit)) {
    keep_ = false;
  }
  if ((eof_ && Pending().empty()) || shared_.stopping.load(std::memory_order_relaxed))
    keep_ = false;
  out_ += "HTTP/1.1 ";
  AppendDecimal(out_, static_cast<uint64_t>(status));
  out_ += ' ';
  out_ += StatusText(status);
  out_ += "\r\nDate: ";
  out_ += shard_.date;
  out_ += "\r\nX-Request-Id: ";
  out_ += request_id_;
  out_ += "\r\n";
  for (const auto& [name, value] : headers) {
    out_ += name;
    out_ += ": ";
    out_ += value;
    out_ += "\r\n";
  }
  if (chunked_) {
    out_ += "Transfer-Encoding: chunked\r\n";
  } else if (length && status != 204) {
    out_ += "Content-Length: ";
    AppendDecimal(out_, *length);
    out_ += "\r\n";
  }
  if (!keep_) {
    out_ += "Connection: close\r\n";
  } else if (!head.http11) {
    out_ += "Connection: keep-alive\r\n";
  }
  out_ += "\r\n";
}

runtime::Task<void> Connection::Send(std::span<iovec> pieces) {
  for (;;) {
    while (!pieces.empty() && pieces.front().iov_len == 0) pieces = pieces.subspan(1);
    if (pieces.empty()) co_return Ok();
    if (broken_) co_return GoneError();
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    ssize_t count = ::sendmsg(socket_.native_handle(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      for (iovec& piece : pieces) {
        const size_t part = std::min(piece.iov_len, static_cast<size_t>(count));
        piece.iov_base = static_cast<char*>(piece.iov_base) + part;
        piece.iov_len -= part;
        count -= static_cast<ssize_t>(part);
      }
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      SetGone(/*broken=*/true);
      co_return GoneError();
    }
    deadline_ = Clock::System().Mono() + shared_.options.write_patience;
    const auto [error] = co_await socket_.async_wait(Socket::wait_write, kTuple);
    deadline_ = MonoTime::max();
    if (error || std::exchange(timed_out_, false)) {
      SetGone(/*broken=*/true);
      co_return GoneError();
    }
  }
}

runtime::Task<void> Connection::SendBody(std::string_view data, bool last) {
  std::string_view tail;
  if (chunked_) {
    if (!data.empty()) {
      fmt::format_to(std::back_inserter(out_), "{:x}\r\n", data.size());
      tail = last ? "\r\n0\r\n\r\n" : "\r\n";
    } else if (last) {
      tail = "0\r\n\r\n";
    }
  } else if (left_to_write_) {
    if (data.size() > *left_to_write_ || (last && data.size() < *left_to_write_)) {
      co_return Error(Code::kInternal, "http.length", "the body is not as long as was announced");
    }
    *left_to_write_ -= data.size();
  }
  std::array pieces = {Piece(out_), Piece(data), Piece(tail)};
  auto sent = co_await Send(pieces);
  out_.clear();
  if (last && sent.ok()) finished_ = true;
  co_return sent;
}

// --- Exchange ---

const RequestHead& Exchange::head() const { return connection_.parser_.head(); }
const std::string& Exchange::request_id() const { return connection_.request_id_; }
bool Exchange::body_done() const { return connection_.parser_.body_done(); }
bool Exchange::begun() const { return connection_.begun_; }
int Exchange::status() const { return connection_.begun_ ? connection_.status_ : 0; }
bool Exchange::left() const { return connection_.eof_ || connection_.broken_ || stopping(); }
bool Exchange::stopping() const {
  return connection_.shared_.stopping.load(std::memory_order_relaxed);
}

std::string Exchange::Peer() const {
  if (!connection_.tcp_) return "unix";
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(connection_.socket_.native_handle(), reinterpret_cast<sockaddr*>(&address),
                    &size) != 0) {
    return "gone";
  }
  return FormatAddress(address);
}

runtime::Task<std::string> Exchange::ReadAll(uint64_t limit) {
  const auto too_large = [&] {
    return Error(Code::kPayloadTooLarge, "request.too_large",
                 fmt::format("the body is above {} bytes", limit));
  };
  if (head().framing.length.value_or(0) > limit) co_return too_large();
  auto body = co_await connection_.ReadBody(static_cast<size_t>(limit));
  if (!body.ok()) co_return body;
  if (!body_done()) {
    // The end of a chunked body may still be to come, a further byte may not.
    auto more = co_await connection_.ReadBody(1);
    if (!more.ok()) co_return more;
    if (!more->empty()) co_return too_large();
  }
  co_return body;
}

runtime::Task<std::string> Exchange::Read(size_t max) { return connection_.ReadBody(max); }

runtime::Task<void> Exchange::Reply(int status, const Headers& headers, std::string_view body) {
  connection_.ComposeHead(status, headers, body.size());
  return connection_.SendBody(body, /*last=*/true);
}

void Exchange::Begin(int status, const Headers& headers, std::optional<uint64_t> length) {
  connection_.ComposeHead(status, headers, length);
}

runtime::Task<void> Exchange::Flush() { return connection_.SendBody({}, /*last=*/false); }
runtime::Task<void> Exchange::Write(std::string_view data) {
  return connection_.SendBody(data, /*last=*/false);
}
runtime::Task<void> Exchange::WriteLast(std::string_view data) {
  return connection_.SendBody(data, /*last=*/true);
}

runtime::Task<void> Exchange::End(const Headers& trailers) {
  if (trailers.empty() || !connection_.chunked_) return connection_.SendBody({}, /*last=*/true);
  std::string& out = connection_.out_;
  out += "0\r\n";
  for (const auto& [name, value] : trailers) out += fmt::format("{}: {}\r\n", name, value);
  out += "\r\n";
  connection_.chunked_ = false;  // the framing is complete
  return connection_.SendBody({}, /*last=*/true);
}

bool Exchange::Gone() const {
  if (connection_.eof_ || connection_.broken_) return true;
  char byte = 0;
  const ssize_t count =
      ::recv(connection_.socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

runtime::AsyncEvent& Exchange::attention() {
  if (connection_.probe_at_ == MonoTime::max()) connection_.probe_at_ = Clock::System().Mono();
  connection_.Watch();
  if (stopping() || connection_.eof_) connection_.attention_.Set();
  return connection_.attention_;
}

}  // namespace dsec::http
