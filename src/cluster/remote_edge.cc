// SPDX-License-Identifier: Apache-2.0
#include "cluster/remote_edge.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <utility>

#include "cluster/call_error.h"
#include "cluster/edge_server.h"
#include "cluster/node_record.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

// The edge's own word on a deadline comes within this time after it.
constexpr milliseconds kGrace{2'000};
constexpr milliseconds kProjectTime{30'000};

Deadline WithGrace(Deadline deadline) {
  if (deadline.never() || deadline.at() > MonoTime::max() - kGrace) return deadline;
  return Deadline::At(deadline.at() + kGrace);
}

}  // namespace

// On its shard alone.
struct RemoteEdge::Line {
  explicit Line(runtime::Executor on) : executor(std::move(on)) {}
  const runtime::Executor executor;
  std::shared_ptr<rpc::Channel> channel;
  bool dialling = false;
  std::optional<Error> failed;
  Deadline not_before = Deadline::After(milliseconds(0));
  runtime::AsyncEvent dialled;
};

// This side of a stream. Its destruction, on whatever thread, ends the stream without a message;
// the stream itself lives and dies on its shard.
class RemoteEdge::End {
 public:
  End(runtime::Executor executor, std::unique_ptr<rpc::Channel::Stream> stream)
      : executor_(std::move(executor)), stream_(std::move(stream)) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    boost::asio::post(
        executor_, [stream = std::shared_ptr(std::move(stream_))] { (void)stream->CloseSend(); });
  }
  rpc::Channel::Stream& stream() { return *stream_; }
  // Any thread: the one message that a side says before it ends.
  static void Say(std::shared_ptr<End> end, std::string message) {
    const auto executor = end->executor_;
    boost::asio::post(executor, [end = std::move(end), message = std::move(message)]() mutable {
      (void)end->stream_->Send(std::move(message));
    });
  }

 private:
  const runtime::Executor executor_;
  std::unique_ptr<rpc::Channel::Stream> stream_;
};

class RemoteEdge::RemoteClaim final : public edge::Claim {
 public:
  explicit RemoteClaim(std::shared_ptr<End> end) : end_(std::move(end)) {}
  void Delivered() override {
    if (end_ != nullptr) End::Say(std::move(end_), v1::CreateDone().SerializeAsString());
    end_ = nullptr;
  }

 private:
  std::shared_ptr<End> end_;
};

class RemoteEdge::RemoteAttachment final : public edge::Attachment {
 public:
  RemoteAttachment(std::shared_ptr<End> end, uint64_t follower)
      : end_(std::move(end)), follower_(follower) {}
  void Finish() override {
    if (end_ != nullptr) End::Say(std::move(end_), v1::AttachDone().SerializeAsString());
    end_ = nullptr;
  }
  uint64_t follower() const { return follower_; }

 private:
  std::shared_ptr<End> end_;
  const uint64_t follower_;
};

Result<std::shared_ptr<RemoteEdge>> RemoteEdge::Make(runtime::Shards& shards,
                                                     RemoteEdgeOptions options) {
  DSEC_TRY(HostPort address, ParseHostPort(options.address, "address"));
  std::shared_ptr<RemoteEdge> made(new RemoteEdge(shards, std::move(options)));
  made->host_ = std::move(address.host);
  made->port_ = address.port;
  return made;
}

RemoteEdge::RemoteEdge(runtime::Shards& shards, RemoteEdgeOptions options)
    : shards_(shards), options_(std::move(options)) {
  for (size_t i = 0; i < shards.size(); ++i) lines_.push_back(std::make_shared<Line>(shards.at(i)));
}

RemoteEdge::~RemoteEdge() {
  for (auto& line : lines_) {
    const auto executor = line->executor;
    boost::asio::post(executor, [line = std::move(line)]() mutable { line.reset(); });
  }
}

