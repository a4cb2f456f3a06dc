// SPDX-License-Identifier: Apache-2.0
#include "cluster/member.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "ca/join_token.h"
#include "cluster/call_error.h"
#include "cluster/membership.h"
#include "rpc/channel.h"
#include "runtime/async_event.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kAskTime{10};
constexpr seconds kRenewRetry{60};
constexpr seconds kFenceTime{300};
// The wall clock may be moved: it is looked at again after this time at the latest.
constexpr seconds kLongestSleep{60};

}  // namespace

Member::Member(runtime::Executor home, MemberOptions options, Word word)
    : home_(std::move(home)), options_(std::move(options)), word_(std::move(word)) {}

namespace {

// What says that this apiserver cannot help now, and nothing about the request.
bool AnotherMayHelp(const Error& error) {
  return error.code() == Code::kUnavailable || error.code() == Code::kDeadlineExceeded ||
         error.code() == Code::kInternal;
}

}  // namespace

Task<std::string> Member::Ask(const char* method, std::string request,
                              std::shared_ptr<const rpc::TlsContext> context, std::string pin,
                              Deadline deadline) {
  Error last(Code::kUnavailable, "member.no_apiserver", "no apiserver is configured");
  for (size_t tried = 0; tried < options_.apiservers.size(); ++tried) {
    const std::string& address = options_.apiservers[next_apiserver_ % options_.apiservers.size()];
    DSEC_CO_TRY(const HostPort place, ParseHostPort(address, "apiservers"));
    const Deadline by = deadline.Sooner(Deadline::After(kAskTime));
    auto channel =
        co_await rpc::Channel::ConnectTls(home_, place.host, place.port, context,
                                          rpc::TlsExpect{.roles = {"apiserver"}, .pin = pin}, by);
    auto answer = Result<std::string>(std::string());
    if (channel.ok()) {
      answer = co_await (*channel)->CallRaw(kClusterService, method, request, by);
    } else {
      answer = channel.error();
    }
    if (answer.ok()) {
      v1::EdgeAnswer parsed;
      if (!parsed.ParseFromString(*answer)) {
        last = Error(Code::kUnavailable, "member.no_apiserver",
                     fmt::format("apiserver {}: the answer does not parse", address));
      } else if (parsed.has_error()) {
        last = FromWire(parsed.error());
        if (!AnotherMayHelp(last)) co_return std::move(last);
        (void)std::move(last).Context("apiserver {}", address);
      } else {
        co_return std::move(*parsed.mutable_body());
      }
    } else {
      if (answer.error().code() == Code::kCancelled) co_return std::move(answer).error();
      last = Error(Code::kUnavailable, "member.no_apiserver",
                   fmt::format("apiserver {}: {}", address, answer.error().ToString()));
    }
    ++next_apiserver_;
  }
  co_return last;
}

Result<void> Member::Take(const ca::KeyAndRequest& made, const v1::JoinReply& reply) {
  ca::Identity next;
  next.own = {made.key, reply.certificate()};
  next.trusted = reply.trusted();
  DSEC_TRY(next.view, ca::LookAt(next.own.certificate));
  if (next.view.name != rpc::TlsName{reply.cluster(), options_.role, options_.id}) {
    return Error(Code::kInternal, "member.other_name",
                 fmt::format("the apiserver has given the name {}", next.view.name.Uri()));
  }
  // Before anything is replaced: the parts fit together and can be used.
  DSEC_TRY(auto context, rpc::TlsContext::Create(next.Options()));
  DSEC_TRY_VOID(ca::SaveIdentity(options_.folder, next));
  identity_ = std::move(next);
  if (holder_ == nullptr) {
    holder_ = std::make_shared<rpc::TlsHolder>(std::move(context));
  } else {
    holder_->Replace(std::move(context));
  }
  log::Info("member.certificate", {{"name", identity_.view.name.Uri()},
                                   {"sha256", identity_.view.sha256},
                                   {"ends_unix_ms", identity_.view.ends_unix_ms}});
  return Ok();
}

Task<void> Member::JoinNow(Deadline deadline) {
  DSEC_CO_TRY(const ca::JoinToken token, ca::ParseJoinToken(options_.join_token));
  // On disk before anybody hears of it: after a kill the same key asks again, which the token and
  // the node's record know.
  DSEC_CO_TRY(const ca::KeyAndRequest made,
              ca::JoiningRequest(options_.folder, {token.cluster, options_.role, options_.id}));
  DSEC_CO_TRY(auto context, rpc::TlsContext::Create({}));
  v1::JoinRequest request;
  request.set_token(token.secret);
  request.set_signing_request(made.request);
  if (word_) {
    auto word = co_await word_();
    if (!word.ok()) co_return std::move(word).error();
    *request.mutable_node() = *std::move(word);
  }
  // The same request at every apiserver: the token is good for one key, and an answer may be lost.
  auto body = co_await Ask("Join", request.SerializeAsString(), std::move(context), token.ca_sha256,
                           deadline);
  if (!body.ok()) co_return std::move(body).error();
  v1::JoinReply reply;
  if (!reply.ParseFromString(*body)) {
    co_return Error(Code::kUnavailable, "member.no_apiserver", "the answer does not parse");
  }
  DSEC_CO_TRY_VOID(Take(made, reply));
  co_return ca::ForgetJoining(options_.folder);
}

