// SPDX-License-Identifier: Apache-2.0
#include "edge/testing/fake_backend.h"

#include <algorithm>
#include <utility>

#include "base/fault.h"
#include "model/spec.h"

namespace dsec::edge::testing {
namespace {

Error NoExec(std::string_view op_id) {
  return Error(Code::kNotFound, "exec.not_found", fmt::format("there is no exec {}", op_id));
}

}  // namespace

// --- host ---

std::unique_ptr<FakeHost> FakeHost::Clone() const {
  auto copy = std::make_unique<FakeHost>();
  std::lock_guard lock(mutex_);
  copy->state_ = state_;
  return copy;
}

std::vector<std::string> FakeHost::Things() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> things(state_.planted.begin(), state_.planted.end());
  for (const auto& [id, box] : state_.boxes) {
    if (box.cgroup) things.push_back(fmt::format("cgroup s{}", box.slot));
    if (box.scratch) things.push_back("scratch " + id);
    if (box.agent) things.push_back("agent " + id);
  }
  std::sort(things.begin(), things.end());
  return things;
}

size_t FakeHost::agents() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(state_.boxes.begin(), state_.boxes.end(),
                                           [](const auto& entry) { return entry.second.agent; }));
}

uint64_t FakeHost::Starts(std::string_view id, std::string_view op_id) const {
  std::lock_guard lock(mutex_);
  const auto box = state_.boxes.find(id);
  if (box == state_.boxes.end()) return 0;
  const auto exec = box->second.execs.find(op_id);
  return exec == box->second.execs.end() ? 0 : exec->second.starts;
}

bool FakeHost::Running(std::string_view id, std::string_view op_id) const {
  std::lock_guard lock(mutex_);
  const auto box = state_.boxes.find(id);
  if (box == state_.boxes.end() || !box->second.agent) return false;
  const auto exec = box->second.execs.find(op_id);
  return exec != box->second.execs.end() && exec->second.running;
}

std::string FakeHost::KilledBy(std::string_view id, std::string_view op_id) const {
  std::lock_guard lock(mutex_);
  const auto box = state_.boxes.find(id);
  if (box == state_.boxes.end()) return "";
  const auto exec = box->second.execs.find(op_id);
  return exec == box->second.execs.end() ? "" : exec->second.result.killed_by();
}

void FakeHost::FinishExec(std::string_view id, std::string_view op_id, int exit_code) {
  {
    std::lock_guard lock(mutex_);
    End(state_.boxes.find(id)->second.execs.find(op_id)->second, v1::END_EXITED, "", exit_code);
  }
  changes_.Announce(id);
}

void FakeHost::KillAgent(std::string_view id, bool oom) {
  {
    std::lock_guard lock(mutex_);
    KillLocked(id, oom);
  }
  changes_.Announce(id);
}

void FakeHost::KillAllAgents() {
  std::vector<std::string> ids;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, box] : state_.boxes) ids.push_back(id);
  }
  for (const std::string& id : ids) KillAgent(id, false);
}

void FakeHost::SetBootId(std::string boot_id) {
  std::lock_guard lock(mutex_);
  state_.boot_id = std::move(boot_id);
}

void FakeHost::Plant(std::string_view thing) {
  std::lock_guard lock(mutex_);
  state_.planted.emplace(thing);
}

void FakeHost::SetStuck(std::string_view id, bool stuck) {
  std::lock_guard lock(mutex_);
  if (stuck) {
    state_.stuck.emplace(id);
  } else {
    state_.stuck.erase(std::string(id));
  }
}

void FakeHost::SetSilent(std::string_view id, bool silent) {
  {
    std::lock_guard lock(mutex_);
    if (silent) {
      state_.silent.emplace(id);
    } else {
      state_.silent.erase(std::string(id));
    }
  }
  changes_.Announce(id);
}

void FakeHost::HoldShutdown(bool hold) {
  std::vector<std::string> ids;
  {
    std::lock_guard lock(mutex_);
    state_.hold_shutdown = hold;
    for (const auto& [id, box] : state_.boxes) ids.push_back(id);
  }
  for (const std::string& id : ids) changes_.Announce(id);
}

void FakeHost::SetUsage(const v1::Usage& usage) {
  std::lock_guard lock(mutex_);
  state_.usage = usage;
}

