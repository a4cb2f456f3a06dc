// SPDX-License-Identifier: Apache-2.0
#include "http/blocking_client.h"

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <exception>

namespace dsec::http {
namespace {

runtime::Deadline After(std::chrono::nanoseconds timeout) {
  return timeout.count() == 0 ? runtime::Deadline::Never() : runtime::Deadline::After(timeout);
}

runtime::Task<std::string> CallPlain(
    std::shared_ptr<const std::function<Result<std::string>()>> next) {
  co_return (*next)();
}

}  // namespace

struct BlockingClient::Loop {
  boost::asio::io_context context{1};
  std::atomic<bool> aborted = false;

  static Error Aborted() { return Error(Code::kCancelled, "client.aborted", "ended on request"); }

  template <typename T>
  static boost::asio::awaitable<void> Into(runtime::Task<T> task,
                                           std::optional<Result<T>>& result) {
    result.emplace(co_await std::move(task));
  }

  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    std::optional<Result<T>> result;
    bool ended = false;
    // Before the flag is read: a stop that comes later than that ends the loop.
    context.restart();
    if (aborted) return Aborted();
    boost::asio::co_spawn(context, Into(std::move(task), result),
                          [&ended](const std::exception_ptr&) { ended = true; });
    // Not run(): a timer of another stream may be pending for long.
    while (!ended && context.run_one() > 0) {
    }
    // What was suspended is never resumed, only destroyed.
    if (!result && aborted) return Aborted();
    if (!result)
      return Error(Code::kInternal, "internal.exception", "the call ended without a result");
    return std::move(*result);
  }
};

BlockingClient::BlockingClient() : loop_(std::make_unique<Loop>()) {}
BlockingClient::~BlockingClient() = default;

Result<std::unique_ptr<BlockingClient>> BlockingClient::Create(ClientOptions options) {
  std::unique_ptr<BlockingClient> client(new BlockingClient());
  DSEC_TRY(client->client_,
           Client::Create(client->loop_->context.get_executor(), std::move(options)));
  return client;
}

Result<Reply> BlockingClient::Call(ClientRequest request, std::chrono::nanoseconds timeout,
                                   uint64_t max_body) {
  return loop_->Run(client_->Call(std::move(request), After(timeout), max_body));
}

Result<std::unique_ptr<BlockingClient::Stream>> BlockingClient::Open(
    ClientRequest request, std::chrono::nanoseconds timeout) {
  DSEC_TRY(auto stream, loop_->Run(client_->Open(std::move(request), After(timeout))));
  return std::unique_ptr<Stream>(new Stream(*this, std::move(stream)));
}

void BlockingClient::Abort() {
  loop_->aborted = true;
  loop_->context.stop();
}

BodySource BlockingClient::Source(std::function<Result<std::string>()> next) {
  auto shared = std::make_shared<const std::function<Result<std::string>()>>(std::move(next));
  return [shared] { return CallPlain(shared); };
}

BlockingClient::Stream::Stream(BlockingClient& client, std::unique_ptr<ReplyStream> stream)
    : client_(client), stream_(std::move(stream)) {}
BlockingClient::Stream::~Stream() = default;

const ResponseHead& BlockingClient::Stream::head() const { return stream_->head(); }

Result<std::string> BlockingClient::Stream::Read(size_t max, std::chrono::nanoseconds timeout) {
  return client_.loop_->Run(stream_->Read(max, After(timeout)));
}

Result<std::optional<std::string>> BlockingClient::Stream::ReadLine(
    std::chrono::nanoseconds timeout) {
  return client_.loop_->Run(stream_->ReadLine(After(timeout)));
}

}  // namespace dsec::http