Error RemoteEdge::Lost(const Error& error) const {
  const std::string_view reason = error.reason();
  if (error.code() == Code::kCancelled || error.code() == Code::kDeadlineExceeded ||
      error.code() == Code::kInvalidArgument) {
    return error;
  }
  if (reason == "rpc.stopping") {
    return Error(Code::kUnavailable, "edge.stopping",
                 fmt::format("node {} is being stopped", options_.node_id));
  }
  if (reason == "rpc.busy" || reason == "rpc.backlog") {
    return Error(Code::kResourceExhausted, reason,
                 fmt::format("node {}: {}", options_.node_id, error.message()));
  }
  return Error(
             Code::kUnavailable, "edge.unreachable",
             fmt::format("node {} at {}: {}", options_.node_id, options_.address, error.ToString()))
      .WithErrno(error.sys_errno());
}

Task<std::shared_ptr<RemoteEdge::Line>> RemoteEdge::LineHere() {
  const runtime::Executor here = co_await boost::asio::this_coro::executor;
  for (const auto& line : lines_) {
    if (line->executor == here) co_return line;
  }
  co_return Error(Code::kInternal, "edge.unreachable", "the call was not made on a shard");
}

Task<std::shared_ptr<rpc::Channel>> RemoteEdge::Dial(std::shared_ptr<Line> line,
                                                     Deadline deadline) {
  auto channel =
      co_await rpc::Channel::ConnectTls(line->executor, host_, port_, options_.tls->Get(),
                                        rpc::TlsExpect{.roles = {"edge"}, .id = options_.node_id},
                                        deadline.Sooner(Deadline::After(options_.connect_time)));
  if (channel.ok()) {
    line->channel = *channel;
    line->failed.reset();
  } else if (channel.error().code() != Code::kCancelled && !deadline.Expired()) {
    line->failed = channel.error();
    line->not_before = Deadline::After(options_.connect_pause);
  }
  line->dialling = false;
  line->dialled.Set();
  co_return std::move(channel);
}

Task<std::shared_ptr<rpc::Channel>> RemoteEdge::Connected(std::shared_ptr<Line> line,
                                                          Deadline deadline) {
  for (;;) {
    if (line->channel != nullptr && !line->channel->closed()) co_return line->channel;
    line->channel.reset();
    if (!line->dialling) {
      if (line->failed && !line->not_before.Expired()) co_return *line->failed;
      line->dialling = true;
      line->dialled.Reset();
      auto channel = co_await Dial(line, deadline);
      co_return std::move(channel);
    }
    // Whoever dials may be cancelled or have less time; then this one tries.
    auto waited = co_await line->dialled.Wait(deadline);
    if (!waited.ok() && waited.error().code() == Code::kDeadlineExceeded) {
      co_return Error(Code::kUnavailable, "rpc.connect", "no connection in time");
    }
    if (!waited.ok()) co_return std::move(waited).error();
  }
}

std::string RemoteEdge::Envelope(const SandboxId& id, std::string body, uint64_t follower,
                                 Deadline deadline) const {
  v1::EdgeCall call;
  call.set_epoch(options_.epoch());
  call.set_sandbox_id(id.str());
  call.set_body(std::move(body));
  call.set_follower(follower);
  if (!deadline.never()) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline.Remaining()).count();
    call.set_timeout_ms(static_cast<uint64_t>(std::max<int64_t>(1, left)));
  }
  return call.SerializeAsString();
}

namespace {

// The body of an answer, or the error in it.
Result<std::string> Opened(std::string_view bytes) {
  v1::EdgeAnswer answer;
  if (!answer.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Error(Code::kUnavailable, "edge.unreachable", "the node's answer does not parse");
  }
  if (answer.has_error()) return FromWire(answer.error());
  return std::move(*answer.mutable_body());
}

}  // namespace

Task<std::string> RemoteEdge::CallRaw(const char* method, SandboxId id, std::string body,
                                      uint64_t follower, Repeat repeat, Deadline deadline) {
  auto line = co_await LineHere();
  if (!line.ok()) co_return std::move(line).error();
  for (bool again = repeat == Repeat::kOnce;; again = false) {
    auto channel = co_await Connected(*line, deadline);
    if (!channel.ok()) co_return Lost(channel.error());
    // Moved in the last round only: NOLINTNEXTLINE(bugprone-use-after-move)
    std::string envelope = again ? Envelope(id, body, follower, deadline)
                                 : Envelope(id, std::move(body), follower, deadline);
    auto answer = co_await (*channel)->CallRaw(kEdgeService, method, std::move(envelope),
                                               WithGrace(deadline));
    if (answer.ok()) co_return Opened(*answer);
    if (!again || answer.error().reason() != "rpc.closed") co_return Lost(answer.error());
  }
}

