// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "edge/edge.h"

namespace dsec::edge {

template <typename Reply, typename Call>
runtime::Task<Reply> Edge::OnInstance(SandboxPtr sandbox, Call call, runtime::Deadline deadline) {
  DSEC_CO_TRY_VOID(co_await AgentOf(sandbox, false, deadline));
  if (!sandbox->activity.has_value()) co_return GoneError(sandbox->stop);
  sandbox->activity->CallBegan(NowMs());
  sandbox->Touch(NowMs());
  const OnExit end([&] {
    if (!sandbox->activity.has_value()) return;
    sandbox->activity->CallEnded(NowMs());
    Arm(sandbox);
  });
  co_await LiftClaim(sandbox);
  const auto instance = sandbox->instance;
  if (instance == nullptr) co_return co_await WhyLost(sandbox, deadline);
  auto reply = co_await call(*instance);
  // It was removed under the call.
  if (!reply.ok() && reply.error().reason() == sandbox::kRemovedReason) {
    co_return co_await WhyLost(sandbox, deadline);
  }
  co_return reply;
}

runtime::Task<v1::PackReply> Edge::Pack(SandboxId id, v1::PackRequest request,
                                        PackProgressFn progress, runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  auto call = [request = std::move(request), progress = std::move(progress),
               deadline](auto& instance) mutable {
    return instance.Pack(std::move(request), std::move(progress), deadline);
  };
  co_return co_await runtime::On(
      executor, OnInstance<v1::PackReply>(std::move(sandbox), std::move(call), deadline));
}

runtime::Task<v1::FirstTouchReply> Edge::FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                    runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  auto call = [request = std::move(request), deadline](auto& instance) mutable {
    return instance.FirstTouch(std::move(request), deadline);
  };
  co_return co_await runtime::On(
      executor, OnInstance<v1::FirstTouchReply>(std::move(sandbox), std::move(call), deadline));
}

}  // namespace dsec::edge
