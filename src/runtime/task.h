// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>

#include "base/result.h"

// Coroutines on shards. What holds everywhere:
//  - A coroutine stays on the shard where it was started; whatever it awaits, it resumes there.
//  - Failures are values. Coroutines started by Spawn, On, BlockOn and Periodic never see an
//  exception from co_await; one that
//    they throw themselves is logged as "runtime.exception" and becomes kInternal
//    "internal.exception".
//  - A cancelled coroutine (an Asio cancellation signal has reached it) gets kCancelled
//  "task.cancelled" from the wait under way
//    and from every later one. Work that must happen all the same belongs in a coroutine of its
//    own.
namespace dsec::runtime {

template <typename T>
using Task = boost::asio::awaitable<Result<T>>;
using Executor = boost::asio::any_io_executor;

}  // namespace dsec::runtime
