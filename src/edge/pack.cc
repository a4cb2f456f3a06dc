// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "edge/edge.h"

namespace dsec::edge {

runtime::Task<v1::PackReply> Edge::Pack(SandboxId id, v1::PackRequest request,
                                        PackProgressFn progress, runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(
      executor, PackHere(std::move(sandbox), std::move(request), std::move(progress), deadline));
}

runtime::Task<v1::PackReply> Edge::PackHere(SandboxPtr sandbox, v1::PackRequest request,
                                            PackProgressFn progress, runtime::Deadline deadline) {
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
  auto reply = co_await instance->Pack(std::move(request), std::move(progress), deadline);
  // It was removed under the pack.
  if (!reply.ok() && reply.error().reason() == sandbox::kRemovedReason) {
    co_return co_await WhyLost(sandbox, deadline);
  }
  co_return reply;
}

runtime::Task<v1::FirstTouchReply> Edge::FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                    runtime::Deadline deadline) {
  runtime::GatePass pass(calls_);
  if (!pass) co_return StoppingError();
  DSEC_CO_TRY(auto sandbox, co_await FindLive(std::move(id)));
  const auto executor = sandbox->executor();
  co_return co_await runtime::On(executor,
                                 FirstTouchHere(std::move(sandbox), std::move(request), deadline));
}

runtime::Task<v1::FirstTouchReply> Edge::FirstTouchHere(SandboxPtr sandbox,
                                                        v1::FirstTouchRequest request,
                                                        runtime::Deadline deadline) {
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
  co_return co_await instance->FirstTouch(std::move(request), deadline);
}

}  // namespace dsec::edge