void FakeHost::End(Exec& exec, v1::EndKind kind, std::string killed_by, int exit_code) {
  if (!exec.running) return;
  exec.running = false;
  exec.result.set_kind(kind);
  exec.result.set_killed_by(std::move(killed_by));
  exec.result.set_exit_code(exit_code);
}

void FakeHost::KillLocked(std::string_view id, bool oom) {
  const auto box = state_.boxes.find(id);
  if (box == state_.boxes.end()) return;
  box->second.agent = false;
  box->second.oom = oom;
  box->second.execs.clear();
}

bool FakeHost::Alive(std::string_view id) const {
  std::lock_guard lock(mutex_);
  const auto box = state_.boxes.find(id);
  return box != state_.boxes.end() && box->second.agent;
}

Result<v1::ExecReply> FakeHost::Reply(std::string_view id, std::string_view op_id, uint64_t offset,
                                      bool known) {
  std::lock_guard lock(mutex_);
  const auto box = state_.boxes.find(id);
  if (box == state_.boxes.end() || !box->second.agent) return NoExec(op_id);
  const auto exec = box->second.execs.find(op_id);
  if (exec == box->second.execs.end()) return NoExec(op_id);
  v1::ExecReply reply;
  reply.set_op_id(std::string(op_id));
  reply.set_known(known);
  reply.set_running(exec->second.running);
  const std::string& output = exec->second.output;
  if (offset < output.size()) {
    v1::StreamChunk* chunk = reply.add_stdout_chunks();
    chunk->set_offset(offset);
    chunk->set_data(output.substr(offset));
  }
  reply.mutable_stdout_state()->set_total(output.size());
  reply.set_stdout_next(output.size());
  if (!exec->second.running) {
    *reply.mutable_result() = exec->second.result;
    reply.set_drained(true);
  }
  return reply;
}

// --- the agent, as it is reached over a channel ---

class FakeChannel final : public rpc::Channel {
 public:
  FakeChannel(FakeHost& host, std::string id, runtime::Executor executor)
      : host_(host), id_(std::move(id)), executor_(std::move(executor)) {}

  runtime::Task<std::string> CallRaw(std::string_view, std::string_view method, std::string payload,
                                     runtime::Deadline deadline) override {
    return Dispatch(std::string(method), std::move(payload), deadline);
  }
  Result<std::unique_ptr<Stream>> OpenStream(std::string_view, std::string_view, std::string,
                                             runtime::Deadline) override {
    return Error(Code::kUnavailable, "rpc.closed", "the fake agent has no streams");
  }
  bool closed() const override { return closed_ || !host_.Alive(id_); }
  runtime::Task<void> WaitClosed() override {
    EventHub::Subscription changes(host_.changes_, id_, executor_);
    while (!closed()) DSEC_CO_TRY_VOID(co_await changes.Wait(runtime::Deadline::Never()));
    co_return Ok();
  }
  void Close() override { closed_ = true; }

 private:
  runtime::Task<std::string> Dispatch(std::string method, std::string payload,
                                      runtime::Deadline deadline) {
    EventHub::Subscription changes(host_.changes_, id_, executor_);
    while (host_.Silent(id_) && !closed()) {
      DSEC_CO_TRY_VOID(co_await changes.Wait(deadline));
    }
    if (closed()) co_return Closed();
    if (method == "Exec") co_return co_await Exec(std::move(payload), changes, deadline);
    if (method == "Poll") {
      v1::PollRequest request;
      request.ParseFromString(payload);
      co_return co_await Poll(std::move(request), true, changes, deadline);
    }
    if (method == "Shutdown") co_return co_await Shutdown(changes, deadline);
    co_return Short(method, payload);
  }

  static Error Closed() { return Error(Code::kUnavailable, "rpc.closed", "the agent is gone"); }

