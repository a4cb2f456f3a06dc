// SPDX-License-Identifier: Apache-2.0
#include "sandbox/fd_wait.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "runtime/async_event.h"

namespace dsec::sandbox {
namespace {

namespace asio = boost::asio;
using asio::experimental::awaitable_operators::operator||;

// Watches a descriptor that somebody else owns.
class Watched {
 public:
  explicit Watched(const runtime::Executor& executor) : descriptor_(executor) {}
  ~Watched() { descriptor_.release(); }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  asio::posix::stream_descriptor& operator*() { return descriptor_; }

 private:
  asio::posix::stream_descriptor descriptor_;
};

runtime::Task<void> WaitForEver(int fd, FdEvent event) {
  Watched watched(co_await asio::this_coro::executor);
  boost::system::error_code error;
  (*watched).assign(fd, error);
  if (error) co_return Error::FromErrno(error.value(), "sandbox.wait", "watch a descriptor");
  const auto what = event == FdEvent::kReadable ? asio::posix::descriptor_base::wait_read
                                                : asio::posix::descriptor_base::wait_error;
  const auto [failure] = co_await (*watched).async_wait(what, asio::as_tuple(asio::use_awaitable));
  if (failure == asio::error::operation_aborted) {
    co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
  }
  if (failure) co_return Error::FromErrno(failure.value(), "sandbox.wait", "wait for a descriptor");
  co_return Ok();
}

}  // namespace

runtime::Task<void> WaitFd(int fd, FdEvent event, runtime::Deadline deadline) {
  if (deadline.never()) co_return co_await WaitForEver(fd, event);
  auto first = co_await (WaitForEver(fd, event) || runtime::SleepUntil(deadline));
  if (first.index() == 0) co_return std::get<0>(std::move(first));
  auto slept = std::get<1>(std::move(first));
  if (!slept.ok()) co_return slept;
  co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "the deadline has passed");
}

runtime::Task<bool> WaitReadableOrClosed(int fd, std::shared_ptr<rpc::Channel> channel) {
  auto first = co_await (WaitForEver(fd, FdEvent::kReadable) || channel->WaitClosed());
  if (first.index() == 0) {
    auto readable = std::get<0>(std::move(first));
    if (!readable.ok()) co_return std::move(readable).error();
    co_return true;
  }
  auto closed = std::get<1>(std::move(first));
  if (!closed.ok()) co_return std::move(closed).error();
  co_return false;
}

}  // namespace dsec::sandbox
