// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/experimental/awaitable_operators.hpp>
#include <optional>
#include <utility>
#include <variant>

#include "apiserver/call.h"

namespace dsec::apiserver {

// A wait that ends at once, with nullopt, when the client goes or the server stops; `wait` is then
// cancelled.
template <typename T>
runtime::Task<std::optional<T>> OrLeave(Call& call, runtime::Task<T> wait) {
  using boost::asio::experimental::awaitable_operators::operator||;
  auto left = call.exchange.attention().Wait(runtime::Deadline::Never());
  auto first = co_await (std::move(wait) || std::move(left));
  if (first.index() == 1) co_return std::optional<T>();
  Result<T>& result = std::get<0>(first);
  // What lasts looks at its key again with each wait.
  DSEC_CO_TRY_VOID(call.StillGood());
  if (!result.ok()) co_return std::move(result).error();
  co_return std::optional<T>(std::move(*result));
}

}  // namespace dsec::apiserver