  runtime::Task<std::string> Exec(std::string payload, EventHub::Subscription& changes,
                                  runtime::Deadline deadline) {
    v1::ExecRequest request;
    request.ParseFromString(payload);
    bool known = false;
    {
      std::lock_guard lock(host_.mutex_);
      const auto box = host_.state_.boxes.find(id_);
      if (box == host_.state_.boxes.end()) co_return Closed();
      const auto [exec, fresh] = box->second.execs.try_emplace(request.op_id());
      known = !fresh;
      if (known && exec->second.digest != request.request_digest()) {
        co_return Error(Code::kAlreadyExists, "exec.op_id_reused",
                        "op_id was used with another body");
      }
      if (fresh) {
        exec->second.digest = request.request_digest();
        exec->second.detached = request.detached();
        const std::string word = request.argv_size() > 0 ? request.argv(0) : "";
        const std::string argument = request.argv_size() > 1 ? request.argv(1) : "";
        if (word == "echo") exec->second.output = argument + "\n";
        if (word == "echo") host_.End(exec->second, v1::END_EXITED, "", 0);
        if (word == "exit") host_.End(exec->second, v1::END_EXITED, "", std::stoi(argument));
      }
    }
    v1::PollRequest poll;
    poll.set_op_id(request.op_id());
    poll.set_wait_ms(request.wait_ms());
    co_return co_await Poll(std::move(poll), known, changes, deadline);
  }

  runtime::Task<std::string> Poll(v1::PollRequest request, bool known,
                                  EventHub::Subscription& changes, runtime::Deadline deadline) {
    const auto until =
        deadline.Sooner(runtime::Deadline::After(std::chrono::milliseconds(request.wait_ms())));
    while (true) {
      if (closed()) co_return Closed();
      DSEC_CO_TRY(const auto reply,
                  host_.Reply(id_, request.op_id(), request.stdout_offset(), known));
      if (!reply.running() || reply.stdout_chunks_size() > 0 || until.Expired())
        co_return reply.SerializeAsString();
      auto woken = co_await changes.Wait(until);
      if (!woken.ok() && woken.error().code() == Code::kCancelled)
        co_return std::move(woken).error();
    }
  }

  runtime::Task<std::string> Shutdown(EventHub::Subscription& changes, runtime::Deadline deadline) {
    while (host_.ShutdownHeld()) {
      if (closed()) co_return Closed();
      DSEC_CO_TRY_VOID(co_await changes.Wait(deadline));
    }
    {
      std::lock_guard lock(host_.mutex_);
      const auto box = host_.state_.boxes.find(id_);
      if (box == host_.state_.boxes.end()) co_return Closed();
      for (auto& [op_id, exec] : box->second.execs) host_.End(exec, v1::END_KILLED, "stop", 0);
    }
    host_.changes_.Announce(id_);
    co_return v1::Empty().SerializeAsString();
  }

  Result<std::string> Short(const std::string& method, const std::string& payload) {
    std::unique_lock lock(host_.mutex_);
    const auto box = host_.state_.boxes.find(id_);
    if (box == host_.state_.boxes.end()) return Closed();
    if (method == "ListExecs") {
      v1::ListExecsReply reply;
      for (const auto& [op_id, exec] : box->second.execs) {
        v1::ExecSummary* summary = reply.add_execs();
        summary->set_op_id(op_id);
        summary->set_running(exec.running);
        summary->set_detached(exec.detached);
        summary->set_request_digest(exec.digest);
        if (!exec.running) *summary->mutable_result() = exec.result;
      }
      return reply.SerializeAsString();
    }
    if (method == "Signal") {
      v1::SignalRequest request;
      request.ParseFromString(payload);
      const auto exec = box->second.execs.find(request.op_id());
      if (exec == box->second.execs.end()) return NoExec(request.op_id());
      host_.End(exec->second, v1::END_KILLED, request.killed_by(), 0);
      lock.unlock();
      host_.changes_.Announce(id_);
      return v1::Empty().SerializeAsString();
    }
    if (method == "Stat") {
      v1::FileInfo info;
      info.set_type("file");
      return info.SerializeAsString();
    }
    return Error(Code::kNotFound, "rpc.unimplemented",
                 fmt::format("the fake agent has no {}", method));
  }

  FakeHost& host_;
  const std::string id_;
  const runtime::Executor executor_;
  bool closed_ = false;
};

class FakeInstance final : public sandbox::Instance {
 public:
  FakeInstance(FakeHost& host, std::string id, const runtime::Executor& executor)
      : host_(host),
        id_(std::move(id)),
        agent_(std::make_shared<FakeChannel>(host_, id_, executor)) {}