template <typename Reply>
Task<Reply> RemoteEdge::Parsed(Task<std::string> call) {
  auto body = co_await std::move(call);
  if (!body.ok()) co_return std::move(body).error();
  Reply reply;
  if (!reply.ParseFromString(*body)) {
    co_return Error(Code::kUnavailable, "edge.unreachable", "the node's answer does not parse");
  }
  co_return reply;
}

Task<void> RemoteEdge::Dropped(Task<std::string> call) {
  auto body = co_await std::move(call);
  if (!body.ok()) co_return std::move(body).error();
  co_return Ok();
}

template <typename Reply, typename Request>
Task<Reply> RemoteEdge::Call(const char* method, SandboxId id, const Request& request,
                             Repeat repeat, Deadline deadline, uint64_t follower) {
  return Parsed<Reply>(
      CallRaw(method, std::move(id), request.SerializeAsString(), follower, repeat, deadline));
}

template <typename Request>
Task<void> RemoteEdge::CallVoid(const char* method, SandboxId id, const Request& request,
                                Deadline deadline) {
  return Dropped(
      CallRaw(method, std::move(id), request.SerializeAsString(), 0, Repeat::kNever, deadline));
}

Task<std::shared_ptr<RemoteEdge::End>> RemoteEdge::Open(const char* method, SandboxId id,
                                                        std::string body, Deadline deadline) {
  auto line = co_await LineHere();
  if (!line.ok()) co_return std::move(line).error();
  auto channel = co_await Connected(*line, deadline);
  if (!channel.ok()) co_return Lost(channel.error());
  // The stream lasts longer than the call that opens it.
  auto stream = (*channel)->OpenStream(
      kEdgeService, method, Envelope(id, std::move(body), 0, deadline), Deadline::Never());
  if (!stream.ok()) co_return Lost(stream.error());
  co_return std::make_shared<End>((*line)->executor, std::move(*stream));
}

Task<std::optional<std::string>> RemoteEdge::Next(End& end, Deadline deadline) {
  auto message = co_await end.stream().Receive(WithGrace(deadline));
  if (!message.ok()) co_return Lost(message.error());
  if (!message->has_value()) co_return std::optional<std::string>();
  auto body = Opened(**message);
  if (!body.ok()) co_return std::move(body).error();
  co_return std::optional<std::string>(std::move(*body));
}

Task<edge::Created> RemoteEdge::Create(v1::CreateRequest request, Deadline deadline) {
  auto end = co_await Open("Create", SandboxId(), request.SerializeAsString(), deadline);
  if (!end.ok()) co_return std::move(end).error();
  auto body = co_await Next(**end, deadline);
  if (!body.ok()) co_return std::move(body).error();
  v1::CreateReply reply;
  if (!body->has_value() || !reply.ParseFromString(**body)) {
    co_return Lost(Error(Code::kUnavailable, "rpc.response", "no reply to a create"));
  }
  edge::Created created;
  created.view = std::move(*reply.mutable_view());
  if (reply.claim()) created.claim = std::make_unique<RemoteClaim>(std::move(*end));
  co_return created;
}

Task<std::unique_ptr<edge::Attachment>> RemoteEdge::Attach(SandboxId id, std::string op_id,
                                                           edge::OnDisconnect rule,
                                                           Deadline deadline) {
  v1::AttachRequest request;
  request.set_op_id(std::move(op_id));
  request.set_keep(rule == edge::OnDisconnect::kKeep);
  auto end = co_await Open("Attach", std::move(id), request.SerializeAsString(), deadline);
  if (!end.ok()) co_return std::move(end).error();
  auto body = co_await Next(**end, deadline);
  if (!body.ok()) co_return std::move(body).error();
  v1::AttachReply reply;
  if (!body->has_value() || !reply.ParseFromString(**body) || reply.follower() == 0) {
    co_return Lost(Error(Code::kUnavailable, "rpc.response", "no reply to an attach"));
  }
  std::unique_ptr<edge::Attachment> attachment =
      std::make_unique<RemoteAttachment>(std::move(*end), reply.follower());
  co_return std::move(attachment);
}

