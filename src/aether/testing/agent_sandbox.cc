// SPDX-License-Identifier: Apache-2.0
#include "aether/testing/agent_sandbox.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "os/file.h"

namespace dsec::aether::testing {
namespace {

constexpr char kService[] = "dsec.v1.Aether";
constexpr int kReplySeconds = 60;

}  // namespace

Result<std::unique_ptr<Client>> Client::Connect(const std::string& path) {
  auto client = std::make_unique<Client>();
  client->socket_.Reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
  if (::connect(client->socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) !=
      0) {
    return os::ErrnoError("test.connect", path);
  }
  return client;
}

Result<uint32_t> Client::Send(std::string_view method,
                              const google::protobuf::MessageLite& request) {
  rpc::Request call;
  call.service = kService;
  call.method = method;
  call.payload = request.SerializeAsString();
  std::string out;
  uint32_t stream = next_stream_;
  next_stream_ += 2;
  rpc::AppendFrame(out, stream, rpc::MessageType::kRequest, 0, rpc::SerializeRequest(call));
  for (size_t sent = 0; sent < out.size();) {
    ssize_t size = ::send(socket_.get(), out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
    if (size <= 0)
      return Error(Code::kUnavailable, "test.closed", "the agent closed the connection");
    sent += static_cast<size_t>(size);
  }
  return stream;
}

Result<std::string> Client::Receive(uint32_t stream) {
  MonoTime deadline = spawn::testing::In(kReplySeconds);
  while (!arrived_.contains(stream)) {
    DSEC_TRY(std::optional<rpc::Frame> frame, parser_.Next());
    if (frame) {
      arrived_[frame->stream] = std::move(frame->payload);
      continue;
    }
    DSEC_TRY(bool readable, os::WaitReadable(socket_.get(), deadline));
    if (!readable) return Error(Code::kDeadlineExceeded, "test.reply", "no reply");
    std::string buffer(256 << 10, '\0');
    ssize_t size = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
    if (size <= 0)
      return Error(Code::kUnavailable, "test.closed", "the agent closed the connection");
    parser_.Feed(std::string_view(buffer).substr(0, static_cast<size_t>(size)));
  }
  auto found = arrived_.extract(stream);
  return rpc::ParseResponse(found.mapped());
}

Result<std::unique_ptr<AgentSandbox>> AgentSandbox::Create(const Limits& limits,
                                                           const v1::HelloRequest& hello) {
  auto made = std::make_unique<AgentSandbox>();
  spawn::SpawnerOptions options = spawn::testing::TestSpawnerOptions();
  options.agent_path = DSEC_AETHER_PATH;
  DSEC_TRY(made->spawner_, spawn::Spawner::Start(options));
  DSEC_TRY(made->sandbox_, spawn::testing::Sandbox::MakeSlot(*made->spawner_));
  spawn::testing::Sandbox& sandbox = *made->sandbox_;
  auto set = [](int directory, const char* file, uint64_t value) -> Result<void> {
    return value == 0 ? Ok() : os::WriteExisting(directory, file, fmt::format("{}", value));
  };
  DSEC_TRY_VOID(
      set(sandbox.cgroups->memory_dir.get(), "memory.limit_in_bytes", limits.memory_bytes));
  DSEC_TRY_VOID(set(sandbox.cgroups->pids_dir.get(), "pids.max", limits.pids));
  DSEC_TRY_VOID(set(sandbox.cgroups->cpu_dir.get(), "cpu.cfs_quota_us", limits.cpu_millis * 100));
  DSEC_TRY(os::UniqueFd root, sandbox.NewHostImageRoot());
  std::vector<int> fds = {root.get()};
  DSEC_TRY_VOID(spawn::Launch(sandbox.process.launch_socket.get(),
                              spawn::testing::Sandbox::DefaultPlan(), fds,
                              runtime::Deadline::After(std::chrono::seconds(20))));
  made->hello_ = hello;
  made->hello_.set_sandbox_id("sb-test-00000000000000000000000000");
  made->hello_.set_token(sandbox.token);
  DSEC_TRY(made->client_, made->Connect());
  return made;
}

Result<std::unique_ptr<Client>> AgentSandbox::Connect() {
  DSEC_TRY(auto client, Client::Connect(sandbox_->socket_path()));
  DSEC_TRY_VOID(client->Call<v1::HelloReply>("Hello", hello_));
  return client;
}

v1::ExecRequest AgentSandbox::Script(std::string_view script) {
  v1::ExecRequest request;
  request.set_op_id(fmt::format("op-{}", next_op_++));
  request.set_script(std::string(script));
  request.set_wait_ms(30000);
  return request;
}

v1::ExecRequest AgentSandbox::Argv(const std::vector<std::string>& argv) {
  v1::ExecRequest request;
  request.set_op_id(fmt::format("op-{}", next_op_++));
  for (const std::string& argument : argv) request.add_argv(argument);
  request.set_wait_ms(30000);
  return request;
}

Result<v1::ExecReply> AgentSandbox::Start(v1::ExecRequest request) {
  request.set_wait_ms(0);
  return client_->Call<v1::ExecReply>("Exec", request);
}

Result<Outcome> AgentSandbox::Run(const v1::ExecRequest& request) {
  DSEC_TRY(v1::ExecReply reply, client_->Call<v1::ExecReply>("Exec", request));
  return Collect(std::move(reply));
}

Result<Outcome> AgentSandbox::Collect(v1::ExecReply reply) {
  Outcome outcome;
  while (true) {
    for (const v1::StreamChunk& chunk : reply.stdout_chunks()) outcome.out += chunk.data();
    for (const v1::StreamChunk& chunk : reply.stderr_chunks()) outcome.err += chunk.data();
    if (!reply.running() && reply.drained()) break;
    v1::PollRequest poll;
    poll.set_op_id(reply.op_id());
    poll.set_stdout_offset(reply.stdout_next());
    poll.set_stderr_offset(reply.stderr_next());
    poll.set_wait_ms(30000);
    DSEC_TRY(reply, client_->Call<v1::ExecReply>("Poll", poll));
  }
  outcome.result = reply.result();
  outcome.out_total = reply.stdout_state().total();
  outcome.out_dropped = reply.stdout_state().dropped();
  outcome.err_total = reply.stderr_state().total();
  outcome.err_dropped = reply.stderr_state().dropped();
  v1::AckRequest ack;
  ack.set_op_id(reply.op_id());
  DSEC_TRY_VOID(client_->Call<v1::Empty>("Ack", ack));
  return outcome;
}

uint64_t AgentSandbox::AgentMemoryKib(std::string_view field) const {
  auto text =
      os::ReadFile(AT_FDCWD, fmt::format("/proc/{}/smaps_rollup", agent_pid()).c_str(), 1 << 16);
  if (!text.ok()) return 0;
  size_t start = text->find(fmt::format("\n{}:", field));
  if (start == std::string::npos) return 0;
  start = text->find_first_of("0123456789", start + field.size() + 2);
  uint64_t value = 0;
  std::from_chars(text->data() + start, text->data() + text->size(), value);
  return value;
}

std::vector<std::string> AgentSandbox::ExecCgroups() const {
  std::vector<std::string> names;
  DIR* directory = ::opendir((sandbox_->cgroups->v2_path + "/code").c_str());
  if (directory == nullptr) return names;
  while (const dirent* entry = ::readdir(directory)) {
    if (entry->d_name[0] == 'x') names.emplace_back(entry->d_name);
  }
  ::closedir(directory);
  return names;
}

}  // namespace dsec::aether::testing