  std::shared_ptr<rpc::Channel> agent() override { return agent_->closed() ? nullptr : agent_; }
  runtime::Task<sandbox::AgentEnd> WaitEnd() override { return WaitEndOf(host_, id_, agent_); }
  runtime::Task<v1::Usage> ReadUsage() override {
    std::lock_guard lock(host_.mutex_);
    co_return host_.state_.usage;
  }
  // Of the name "endless": until the agent's end, as a pack that its removal cuts off.
  runtime::Task<v1::PackReply> Pack(v1::PackRequest request, sandbox::PackProgressFn progress,
                                    runtime::Deadline) override {
    if (request.kind() == "base") {
      co_return Error(Code::kInvalidArgument, "pack.bad_kind", "no base").WithField("kind");
    }
    v1::PackProgress state;
    state.set_phase(v1::PackProgress::PHASE_READ);
    state.set_entries(3);
    if (progress && !progress(state)) {
      co_return Error(Code::kCancelled, "layer.cancelled", "cancelled");
    }
    if (request.name() == "endless") {
      DSEC_CO_TRY_VOID(co_await agent_->WaitClosed());
      co_return Error(Code::kCancelled, sandbox::kRemovedReason, "the sandbox is being removed");
    }
    v1::PackReply reply;
    reply.mutable_layer()->set_id("sha256:" + std::string(64, 'a'));
    reply.mutable_layer()->set_kind(request.kind());
    reply.mutable_layer()->add_names(request.name());
    *reply.mutable_layer()->mutable_labels() = request.labels();
    reply.set_frozen_us(12);
    reply.add_warnings("\"s\": sockets are left out");
    reply.set_warning_count(1);
    co_return reply;
  }
  runtime::Task<v1::FirstTouchReply> FirstTouch(v1::FirstTouchRequest request,
                                                runtime::Deadline) override {
    v1::FirstTouchReply reply;
    v1::LayerTouch& layer = *reply.add_layers();
    layer.set_layer_id("sha256:" + std::string(64, 'a'));
    layer.set_parts(2);
    layer.set_bytes(8192);
    layer.set_saved(request.save());
    reply.set_stopped(request.stop());
    co_return reply;
  }

 private:
  static runtime::Task<sandbox::AgentEnd> WaitEndOf(FakeHost& host, std::string id,
                                                    std::shared_ptr<FakeChannel> agent) {
    DSEC_CO_TRY_VOID(co_await agent->WaitClosed());
    std::lock_guard lock(host.mutex_);
    const auto box = host.state_.boxes.find(id);
    const bool oom = box != host.state_.boxes.end() && box->second.oom;
    co_return sandbox::AgentEnd{.oom = oom, .message = oom ? "out of memory" : "killed"};
  }

  FakeHost& host_;
  const std::string id_;
  const std::shared_ptr<FakeChannel> agent_;
};

bool FakeHost::Silent(std::string_view id) const {
  std::lock_guard lock(mutex_);
  return state_.silent.contains(id);
}

bool FakeHost::ShutdownHeld() const {
  std::lock_guard lock(mutex_);
  return state_.hold_shutdown;
}

// --- backend ---

std::vector<v1::Capability> FakeBackend::Capabilities() const {
  v1::Capability capability;
  capability.set_name("fake");
  capability.set_used("memory");
  capability.set_ok(true);
  return {capability};
}

Result<void> FakeBackend::Normalize(v1::SandboxSpec& spec) const {
  return model::NormalizeSpec(spec, model::LimitsPolicy());
}

runtime::Task<std::shared_ptr<sandbox::Instance>> FakeBackend::Create(v1::SandboxRecord& record,
                                                                      sandbox::Journal journal,
                                                                      runtime::Deadline deadline) {
  const auto executor = co_await boost::asio::this_coro::executor;
  const std::string id = record.id();
  {
    std::lock_guard lock(mutex_);
    making_.insert(id);
  }
  // The thread may go on after the deadline: it works on a copy.
  const auto copy = std::make_shared<v1::SandboxRecord>(record);
  auto make = [this, copy, journal = std::move(journal)]() -> Result<void> {
    auto result = Make(*copy, journal);
    std::lock_guard lock(mutex_);
    making_.erase(copy->id());
    return result;
  };
  auto made = co_await pool_.Run(std::move(make), deadline);
  bool under_way = false;
  {
    std::lock_guard lock(mutex_);
    under_way = making_.contains(id);
  }
  if (!under_way) record = *copy;
  if (!made.ok()) co_return std::move(made).error();
  co_return std::make_shared<FakeInstance>(host_, id, executor);
}

