// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/aether.pb.h"
#include "os/unique_fd.h"
#include "rpc/frame.h"
#include "spawn/testing/sandbox.h"

namespace dsec::aether::testing {

// A blocking ttrpc client, several calls under way if wanted.
class Client {
 public:
  static Result<std::unique_ptr<Client>> Connect(const std::string& path);

  Result<uint32_t> Send(std::string_view method, const google::protobuf::MessageLite& request);
  Result<std::string> Receive(uint32_t stream);
  template <typename Reply>
  Result<Reply> Call(std::string_view method, const google::protobuf::MessageLite& request) {
    DSEC_TRY(uint32_t stream, Send(method, request));
    return Receive<Reply>(stream);
  }
  template <typename Reply>
  Result<Reply> Receive(uint32_t stream) {
    DSEC_TRY(std::string payload, Receive(stream));
    Reply reply;
    if (!reply.ParseFromString(payload))
      return Error(Code::kInternal, "test.reply", "does not parse");
    return reply;
  }
  int socket() const { return socket_.get(); }

 private:
  os::UniqueFd socket_;
  rpc::FrameParser parser_;
  uint32_t next_stream_ = 1;
  std::map<uint32_t, std::string> arrived_;
};

// What a command did, its output put together from any number of replies.
struct Outcome {
  v1::ExecResult result;
  std::string out, err;
  uint64_t out_total = 0, out_dropped = 0, err_total = 0, err_dropped = 0;
  bool Exited(int code) const {
    return result.kind() == v1::END_EXITED && result.exit_code() == code;
  }
};

// A sandbox on the host's own system below a writable layer, with the real spawner, init and agent
// in it.
class AgentSandbox {
 public:
  struct Limits {
    uint64_t memory_bytes = 0;  // v1 memory group of the code
    uint64_t pids = 0;
    uint64_t cpu_millis = 0;
  };
  static Result<std::unique_ptr<AgentSandbox>> Create(const Limits& limits,
                                                      const v1::HelloRequest& hello);
  static Result<std::unique_ptr<AgentSandbox>> Create() { return Create({}, {}); }

  // A further connection that has said Hello.
  Result<std::unique_ptr<Client>> Connect();
  Client& client() { return *client_; }
  // A request for a script with a fresh op_id.
  v1::ExecRequest Script(std::string_view script);
  v1::ExecRequest Argv(const std::vector<std::string>& argv);
  // Starts it, waits for its end, collects the output and acknowledges.
  Result<Outcome> Run(const v1::ExecRequest& request);
  Result<Outcome> Run(std::string_view script) { return Run(Script(script)); }
  // What Run does after the first reply.
  Result<Outcome> Collect(v1::ExecReply reply);
  // Starts it and comes back at once.
  Result<v1::ExecReply> Start(v1::ExecRequest request);

  pid_t agent_pid() const { return sandbox_->process.agent_pid; }
  spawn::testing::Sandbox& sandbox() { return *sandbox_; }
  // A field of /proc/<agent>/smaps_rollup in KiB.
  uint64_t AgentMemoryKib(std::string_view field) const;
  // Names of the exec cgroups that exist.
  std::vector<std::string> ExecCgroups() const;

 private:
  std::unique_ptr<spawn::Spawner> spawner_;
  std::unique_ptr<spawn::testing::Sandbox> sandbox_;
  v1::HelloRequest hello_;
  std::unique_ptr<Client> client_;
  int next_op_ = 1;
};

}  // namespace dsec::aether::testing
