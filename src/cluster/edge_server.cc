// SPDX-License-Identifier: Apache-2.0
#include "cluster/edge_server.h"

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "cluster/call_error.h"
#include "runtime/shards.h"

// Coroutines and handlers that hand their parameters to coroutines: a reference would not last. The
// rpc server keeps each handler for as long as it runs.
// NOLINTBEGIN(performance-unnecessary-value-param,cppcoreguidelines-avoid-capturing-lambda-coroutines)
namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;

// What a reply may take of a frame; the rest is for envelopes.
constexpr size_t kMaxReply = rpc::kMaxFramePayload - (size_t{64} << 10);

Error BadCall(std::string_view what) {
  return Error(Code::kInvalidArgument, "request.invalid", fmt::format("{} does not parse", what));
}

}  // namespace

rpc::ServerOptions EdgeServerOptions() {
  rpc::ServerOptions options;
  options.max_calls_per_connection = 65'536;
  options.max_request_bytes_per_connection = size_t{256} << 20;
  return options;
}

struct EdgeServer::Asked {
  uint64_t epoch = 0;
  SandboxId id;
  std::string body;
  uint64_t follower = 0;
  std::string caller;
  Deadline deadline = Deadline::Never();
};

// Keeps a follower in the table for as long as its stream lasts.
class EdgeServer::Entry {
 public:
  Entry(EdgeServer& server, std::shared_ptr<edge::Attachment> attachment, std::string caller)
      : server_(server), number_(server.next_follower_++) {
    server_.followers_.emplace(number_, Follower{std::move(attachment), std::move(caller)});
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() { server_.followers_.erase(number_); }
  uint64_t number() const { return number_; }

 private:
  EdgeServer& server_;
  const uint64_t number_;
};

std::string EdgeServer::CallerOf(const rpc::CallContext& context) {
  return context.peer->tls ? context.peer->tls->name.Uri() : context.peer->address;
}

Task<EdgeServer::Asked> EdgeServer::Ask(std::string payload, rpc::CallContext context) {
  v1::EdgeCall call;
  if (!call.ParseFromString(payload)) co_return BadCall("the call");
  payload = {};
  Asked asked;
  asked.epoch = call.epoch();
  asked.id = SandboxId(std::move(*call.mutable_sandbox_id()));
  asked.body = std::move(*call.mutable_body());
  asked.follower = call.follower();
  asked.caller = CallerOf(context);
  asked.deadline = context.deadline;
  if (call.timeout_ms() != 0) {
    constexpr uint64_t kMost = 30ull * 24 * 3600 * 1000;
    asked.deadline = asked.deadline.Sooner(
        Deadline::After(std::chrono::milliseconds(std::min(call.timeout_ms(), kMost))));
  }
  if (!gate_.Serves(asked.epoch)) {
    auto passed = co_await gate_.Check(asked.epoch, asked.deadline);
    if (!passed.ok()) co_return std::move(passed).error();
    // A later fence may have begun before this was woken.
    if (!gate_.Serves(asked.epoch)) co_return StaleEpochError(asked.epoch, gate_.epoch());
  }
  co_return asked;
}

std::string EdgeServer::Failed(const Error& error) const {
  v1::EdgeAnswer answer;
  *answer.mutable_error() = ToWire(error);
  answer.set_epoch(gate_.epoch());
  return answer.SerializeAsString();
}

template <typename Reply>
std::string EdgeServer::Answer(const Result<Reply>& reply) const {
  if (!reply.ok()) return Failed(reply.error());
  v1::EdgeAnswer answer;
  if (!reply->SerializeToString(answer.mutable_body())) {
    return Failed(Error(Code::kInternal, "edge.remote_error", "the reply cannot be written"));
  }
  answer.set_epoch(gate_.epoch());
  return answer.SerializeAsString();
}

std::string EdgeServer::Answer(const Result<void>& reply) const {
  if (!reply.ok()) return Failed(reply.error());
  v1::EdgeAnswer answer;
  answer.set_epoch(gate_.epoch());
  return answer.SerializeAsString();
}

Result<edge::Attachment*> EdgeServer::FollowerOf(const Asked& asked) const {
  if (asked.follower == 0) return nullptr;
  const auto found = followers_.find(asked.follower);
  if (found == followers_.end() || found->second.caller != asked.caller) {
    return Error(Code::kUnavailable, "edge.follower_gone",
                 "the follower's connection has ended; attach again");
  }
  return found->second.attachment.get();
}

// `work(Asked, Request)` gives the task of the call.
template <typename Request, typename Work>
void EdgeServer::Unary(rpc::Server& server, std::string method, Work work) {
  server.Register(std::string(kEdgeService), std::move(method),
                  [this, work](std::string payload, rpc::CallContext context) -> Task<std::string> {
                    // A copy in the frame: the handler itself may be gone by then.
                    return [](EdgeServer* self, Work then, std::string bytes,
                              rpc::CallContext with) -> Task<std::string> {
                      auto asked = co_await self->Ask(std::move(bytes), std::move(with));
                      if (!asked.ok()) co_return self->Failed(asked.error());
                      Request request;
                      if (!request.ParseFromString(asked->body)) {
                        co_return self->Failed(BadCall("the request"));
                      }
                      asked->body = {};
                      auto reply = co_await then(std::move(*asked), std::move(request));
                      co_return self->Answer(reply);
                    }(this, work, std::move(payload), std::move(context));
                  });
}

Task<v1::ListPage> EdgeServer::ListThatFits(v1::ListRequestAll request, Deadline deadline) {
  for (;;) {
    auto page = co_await edge_.List(request, deadline);
    if (!page.ok() || page->ByteSizeLong() <= kMaxReply || request.page_size() <= 1) {
      co_return std::move(page);
    }
    request.set_page_size(request.page_size() / 2);
  }
}

Task<v1::EventsReply> EdgeServer::EventsThatFit(v1::EventsRequest request, Deadline deadline) {
  for (;;) {
    auto events = co_await edge_.Events(request, deadline);
    if (!events.ok() || events->ByteSizeLong() <= kMaxReply || events->events_size() <= 1) {
      co_return std::move(events);
    }
    request.set_max_events(static_cast<uint32_t>(events->events_size() / 2));
  }
}

void EdgeServer::RegisterReads(rpc::Server& server) {
  Unary<v1::Empty>(server, "Get",
                   [this](Asked asked, v1::Empty) { return edge_.Get(asked.id, asked.deadline); });
  Unary<v1::Empty>(server, "ProjectOf", [this](Asked asked, v1::Empty) -> Task<v1::ProjectOfReply> {
    return [](edge::EdgeApi& edge, SandboxId id) -> Task<v1::ProjectOfReply> {
      auto project = co_await edge.ProjectOf(std::move(id));
      if (!project.ok()) co_return std::move(project).error();
      v1::ProjectOfReply reply;
      reply.set_project(*std::move(project));
      co_return reply;
    }(edge_, asked.id);
  });
  Unary<v1::ListRequestAll>(server, "List", [this](Asked asked, v1::ListRequestAll request) {
    return ListThatFits(std::move(request), asked.deadline);
  });
  Unary<v1::DeleteRequest>(server, "Delete", [this](Asked asked, v1::DeleteRequest request) {
    return edge_.Delete(std::move(request), asked.deadline);
  });
  Unary<v1::RenewRequest>(server, "Renew", [this](Asked asked, v1::RenewRequest request) {
    return edge_.Renew(std::move(request), asked.deadline);
  });
  Unary<v1::Empty>(server, "Stats", [this](Asked asked, v1::Empty) {
    return edge_.Stats(asked.id, asked.deadline);
  });
  Unary<v1::EventsRequest>(server, "Events", [this](Asked asked, v1::EventsRequest request) {
    return EventsThatFit(std::move(request), asked.deadline);
  });
  Unary<v1::Empty>(server, "Node",
                   [this](Asked asked, v1::Empty) { return edge_.Node(asked.deadline); });
  Unary<v1::FirstTouchRequest>(
      server, "FirstTouch", [this](Asked asked, v1::FirstTouchRequest request) {
        return edge_.FirstTouch(asked.id, std::move(request), asked.deadline);
      });
}

void EdgeServer::RegisterExecs(rpc::Server& server) {
  // The follower is read before the first wait of the call (edge/api.h), so the pointer holds.
  Unary<v1::ExecRequest>(
      server, "Exec", [this](Asked asked, v1::ExecRequest request) -> Task<v1::ExecReply> {
        auto follower = FollowerOf(asked);
        if (!follower.ok()) co_return std::move(follower).error();
        auto reply = co_await edge_.Exec(asked.id, std::move(request), *follower, asked.deadline);
        co_return std::move(reply);
      });
  Unary<v1::PollRequest>(
      server, "Poll", [this](Asked asked, v1::PollRequest request) -> Task<v1::ExecReply> {
        auto follower = FollowerOf(asked);
        if (!follower.ok()) co_return std::move(follower).error();
        auto reply = co_await edge_.Poll(asked.id, std::move(request), *follower, asked.deadline);
        co_return std::move(reply);
      });
  Unary<v1::StdinRequest>(server, "WriteStdin", [this](Asked asked, v1::StdinRequest request) {
    return edge_.WriteStdin(asked.id, std::move(request), asked.deadline);
  });
  Unary<v1::SignalRequest>(server, "Signal", [this](Asked asked, v1::SignalRequest request) {
    return edge_.Signal(asked.id, std::move(request), asked.deadline);
  });
  Unary<v1::ResizeRequest>(server, "Resize", [this](Asked asked, v1::ResizeRequest request) {
    return edge_.Resize(asked.id, std::move(request), asked.deadline);
  });
  Unary<v1::AckRequest>(server, "Ack", [this](Asked asked, v1::AckRequest request) {
    return edge_.Ack(asked.id, std::move(request), asked.deadline);
  });
  Unary<v1::Empty>(server, "ListExecs", [this](Asked asked, v1::Empty) {
    return edge_.ListExecs(asked.id, asked.deadline);
  });
  Unary<v1::Empty>(server, "ListSessions", [this](Asked asked, v1::Empty) {
    return edge_.ListSessions(asked.id, asked.deadline);
  });
  Unary<v1::SessionRequest>(
      server, "CloseSession", [this](Asked asked, v1::SessionRequest request) {
        return edge_.CloseSession(asked.id, std::move(request), asked.deadline);
      });
}

void EdgeServer::RegisterFiles(rpc::Server& server) {
  const auto add = [&]<typename Request, typename Reply>(
                       const char* method,
                       Task<Reply> (edge::EdgeApi::*call)(SandboxId, Request, Deadline)) {
    Unary<Request>(server, method, [this, call](Asked asked, Request request) {
      return (edge_.*call)(asked.id, std::move(request), asked.deadline);
    });
  };
  add("StatFile", &edge::EdgeApi::StatFile);
  add("ListFiles", &edge::EdgeApi::ListFiles);
  add("ReadFile", &edge::EdgeApi::ReadFile);
  add("WriteFile", &edge::EdgeApi::WriteFile);
  add("Mkdir", &edge::EdgeApi::Mkdir);
  add("Move", &edge::EdgeApi::Move);
  add("Remove", &edge::EdgeApi::Remove);
  add("Chmod", &edge::EdgeApi::Chmod);
  add("Watch", &edge::EdgeApi::Watch);
  add("PullArchive", &edge::EdgeApi::PullArchive);
  add("PushArchive", &edge::EdgeApi::PushArchive);
}

Task<void> EdgeServer::Create(std::string payload, rpc::ServerStream& stream,
                              rpc::CallContext context) {
  auto asked = co_await Ask(std::move(payload), std::move(context));
  if (!asked.ok()) co_return stream.Send(Failed(asked.error()));
  v1::CreateRequest request;
  if (!request.ParseFromString(asked->body)) {
    co_return stream.Send(Failed(BadCall("the request")));
  }
  auto created = co_await edge_.Create(std::move(request), asked->deadline);
  if (!created.ok()) co_return stream.Send(Failed(created.error()));
  const std::unique_ptr<edge::Claim> claim = std::move(created->claim);
  v1::CreateReply reply;
  *reply.mutable_view() = std::move(created->view);
  reply.set_claim(claim != nullptr);
  auto sent = stream.Send(Answer(Result<v1::CreateReply>(std::move(reply))));
  if (!sent.ok() || claim == nullptr) co_return sent;
  // The claim ends with this frame, whichever way it goes.
  auto done = co_await stream.Receive(Deadline::Never());
  if (done.ok() && done->has_value()) claim->Delivered();
  co_return Ok();
}

Task<void> EdgeServer::Attach(std::string payload, rpc::ServerStream& stream,
                              rpc::CallContext context) {
  auto asked = co_await Ask(std::move(payload), std::move(context));
  if (!asked.ok()) co_return stream.Send(Failed(asked.error()));
  v1::AttachRequest request;
  if (!request.ParseFromString(asked->body)) {
    co_return stream.Send(Failed(BadCall("the request")));
  }
  auto attached = co_await edge_.Attach(
      asked->id, request.op_id(),
      request.keep() ? edge::OnDisconnect::kKeep : edge::OnDisconnect::kKill, asked->deadline);
  if (!attached.ok()) co_return stream.Send(Failed(attached.error()));
  const std::shared_ptr<edge::Attachment> attachment = std::move(*attached);
  const Entry entry(*this, attachment, asked->caller);
  v1::AttachReply reply;
  reply.set_follower(entry.number());
  auto sent = stream.Send(Answer(Result<v1::AttachReply>(std::move(reply))));
  if (!sent.ok()) co_return sent;
  auto done = co_await stream.Receive(Deadline::Never());
  if (done.ok() && done->has_value()) attachment->Finish();
  co_return Ok();
}

// Between the pack, which may outlive its caller by some milliseconds, and the stream's handler.
// On the server's shard but for `cancelled`.
struct EdgeServer::PackUnderWay {
  rpc::ServerStream* stream = nullptr;  // null: nobody listens any more
  std::atomic<bool> cancelled = false;
};

boost::asio::awaitable<void> EdgeServer::RunPack(std::shared_ptr<PackUnderWay> pack, SandboxId id,
                                                 v1::PackRequest request, Deadline deadline) {
  const auto home = co_await boost::asio::this_coro::executor;
  auto progress = [this, pack, home](const v1::PackProgress& state) {
    v1::PackPart part;
    *part.mutable_progress() = state;
    boost::asio::post(home, [this, pack, part = std::move(part)] {
      if (pack->stream != nullptr) {
        (void)pack->stream->Send(Answer(Result<v1::PackPart>(part)));
      }
    });
    return !pack->cancelled.load();
  };
  auto reply =
      co_await edge_.Pack(std::move(id), std::move(request), std::move(progress), deadline);
  // After what it has told before.
  co_await boost::asio::post(home, boost::asio::use_awaitable);
  if (pack->stream == nullptr) co_return;
  if (!reply.ok()) {
    (void)pack->stream->Send(Failed(reply.error()));
    co_return;
  }
  v1::PackPart last;
  *last.mutable_reply() = *std::move(reply);
  (void)pack->stream->Send(Answer(Result<v1::PackPart>(std::move(last))));
}

Task<void> EdgeServer::Pack(std::string payload, rpc::ServerStream& stream,
                            rpc::CallContext context) {
  auto asked = co_await Ask(std::move(payload), std::move(context));
  if (!asked.ok()) co_return stream.Send(Failed(asked.error()));
  v1::PackRequest request;
  if (!request.ParseFromString(asked->body)) {
    co_return stream.Send(Failed(BadCall("the request")));
  }
  auto pack = std::make_shared<PackUnderWay>();
  pack->stream = &stream;
  const auto home = co_await boost::asio::this_coro::executor;
  const auto running = runtime::SpawnCancellable(
      packs_, home, RunPack(pack, asked->id, std::move(request), asked->deadline));
  if (!running) {
    co_return stream.Send(
        Failed(Error(Code::kUnavailable, "edge.stopping", "this daemon is being stopped")));
  }
  // The caller's end of its side, in order or not, ends the pack; after the last part it changes
  // nothing.
  (void)co_await stream.Receive(Deadline::Never());
  pack->stream = nullptr;
  pack->cancelled = true;
  running.Cancel();
  co_return Ok();
}

void EdgeServer::Register(rpc::Server& server) {
  RegisterReads(server);
  RegisterExecs(server);
  RegisterFiles(server);
  const auto stream = [&](const char* method,
                          Task<void> (EdgeServer::*handler)(std::string, rpc::ServerStream&,
                                                            rpc::CallContext)) {
    server.RegisterStream(
        std::string(kEdgeService), method,
        [this, handler](std::string payload, rpc::ServerStream& with, rpc::CallContext context) {
          return (this->*handler)(std::move(payload), with, std::move(context));
        });
  };
  stream("Create", &EdgeServer::Create);
  stream("Attach", &EdgeServer::Attach);
  stream("Pack", &EdgeServer::Pack);
}

}  // namespace dsec::cluster
// NOLINTEND(performance-unnecessary-value-param,cppcoreguidelines-avoid-capturing-lambda-coroutines)