Task<std::unique_ptr<Member>> Member::Open(runtime::Executor home, MemberOptions options, Word word,
                                           Deadline deadline) {
  std::unique_ptr<Member> member(new Member(home, std::move(options), std::move(word)));
  const MemberOptions& with = member->options_;
  auto identity = ca::LoadIdentity(with.folder);
  const bool none = !identity.ok() && identity.error().sys_errno() == ENOENT;
  if (!identity.ok() && !none) co_return std::move(identity).error();
  if (!none) {
    const rpc::TlsName& name = identity->view.name;
    if (name.role != with.role || name.id != with.id) {
      co_return Error(Code::kConflict, "member.other_name",
                      fmt::format("{} belongs to {}, this is {} {}", with.folder, name.Uri(),
                                  with.role, with.id));
    }
    const bool expired = UnixMillis(with.clock->Wall()) >= identity->view.ends_unix_ms;
    if (!expired || with.join_token.empty()) {
      if (expired) {
        co_return Error(Code::kFailedPrecondition, "member.expired",
                        fmt::format("the certificate of {} has expired; the node must join again "
                                    "with a new token (`dsec cluster token`)",
                                    name.Uri()));
      }
      // A kill may have come between the two steps of a join.
      DSEC_CO_TRY_VOID(ca::ForgetJoining(with.folder));
      member->identity_ = *std::move(identity);
      DSEC_CO_TRY(auto context, rpc::TlsContext::Create(member->identity_.Options()));
      member->holder_ = std::make_shared<rpc::TlsHolder>(std::move(context));
      co_return std::move(member);
    }
  }
  if (with.join_token.empty()) {
    co_return Error(Code::kFailedPrecondition, "member.no_identity",
                    fmt::format("{} has no certificate; set join_token to one of `dsec cluster "
                                "token`",
                                with.folder))
        .WithField("join_token");
  }
  auto joined = co_await member->JoinNow(deadline);
  if (!joined.ok()) co_return std::move(joined).error();
  co_return std::move(member);
}

Task<void> Member::Renew(Deadline deadline) {
  DSEC_CO_TRY(const ca::KeyAndRequest made, ca::MakeRequest(identity_.view.name));
  v1::CertifyRequest request;
  request.set_signing_request(made.request);
  auto body = co_await Ask("Renew", request.SerializeAsString(), holder_->Get(), "", deadline);
  if (!body.ok()) co_return std::move(body).error();
  v1::JoinReply reply;
  if (!reply.ParseFromString(*body)) {
    co_return Error(Code::kUnavailable, "member.no_apiserver", "the answer does not parse");
  }
  co_return Take(made, reply);
}

Task<void> Member::Announce(Deadline deadline) {
  for (int round = 0;; ++round) {
    auto word = co_await word_();
    if (!word.ok()) co_return std::move(word).error();
    const uint64_t own = gate_->epoch();
    word->set_epoch(own);
    v1::AnnounceRequest request;
    *request.mutable_node() = *std::move(word);
    auto body = co_await Ask("Announce", request.SerializeAsString(), holder_->Get(), "", deadline);
    if (!body.ok()) co_return std::move(body).error();
    v1::AnnounceReply reply;
    if (!reply.ParseFromString(*body)) {
      co_return Error(Code::kUnavailable, "member.no_apiserver", "the answer does not parse");
    }
    if (reply.node().epoch() <= own) co_return Ok();
    if (round == 3) {
      co_return Error(Code::kUnavailable, "edge.fencing", "the epoch of the node keeps rising");
    }
    // Death was declared, or another machine had this id: what there is ends first.
    auto taken = co_await gate_->Check(reply.node().epoch(), deadline);
    if (!taken.ok() && taken.error().reason() != "edge.epoch_stale") {
      co_return std::move(taken).error();
    }
  }
}

boost::asio::awaitable<void> Member::Run() {
  Deadline announce = Deadline::After(milliseconds(0));
  int64_t renew_ms = identity_.view.RenewUnixMs();
  for (;;) {
    if (gate_ != nullptr && announce.Expired()) {
      auto done = co_await Announce(Deadline::After(kFenceTime));
      if (!done.ok() && done.error().code() == Code::kCancelled) co_return;
      if (!done.ok()) log::Warn("member.not_announced", {{"error", done.error()}});
      announce = Deadline::After(done.ok() ? options_.announce_period : options_.retry_pause);
    }
    const int64_t now_ms = UnixMillis(options_.clock->Wall());
    if (now_ms >= renew_ms) {
      auto done = co_await Renew(Deadline::After(kAskTime * 3));
      if (!done.ok() && done.error().code() == Code::kCancelled) co_return;
      if (done.ok()) {
        renew_ms = identity_.view.RenewUnixMs();
      } else {
        log::Error("member.not_renewed",
                   {{"error", done.error()}, {"ends_unix_ms", identity_.view.ends_unix_ms}});
        renew_ms = now_ms + milliseconds(kRenewRetry).count();
      }
    }
    const auto renew_in =
        milliseconds(std::max<int64_t>(1, renew_ms - UnixMillis(options_.clock->Wall())));
    Deadline until = Deadline::After(std::min<milliseconds>(renew_in, kLongestSleep));
    if (gate_ != nullptr) until = until.Sooner(announce);
    auto slept = co_await runtime::SleepUntil(until);
    if (!slept.ok()) co_return;
  }
}

void Member::Start(EpochGate* gate) {
  gate_ = gate;
  running_ = runtime::SpawnCancellable(work_, home_, Run());
}

boost::asio::awaitable<void> Member::Stop() {
  running_.Cancel();
  co_await work_.Close();
}

}  // namespace dsec::cluster