Task<v1::PackReply> RemoteEdge::Pack(SandboxId id, v1::PackRequest request,
                                     edge::PackProgressFn progress, Deadline deadline) {
  auto end = co_await Open("Pack", std::move(id), request.SerializeAsString(), deadline);
  if (!end.ok()) co_return std::move(end).error();
  for (;;) {
    auto body = co_await Next(**end, deadline);
    if (!body.ok()) co_return std::move(body).error();
    v1::PackPart part;
    if (!body->has_value() || !part.ParseFromString(**body)) {
      co_return Lost(Error(Code::kUnavailable, "rpc.response", "no reply to a pack"));
    }
    if (part.has_reply()) co_return std::move(*part.mutable_reply());
    if (progress && !progress(part.progress())) {
      co_return Error(Code::kCancelled, "layer.cancelled", "the caller has ended the pack");
    }
  }
}

Task<v1::ExecReply> RemoteEdge::Exec(SandboxId id, v1::ExecRequest request,
                                     edge::Attachment* follower, Deadline deadline) {
  const uint64_t number =
      follower == nullptr ? 0 : static_cast<RemoteAttachment*>(follower)->follower();
  return Call<v1::ExecReply>("Exec", std::move(id), request, Repeat::kNever, deadline, number);
}

Task<v1::ExecReply> RemoteEdge::Poll(SandboxId id, v1::PollRequest request,
                                     edge::Attachment* follower, Deadline deadline) {
  const uint64_t number =
      follower == nullptr ? 0 : static_cast<RemoteAttachment*>(follower)->follower();
  return Call<v1::ExecReply>("Poll", std::move(id), request, Repeat::kNever, deadline, number);
}

Task<v1::SandboxView> RemoteEdge::Get(SandboxId id, Deadline deadline) {
  return Call<v1::SandboxView>("Get", std::move(id), v1::Empty(), Repeat::kOnce, deadline);
}

Task<std::string> RemoteEdge::ProjectOf(SandboxId id) {
  return [](Task<v1::ProjectOfReply> call) -> Task<std::string> {
    auto reply = co_await std::move(call);
    if (!reply.ok()) co_return std::move(reply).error();
    co_return std::move(*reply->mutable_project());
  }(Call<v1::ProjectOfReply>("ProjectOf", std::move(id), v1::Empty(), Repeat::kOnce,
                                           Deadline::After(kProjectTime)));
}

Task<v1::ListPage> RemoteEdge::List(v1::ListRequestAll request, Deadline deadline) {
  return Call<v1::ListPage>("List", SandboxId(), request, Repeat::kOnce, deadline);
}

Task<v1::SandboxView> RemoteEdge::Delete(v1::DeleteRequest request, Deadline deadline) {
  return Call<v1::SandboxView>("Delete", SandboxId(), request, Repeat::kNever, deadline);
}

Task<v1::SandboxView> RemoteEdge::Renew(v1::RenewRequest request, Deadline deadline) {
  return Call<v1::SandboxView>("Renew", SandboxId(), request, Repeat::kNever, deadline);
}

Task<v1::Usage> RemoteEdge::Stats(SandboxId id, Deadline deadline) {
  return Call<v1::Usage>("Stats", std::move(id), v1::Empty(), Repeat::kOnce, deadline);
}

Task<v1::EventsReply> RemoteEdge::Events(v1::EventsRequest request, Deadline deadline) {
  return Call<v1::EventsReply>("Events", SandboxId(), request, Repeat::kOnce, deadline);
}

Task<v1::NodeInfo> RemoteEdge::Node(Deadline deadline) {
  return Call<v1::NodeInfo>("Node", SandboxId(), v1::Empty(), Repeat::kOnce, deadline);
}

Task<v1::FirstTouchReply> RemoteEdge::FirstTouch(SandboxId id, v1::FirstTouchRequest request,
                                                 Deadline deadline) {
  return Call<v1::FirstTouchReply>("FirstTouch", std::move(id), request, Repeat::kNever, deadline);
}

