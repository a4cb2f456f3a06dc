// SPDX-License-Identifier: Apache-2.0
#include "aether/agent.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "base/rng.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

namespace abi = spawn::abi;

constexpr char kService[] = "dsec.v1.Aether";
constexpr uint64_t kMaxGraceMs = 3600 * 1000;
// Memory that a burst has left in the heap goes back to the kernel this long after it; an idle
// agent has no timer.
constexpr std::chrono::seconds kTrimAfter{1};
// Replies that tell of the sandbox's end get this long to be taken.
constexpr std::chrono::milliseconds kLastWords{200};

os::UniqueFd TakeOptional(int fd) {
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return os::UniqueFd();
  return os::UniqueFd(fd);
}

Result<os::UniqueFd> Take(int fd, const char* what) {
  os::UniqueFd taken = TakeOptional(fd);
  if (!taken.valid())
    return Error::FromErrno(errno, "agent.descriptors", fmt::format("{} ({})", what, fd));
  return taken;
}

// The whole of both is looked at whatever they hold.
bool SameToken(std::string_view given, const std::array<uint8_t, abi::kTokenBytes>& token) {
  if (given.size() != token.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < token.size(); ++i) difference |= static_cast<uint8_t>(given[i]) ^ token[i];
  return difference == 0;
}

// A function that answers `respond` with a serialised Reply.
template <typename Reply>
std::function<void(Result<Reply>)> Typed(Server::Respond respond) {
  return [respond = std::move(respond)](Result<Reply> result) {
    if (!result.ok()) return respond(std::move(result).error());
    respond(result->SerializeAsString());
  };
}

std::function<void(Result<void>)> Plain(Server::Respond respond) {
  return [respond = std::move(respond)](Result<void> result) {
    if (!result.ok()) return respond(std::move(result).error());
    respond(std::string());
  };
}

// Runs `handle` with the parsed request.
template <typename Request, typename Handle>
void With(Server::Call& call, Handle handle) {
  Request request;
  if (!request.ParseFromString(call.request.payload)) {
    return call.respond(Error(Code::kInvalidArgument, "rpc.request", "the request does not parse"));
  }
  call.request.payload = std::string();
  handle(std::move(request));
}

}  // namespace

Result<std::unique_ptr<Agent>> Agent::Create() {
  DSEC_TRY(auto loop, Loop::Create());
  DSEC_TRY(auto workers, WorkerPool::Create(*loop));
  DSEC_TRY(os::UniqueFd listener, Take(abi::kListenFd, "listening socket"));
  DSEC_TRY(os::UniqueFd channel, Take(abi::kInitFd, "channel to init"));
  DSEC_TRY(os::UniqueFd slot, Take(abi::kSlotCgroupFd, "slot cgroup"));
  DSEC_TRY(os::UniqueFd token, Take(abi::kTokenFd, "token"));
  DSEC_TRY(os::UniqueFd init, Take(abi::kInitPidFd, "pidfd of init"));
  DSEC_TRY(os::UniqueFd code, os::OpenAt(slot.get(), "code", O_RDONLY | O_DIRECTORY));
  std::unique_ptr<Agent> agent(new Agent(std::move(loop), std::move(workers), std::move(code)));
  ssize_t size = ::pread(token.get(), agent->token_.data(), agent->token_.size(), 0);
  if (size != abi::kTokenBytes)
    return Error(Code::kInvalidArgument, "agent.token", "the token has a wrong size");
  Agent* self = agent.get();
  self->slot_cgroup_ = std::move(slot);
  self->init_pidfd_ = std::move(init);
  self->init_watch_ = FdWatch(*self->loop_, self->init_pidfd_.get(), EPOLLIN,
                              [self](uint32_t) { self->OnLost("init has ended"); });
  self->init_ = std::make_unique<InitClient>(
      *self->loop_, std::move(channel),
      [self](os::UniqueFd root) {
        self->execs_->SetRoot(std::move(root));
        for (const Server::Respond& respond : std::exchange(self->waiting_hellos_, {}))
          self->FinishHello(respond);
      },
      [self](const std::string& why) { self->OnLost(why); });
  self->execs_ = std::make_unique<ExecTable>(
      *self->loop_, *self->init_, *self->workers_,
      ExecTable::Options{self->slot_cgroup_.get(), self->code_cgroup_.get(),
                         self->memory_cgroup_.get(), self->pids_cgroup_.get(),
                         self->cpu_cgroup_.get()});
  self->files_ = std::make_unique<FileService>(
      *self->loop_, *self->workers_, [self] { return self->execs_->root(); },
      [self] { return self->execs_->defaults().user; });
  if (::fcntl(listener.get(), F_SETFL, O_NONBLOCK) != 0) {
    return Error::FromErrno(errno, "agent.descriptors", "make the listening socket non-blocking");
  }
  self->server_ = std::make_unique<Server>(
      *self->loop_, std::move(listener),
      [self](Server::Call call) { self->Handle(std::move(call)); },
      [self](uint64_t caller) {
        self->execs_->DropCaller(caller);
        self->files_->DropCaller(caller);
      });
  self->loop_->OnIdle([self] { self->OnIdle(); });
  return agent;
}

