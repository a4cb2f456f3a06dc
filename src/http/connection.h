// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/metrics.h"
#include "http/message.h"
#include "http/parser.h"
#include "http/server.h"
#include "runtime/async_event.h"
#include "runtime/gate.h"

// Internal to src/http: one connection of the server.
namespace dsec::http {

// What the connections of one server share. The counters are atomic, all else is constant.
struct ServerShared {
  ServerOptions options;
  Handler handler;
  std::atomic<size_t> connections = 0;
  std::atomic<size_t> in_flight = 0;
  std::atomic<bool> stopping = false;
  std::atomic<uint64_t> next_request = 0;
  std::string request_prefix;
  metrics::Gauge* open = nullptr;
  metrics::Counter* refused_in_flight = nullptr;
};

// The connections of one shard; touched on that shard alone.
struct ShardState {
  std::list<Connection*> connections;
  std::string date;  // value of the Date header, renewed by Sweep
  MonoTime cut_at = MonoTime::max();

  // Enforces every deadline. Called once each sweep period.
  void Sweep(MonoTime now);
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  Connection(Socket socket, bool tcp, std::shared_ptr<ServerShared> shared,
             std::shared_ptr<ShardState> shard);
  ~Connection();

  // Serves requests until the connection ends. The argument keeps the object alive.
  static boost::asio::awaitable<void> Serve(std::shared_ptr<Connection> self);

  void Sweep(MonoTime now);
  // At a stop: an idle connection is cut, a busy one told.
  void Stop();
  // Makes every wait on the client fail; no reply is finished.
  void Cut();
  // Cut, and whatever the handler waits for is cancelled.
  void Cancel();
  void SetRunning(runtime::Running running) { running_ = std::move(running); }

 private:
  friend class Exchange;

  boost::asio::awaitable<void> Run();
  runtime::Task<bool> ReadHead();
  boost::asio::awaitable<void> Handle();
  boost::asio::awaitable<void> Refuse(const Error& error);
  boost::asio::awaitable<void> Linger();
  void StartRequest();

  // Input. Fill waits for at least one byte; 0 = the peer has shut down its side.
  void Acknowledge();
  runtime::Task<size_t> Fill();
  runtime::Task<size_t> ReceiveInto(char* to, size_t size);
  std::string_view Pending() const { return std::string_view(input_).substr(input_used_); }
  void Consume(size_t bytes);
  ssize_t ReceiveSome();  // appends to input_; as recv
  runtime::Task<void> SendContinue();
  runtime::Task<std::string> ReadBody(size_t max);
  void ArmBodyDeadline();

  void Watch();
  void OnReadable(bool failed);
  void SetGone(bool broken);
  bool PeerIsSilent();

  // Output.
  void ComposeHead(int status, const Headers& headers, std::optional<uint64_t> length);
  runtime::Task<void> Send(std::span<iovec> pieces);
  runtime::Task<void> SendBody(std::string_view data, bool last);

  Error GoneError() const;

  Socket socket_;
  const bool tcp_;
  const std::shared_ptr<ServerShared> shared_ptr_;
  const std::shared_ptr<ShardState> shard_ptr_;
  ServerShared& shared_;
  ShardState& shard_;
  std::optional<std::list<Connection*>::iterator> place_;

  runtime::Running running_;

  RequestParser parser_;
  std::string input_;  // received, not yet used from input_used_ on
  size_t input_used_ = 0;
  bool eof_ = false;     // the peer sends no more
  bool broken_ = false;  // nothing can be sent any more
  bool timed_out_ = false;
  bool watching_ = false;
  bool in_handler_ = false;
  bool first_ = true;
  MonoTime deadline_ = MonoTime::max();  // of the wait under way
  MonoTime probe_at_ = MonoTime::max();  // next look at a watched peer
  runtime::AsyncEvent input_event_;
  runtime::AsyncEvent attention_;

  std::string request_id_;
  uint64_t body_read_ = 0;
  std::chrono::nanoseconds body_waited_{0};
  bool continue_owed_ = false;

  std::string out_;  // head and chunk framing that wait for the next send
  bool begun_ = false;
  int status_ = 0;
  bool finished_ = false;
  bool chunked_ = false;
  bool keep_ = false;
  std::optional<uint64_t> left_to_write_;
};

}  // namespace dsec::http