Task<v1::StdinReply> RemoteEdge::WriteStdin(SandboxId id, v1::StdinRequest request,
                                            Deadline deadline) {
  return Call<v1::StdinReply>("WriteStdin", std::move(id), request, Repeat::kNever, deadline);
}

Task<void> RemoteEdge::Signal(SandboxId id, v1::SignalRequest request, Deadline deadline) {
  return CallVoid("Signal", std::move(id), request, deadline);
}

Task<void> RemoteEdge::Resize(SandboxId id, v1::ResizeRequest request, Deadline deadline) {
  return CallVoid("Resize", std::move(id), request, deadline);
}

Task<void> RemoteEdge::Ack(SandboxId id, v1::AckRequest request, Deadline deadline) {
  return CallVoid("Ack", std::move(id), request, deadline);
}

Task<v1::ListExecsReply> RemoteEdge::ListExecs(SandboxId id, Deadline deadline) {
  return Call<v1::ListExecsReply>("ListExecs", std::move(id), v1::Empty(), Repeat::kOnce, deadline);
}

Task<v1::ListSessionsReply> RemoteEdge::ListSessions(SandboxId id, Deadline deadline) {
  return Call<v1::ListSessionsReply>("ListSessions", std::move(id), v1::Empty(), Repeat::kOnce,
                                     deadline);
}

Task<void> RemoteEdge::CloseSession(SandboxId id, v1::SessionRequest request, Deadline deadline) {
  return CallVoid("CloseSession", std::move(id), request, deadline);
}

Task<v1::FileInfo> RemoteEdge::StatFile(SandboxId id, v1::PathRequest request, Deadline deadline) {
  return Call<v1::FileInfo>("StatFile", std::move(id), request, Repeat::kOnce, deadline);
}

Task<v1::ListReply> RemoteEdge::ListFiles(SandboxId id, v1::ListRequest request,
                                          Deadline deadline) {
  return Call<v1::ListReply>("ListFiles", std::move(id), request, Repeat::kOnce, deadline);
}

Task<v1::ReadReply> RemoteEdge::ReadFile(SandboxId id, v1::ReadRequest request, Deadline deadline) {
  return Call<v1::ReadReply>("ReadFile", std::move(id), request, Repeat::kOnce, deadline);
}

Task<v1::WriteReply> RemoteEdge::WriteFile(SandboxId id, v1::WriteRequest request,
                                           Deadline deadline) {
  return Call<v1::WriteReply>("WriteFile", std::move(id), request, Repeat::kNever, deadline);
}

Task<void> RemoteEdge::Mkdir(SandboxId id, v1::MkdirRequest request, Deadline deadline) {
  return CallVoid("Mkdir", std::move(id), request, deadline);
}

Task<void> RemoteEdge::Move(SandboxId id, v1::MoveRequest request, Deadline deadline) {
  return CallVoid("Move", std::move(id), request, deadline);
}

Task<void> RemoteEdge::Remove(SandboxId id, v1::RemoveRequest request, Deadline deadline) {
  return CallVoid("Remove", std::move(id), request, deadline);
}

Task<void> RemoteEdge::Chmod(SandboxId id, v1::ChmodRequest request, Deadline deadline) {
  return CallVoid("Chmod", std::move(id), request, deadline);
}

Task<v1::WatchReply> RemoteEdge::Watch(SandboxId id, v1::WatchRequest request, Deadline deadline) {
  return Call<v1::WatchReply>("Watch", std::move(id), request, Repeat::kNever, deadline);
}

Task<v1::PullArchiveReply> RemoteEdge::PullArchive(SandboxId id, v1::PullArchiveRequest request,
                                                   Deadline deadline) {
  return Call<v1::PullArchiveReply>("PullArchive", std::move(id), request, Repeat::kNever,
                                    deadline);
}

Task<v1::PushArchiveReply> RemoteEdge::PushArchive(SandboxId id, v1::PushArchiveRequest request,
                                                   Deadline deadline) {
  return Call<v1::PushArchiveReply>("PushArchive", std::move(id), request, Repeat::kNever,
                                    deadline);
}

}  // namespace dsec::cluster