Agent::Agent(std::unique_ptr<Loop> loop, std::unique_ptr<WorkerPool> workers,
             os::UniqueFd code_cgroup)
    : loop_(std::move(loop)),
      workers_(std::move(workers)),
      memory_cgroup_(TakeOptional(abi::kMemoryCgroupFd)),
      pids_cgroup_(TakeOptional(abi::kPidsCgroupFd)),
      cpu_cgroup_(TakeOptional(abi::kCpuCgroupFd)),
      code_cgroup_(std::move(code_cgroup)),
      boot_nonce_(Rng::FromSystem().Next()) {}

Agent::~Agent() = default;

std::string Agent::Run() {
  loop_->Run();
  return lost_;
}

void Agent::Handle(Server::Call call) {
  if (call.request.service != kService) {
    return call.respond(
        Error(Code::kNotFound, "rpc.unknown_service", "only dsec.v1.Aether is served here"));
  }
  if (call.request.method == "Hello") return Hello(call);
  if (!*call.authenticated) {
    call.respond(
        Error(Code::kUnauthenticated, "agent.hello_first", "the first call must be Hello"));
    return server_->CloseAfterReplies(call.caller);
  }
  Dispatch(call);
}

void Agent::Hello(Server::Call& call) {
  With<v1::HelloRequest>(call, [&](const v1::HelloRequest& request) {
    if (!SameToken(request.token(), token_)) {
      call.respond(Error(Code::kUnauthenticated, "agent.bad_token",
                         "the token is not that of this sandbox"));
      return server_->CloseAfterReplies(call.caller);
    }
    Result<ExecDefaults> defaults = DefaultsFrom(request);
    if (!defaults.ok()) return call.respond(std::move(defaults).error());
    *call.authenticated = true;
    execs_->SetDefaults(std::move(*defaults));
    if (execs_->root() >= 0) return FinishHello(call.respond);
    waiting_hellos_.push_back(call.respond);
  });
}

void Agent::FinishHello(const Server::Respond& respond) {
  v1::HelloReply reply;
  reply.set_version(DSEC_VERSION);
  reply.set_execs_running(execs_->running());
  reply.set_boot_nonce(boot_nonce_);
  respond(reply.SerializeAsString());
}

