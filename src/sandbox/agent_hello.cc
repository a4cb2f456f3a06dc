// SPDX-License-Identifier: Apache-2.0
#include "sandbox/agent_hello.h"

#include <fmt/format.h>

#include <utility>

#include "sandbox/fd_wait.h"

namespace dsec::sandbox {
namespace {

constexpr char kAgentService[] = "dsec.v1.Aether";

void AddEnv(v1::HelloRequest& hello, const char* key, uint64_t value) {
  for (const v1::KeyValue& item : hello.env()) {
    if (item.key() == key) return;
  }
  v1::KeyValue* item = hello.add_env();
  item->set_key(key);
  item->set_value(fmt::format("{}", value));
}

}  // namespace

v1::HelloRequest HelloOf(const v1::SandboxRecord& record, std::string token) {
  const v1::SandboxSpec& spec = record.spec();
  v1::HelloRequest hello;
  hello.set_sandbox_id(record.id());
  hello.set_token(std::move(token));
  *hello.mutable_env() = spec.env();
  AddEnv(hello, "DSEC_CPU_LIMIT_MILLIS", spec.limits().cpu_millis());
  AddEnv(hello, "DSEC_MEMORY_LIMIT_BYTES", spec.limits().memory_bytes());
  hello.set_workdir(spec.workdir());
  hello.set_user(spec.user());
  hello.set_output_bytes(spec.limits().output_bytes());
  hello.set_open_files(spec.limits().open_files());
  hello.set_memory_limit_bytes(spec.limits().memory_bytes());
  hello.set_pids_limit(spec.limits().pids());
  return hello;
}

runtime::Task<std::shared_ptr<rpc::Channel>> SayHello(std::shared_ptr<rpc::Channel> channel,
                                                      v1::HelloRequest hello,
                                                      runtime::Deadline deadline) {
  auto reply = co_await channel->Call<v1::HelloReply>(kAgentService, "Hello", hello, deadline);
  if (!reply.ok()) {
    channel->Close();
    co_return std::move(reply).error().Context("Hello to the agent of {}", hello.sandbox_id());
  }
  co_return channel;
}

runtime::Task<void> WaitGone(const DyingSlot& dying, runtime::Deadline deadline) {
  while (dying.events.valid()) {
    DSEC_CO_TRY(const bool empty, CgroupTree::IsEmpty(dying.events.get()));
    if (empty) break;
    DSEC_CO_TRY_VOID(co_await WaitFd(dying.events.get(), FdEvent::kPriority, deadline));
  }
  if (!dying.agent.valid()) co_return Ok();
  co_return co_await WaitFd(dying.agent.fd(), FdEvent::kReadable, deadline);
}

}  // namespace dsec::sandbox
