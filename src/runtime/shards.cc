// SPDX-License-Identifier: Apache-2.0
#include "runtime/shards.h"

#include <fmt/format.h>
#include <pthread.h>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <exception>
#include <functional>
#include <thread>

#include "base/check.h"
#include "base/log.h"

namespace dsec::runtime {
namespace {

// Lets every context drop its suspended coroutines while all contexts still exist: what dies in one
// may hold work of another.
class Context : public boost::asio::io_context {
 public:
  Context() : io_context(1) {}
  void Shutdown() { shutdown(); }
};

boost::asio::awaitable<void> Guarded(boost::asio::awaitable<void> work) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  try {
    co_await std::move(work);
  } catch (...) {
    (void)internal::CurrentException();
  }
}

}  // namespace

struct Shards::Shard {
  Shard() : work(context.get_executor()) {}

  void Run(size_t index) {
    pthread_setname_np(pthread_self(), fmt::format("shard-{}", index).c_str());
    for (;;) {
      try {
        context.run();
        return;
      } catch (...) {
        (void)internal::CurrentException();
      }
    }
  }

  Context context;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work;
  std::thread thread;
};

Shards::Shards(size_t count) {
  DSEC_CHECK(count > 0);
  for (size_t i = 0; i < count; ++i) shards_.push_back(std::make_unique<Shard>());
  for (size_t i = 0; i < count; ++i) {
    shards_[i]->thread = std::thread([shard = shards_[i].get(), i] { shard->Run(i); });
  }
}

Shards::~Shards() {
  Stop();
  for (const auto& shard : shards_) shard->context.Shutdown();
}

Executor Shards::at(size_t index) const {
  DSEC_CHECK(index < shards_.size());
  return shards_[index]->context.get_executor();
}

Executor Shards::For(std::string_view key) const {
  return at(std::hash<std::string_view>()(key) % shards_.size());
}

void Shards::Stop() {
  for (const auto& shard : shards_) shard->context.stop();
  for (const auto& shard : shards_) {
    if (!shard->thread.joinable()) continue;
    DSEC_CHECK(shard->thread.get_id() != std::this_thread::get_id());
    shard->thread.join();
  }
}

namespace internal {

struct Remote {
  Executor executor;
  boost::asio::cancellation_signal signal;  // on `executor` alone
};

void StartDetached(const Executor& executor, boost::asio::awaitable<void> work) {
  boost::asio::co_spawn(executor, Guarded(std::move(work)), boost::asio::detached);
}

std::shared_ptr<Remote> StartRemote(const Executor& executor, boost::asio::awaitable<void> work) {
  auto remote = std::make_shared<Remote>();
  remote->executor = executor;
  // The slot is set up where it is used; the handler keeps the signal alive as long as the
  // coroutine can be reached by it.
  boost::asio::post(executor, [remote, work = std::move(work)]() mutable {
    boost::asio::co_spawn(remote->executor, Guarded(std::move(work)),
                          boost::asio::bind_cancellation_slot(
                              remote->signal.slot(), [remote](const std::exception_ptr&) {}));
  });
  return remote;
}

void CancelRemote(const std::shared_ptr<Remote>& remote) {
  boost::asio::post(remote->executor,
                    [remote] { remote->signal.emit(boost::asio::cancellation_type::terminal); });
}

Error CurrentException() {
  std::string what = "unknown";
  try {
    throw;
  } catch (const std::exception& exception) {
    what = exception.what();
  } catch (...) {
  }
  log::Error("runtime.exception", {{"what", what}});
  return Error(Code::kInternal, "internal.exception", std::move(what));
}

}  // namespace internal
}  // namespace dsec::runtime