Result<void> FakeBackend::Make(v1::SandboxRecord& record, const sandbox::Journal& journal) {
  uint32_t slot = 0;
  {
    std::lock_guard lock(host_.mutex_);
    std::set<uint32_t> used;
    for (const auto& [id, box] : host_.state_.boxes) used.insert(box.slot);
    while (used.contains(slot)) ++slot;
    record.set_slot(slot);
    record.set_slot_generation(host_.state_.next_generation++);
    record.set_boot_id(host_.state_.boot_id);
    // The slot is taken in memory before it is on record, so that no other create takes it.
    FakeHost::Box& box = host_.state_.boxes[record.id()];
    box.slot = slot;
    box.generation = record.slot_generation();
  }
  const auto change = [&](auto apply) {
    std::lock_guard lock(host_.mutex_);
    apply(host_.state_.boxes[record.id()]);
  };
  DSEC_TRY_VOID(journal(record));
  DSEC_FAULT_POINT("fake.create.step");
  change([](FakeHost::Box& box) { box.cgroup = true; });
  record.set_scratch(record.id());
  DSEC_TRY_VOID(journal(record));
  DSEC_FAULT_POINT("fake.create.step");
  change([](FakeHost::Box& box) { box.scratch = true; });
  {
    std::lock_guard lock(host_.mutex_);
    record.set_agent_pid(host_.state_.next_pid++);
  }
  record.set_agent_start_time(record.slot_generation());
  DSEC_TRY_VOID(journal(record));
  DSEC_FAULT_POINT("fake.create.step");
  change([&](FakeHost::Box& box) {
    box.agent = true;
    box.pid = record.agent_pid();
  });
  return Ok();
}

runtime::Task<std::shared_ptr<sandbox::Instance>> FakeBackend::Adopt(
    const v1::SandboxRecord& record, runtime::Deadline) {
  const auto executor = co_await boost::asio::this_coro::executor;
  {
    std::lock_guard lock(host_.mutex_);
    const auto box = host_.state_.boxes.find(record.id());
    if (box == host_.state_.boxes.end() || !box->second.agent ||
        box->second.pid != record.agent_pid()) {
      co_return Error(Code::kGone, "agent.gone",
                      fmt::format("agent {} is not alive", record.agent_pid()));
    }
    if (host_.state_.silent.contains(record.id())) {
      co_return Error(Code::kDeadlineExceeded, "agent.silent", "the agent does not answer");
    }
  }
  co_return std::make_shared<FakeInstance>(host_, record.id(), executor);
}

runtime::Task<void> FakeBackend::Destroy(const v1::SandboxRecord& record,
                                         runtime::Deadline deadline) {
  const std::string id = record.id();
  auto destroy = [this, id]() -> Result<void> {
    host_.KillAgent(id, false);
    std::scoped_lock lock(mutex_, host_.mutex_);
    if (making_.contains(id))
      return Error(Code::kDeadlineExceeded, "sandbox.stuck", "its create hangs");
    if (host_.state_.stuck.contains(id)) {
      return Error(Code::kDeadlineExceeded, "sandbox.stuck", "a process is in state D");
    }
    host_.state_.boxes.erase(id);
    return Ok();
  };
  co_return co_await pool_.Run(std::move(destroy), deadline);
}

runtime::Task<std::vector<std::string>> FakeBackend::Sweep(
    const std::vector<v1::SandboxRecord>& live, runtime::Deadline) {
  std::set<std::string, std::less<>> owned;
  for (const v1::SandboxRecord& record : live) owned.insert(record.id());
  std::vector<std::string> lines;
  std::scoped_lock lock(mutex_, host_.mutex_);
  for (const std::string& thing : std::exchange(host_.state_.planted, {}))
    lines.push_back("removed " + thing);
  std::erase_if(host_.state_.boxes, [&](const auto& entry) {
    const bool orphan = !owned.contains(entry.first) && !making_.contains(entry.first);
    if (orphan) lines.push_back("removed sandbox " + entry.first);
    return orphan;
  });
  co_return lines;
}

}  // namespace dsec::edge::testing