void Agent::Dispatch(Server::Call& call) {
  const std::string& method = call.request.method;
  Server::Respond& respond = call.respond;
  uint64_t caller = call.caller;
  if (method == "Exec") {
    With<v1::ExecRequest>(call, [&](v1::ExecRequest request) {
      execs_->Start(std::move(request), caller, Typed<v1::ExecReply>(respond));
    });
  } else if (method == "Poll") {
    With<v1::PollRequest>(call, [&](const v1::PollRequest& request) {
      execs_->Poll(request, caller, Typed<v1::ExecReply>(respond));
    });
  } else if (method == "WriteStdin") {
    With<v1::StdinRequest>(call, [&](const v1::StdinRequest& request) {
      execs_->WriteStdin(request, caller, Typed<v1::StdinReply>(respond));
    });
  } else if (method == "Signal") {
    With<v1::SignalRequest>(
        call, [&](const v1::SignalRequest& request) { Plain(respond)(execs_->Signal(request)); });
  } else if (method == "Resize") {
    With<v1::ResizeRequest>(
        call, [&](const v1::ResizeRequest& request) { Plain(respond)(execs_->Resize(request)); });
  } else if (method == "Ack") {
    With<v1::AckRequest>(
        call, [&](const v1::AckRequest& request) { Plain(respond)(execs_->Ack(request.op_id())); });
  } else if (method == "ListExecs") {
    respond(execs_->List().SerializeAsString());
  } else if (method == "ListSessions") {
    respond(execs_->ListSessions().SerializeAsString());
  } else if (method == "CloseSession") {
    With<v1::SessionRequest>(call, [&](const v1::SessionRequest& request) {
      execs_->CloseSession(request.name(), Plain(respond));
    });
  } else if (method == "Shutdown") {
    With<v1::ShutdownRequest>(call, [&](const v1::ShutdownRequest& request) {
      execs_->Shutdown(std::chrono::milliseconds(std::min(request.grace_ms(), kMaxGraceMs)),
                       Plain(respond));
    });
  } else if (execs_->root() < 0) {
    respond(Error(Code::kUnavailable, "agent.not_ready", "the sandbox is still being set up"));
  } else if (method == "Stat") {
    With<v1::PathRequest>(call, [&](v1::PathRequest request) {
      files_->Stat(std::move(request), Typed<v1::FileInfo>(respond));
    });
  } else if (method == "List") {
    With<v1::ListRequest>(call, [&](v1::ListRequest request) {
      files_->List(std::move(request), Typed<v1::ListReply>(respond));
    });
  } else if (method == "ReadFile") {
    With<v1::ReadRequest>(call, [&](v1::ReadRequest request) {
      files_->Read(std::move(request), Typed<v1::ReadReply>(respond));
    });
  } else if (method == "WriteFile") {
    With<v1::WriteRequest>(call, [&](v1::WriteRequest request) {
      files_->Write(std::move(request), caller, Typed<v1::WriteReply>(respond));
    });
  } else if (method == "Mkdir") {
    With<v1::MkdirRequest>(call, [&](v1::MkdirRequest request) {
      files_->Mkdir(std::move(request), Typed<v1::Empty>(respond));
    });
  } else if (method == "Move") {
    With<v1::MoveRequest>(call, [&](v1::MoveRequest request) {
      files_->Move(std::move(request), Typed<v1::Empty>(respond));
    });
  } else if (method == "Remove") {
    With<v1::RemoveRequest>(call, [&](v1::RemoveRequest request) {
      files_->Remove(std::move(request), Typed<v1::Empty>(respond));
    });
  } else if (method == "Chmod") {
    With<v1::ChmodRequest>(call, [&](v1::ChmodRequest request) {
      files_->Chmod(std::move(request), Typed<v1::Empty>(respond));
    });
  } else if (method == "Watch") {
    With<v1::WatchRequest>(call, [&](const v1::WatchRequest& request) {
      files_->WatchPath(request, caller, Typed<v1::WatchReply>(respond));
    });
  } else if (method == "PullArchive") {
    With<v1::PullArchiveRequest>(call, [&](v1::PullArchiveRequest request) {
      files_->Pull(std::move(request), caller, Typed<v1::PullArchiveReply>(respond));
    });
  } else if (method == "PushArchive") {
    With<v1::PushArchiveRequest>(call, [&](v1::PushArchiveRequest request) {
      files_->Push(std::move(request), caller, Typed<v1::PushArchiveReply>(respond));
    });
  } else {
    respond(Error(Code::kNotFound, "rpc.unknown_method", "the service has no such method"));
  }
}

void Agent::OnLost(const std::string& why) {
  if (!lost_.empty()) return;
  lost_ = why;
  init_watch_.Reset();
  execs_->SandboxEnded();
  if (server_->Flushed()) return loop_->Stop();
  stop_ = Timer(*loop_, loop_->now() + kLastWords, [this] { loop_->Stop(); });
}

void Agent::OnIdle() {
  if (std::exchange(trimmed_, false) || trim_.armed()) return;
  trim_ = Timer(*loop_, loop_->now() + kTrimAfter, [this] {
    trimmed_ = true;
    ReleaseReadBuffer();
    ::malloc_trim(0);
  });
}

}  // namespace dsec::aether
