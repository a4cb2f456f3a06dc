// SPDX-License-Identifier: Apache-2.0
#include "fn/testing/scripted_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <thread>

namespace dsec::fn::testing {
namespace {

using runtime::Deadline;
using sandbox::FnFetched;
using sandbox::FnReport;
using sandbox::FnRun;

constexpr uint64_t kMaxWallMs = 600'000;
constexpr std::chrono::seconds kPatience{30};

Error Died() { return Error(Code::kUnavailable, "fn.worker_died", "the worker died"); }

}  // namespace

struct ScriptedBackend::Shared {
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::set<std::string> layers = {"base:1", "other:1", "third:1"};
  std::set<std::string> released;
  std::map<std::string, size_t> waiting;
  std::deque<Error> make_failures;
  bool hold_makes = false;
  size_t made = 0, tried = 0, resolved = 0, most_alive = 0;
  std::map<std::string, class ScriptedWorker*> workers;
  std::vector<Ran> runs;
};

// Wakes on its shard whoever waits for something to change.
class ScriptedWorker final : public sandbox::FnWorker {
 public:
  struct State {
    explicit State(runtime::Executor executor) : home(std::move(executor)) {}
    const runtime::Executor home;
    const std::thread::id thread = std::this_thread::get_id();
    runtime::AsyncEvent changed;
    runtime::AsyncEvent ended;
    bool dead = false;
    bool over = false;
    bool busy = false;
    bool waited_for = false;
  };

  ScriptedWorker(std::shared_ptr<ScriptedBackend::Shared> shared, std::string name,
                 std::string base, runtime::Executor home)
      : shared_(std::move(shared)),
        name_(std::move(name)),
        base_(std::move(base)),
        state_(std::make_shared<State>(std::move(home))) {
    const std::lock_guard lock(shared_->mutex);
    shared_->workers[name_] = this;
    shared_->most_alive = std::max(shared_->most_alive, shared_->workers.size());
  }
  ~ScriptedWorker() override {
    const std::lock_guard lock(shared_->mutex);
    shared_->workers.erase(name_);
    shared_->changed.notify_all();
  }

  std::string_view name() const override { return name_; }
  runtime::Task<FnReport> Run(FnRun run, Deadline deadline) override;
  runtime::Task<void> WaitEnd() override {
    const auto state = state_;
    EXPECT_FALSE(std::exchange(state->waited_for, true)) << "two wait for the end of " << name_;
    co_return co_await state->ended.Wait(Deadline::Never());
  }

  // Any thread.
  void Wake() const {
    boost::asio::post(state_->home, [state = state_] {
      state->changed.Set();
      state->changed.Reset();
    });
  }
  void Kill() const {
    boost::asio::post(state_->home, [state = state_] {
      state->dead = true;
      state->ended.Set();
      state->changed.Set();
      state->changed.Reset();
    });
  }

 private:
  runtime::Task<FnReport> Program(const FnRun& run);
  runtime::Task<void> WaitFor(std::string name);
  bool Released(const std::string& name) const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->released.contains(name);
  }

  const std::shared_ptr<ScriptedBackend::Shared> shared_;
  const std::string name_;
  const std::string base_;
  const std::shared_ptr<State> state_;
};

runtime::Task<void> ScriptedWorker::WaitFor(std::string name) {
  {
    const std::lock_guard lock(shared_->mutex);
    ++shared_->waiting[name];
    shared_->changed.notify_all();
  }
  while (!Released(name)) {
    if (state_->dead) co_return Died();
    auto woken = co_await state_->changed.Wait(Deadline::Never());
    if (!woken.ok()) co_return std::move(woken).error();
  }
  co_return Ok();
}

runtime::Task<FnReport> ScriptedWorker::Run(FnRun run, Deadline) {
  EXPECT_EQ(std::this_thread::get_id(), state_->thread) << "another shard";
  EXPECT_FALSE(state_->over) << name_ << " is over";
  EXPECT_FALSE(std::exchange(state_->busy, true)) << name_ << " has a call";
  const v1::FnLimits& l = run.limits;
  for (const uint64_t limit : {l.wall_ms(), l.cpu_ms(), l.memory_bytes(), l.processes(),
                               l.output_bytes(), l.file_bytes(), l.disk_bytes(), l.disk_inodes()}) {
    EXPECT_NE(limit, 0) << "a limit is not set";
  }
  {
    ScriptedBackend::Ran ran{name_, run.argv, {}, run.devices, run.limits, base_};
    for (const v1::FnFile* file : run.files) {
      EXPECT_TRUE(file->artifact().empty()) << "a file without its content";
      ran.files.push_back(file->path());
    }
    const std::lock_guard lock(shared_->mutex);
    shared_->runs.push_back(std::move(ran));
  }
  if (state_->dead) {
    state_->over = true;
    co_return Died();
  }
  if (run.argv.at(0) == "/bin/gone") {
    state_->busy = false;
    co_return Error(Code::kNotFound, "fn.exec_failed", run.argv[0] + " cannot be executed")
        .WithErrno(ENOENT);
  }
  auto report = co_await Program(run);
  state_->busy = false;
  state_->over = !report.ok() ? report.error().reason() != "fn.exec_failed" : report->dirty;
  co_return report;
}

runtime::Task<FnReport> ScriptedWorker::Program(const FnRun& run) {
  const bool compiler = run.argv[0] == "/bin/cc";
  std::map<std::string, std::string> files;
  for (const v1::FnFile* file : run.files) files[file->path()] = file->content();
  if (!run.code_path.empty()) files[run.code_path] = std::string(run.code);
  std::string program(run.code);
  if (run.argv[0].starts_with("./")) {
    const auto found = files.find(run.argv[0].substr(2));
    if (found == files.end()) {
      co_return Error(Code::kNotFound, "fn.exec_failed", run.argv[0] + " cannot be executed")
          .WithErrno(ENOENT);
    }
    program = found->second;
  }
  FnReport report;
  std::map<std::string, std::string> made;
  std::string out;
  v1::FnStep& step = report.step;
  step.set_verdict(v1::FN_OK);
  step.set_wall_usec(1000);
  std::istringstream lines(program);
  std::string line;
  while (std::getline(lines, line)) {
    if (compiler) {
      if (!line.starts_with("cc ")) {
        made["prog"] += line + "\n";
        continue;
      }
      line = line.substr(3);
    }
    const std::string word = line.substr(0, line.find(' '));
    const std::string rest = word.size() < line.size() ? line.substr(word.size() + 1) : "";
    if (word == "echo") {
      out += rest + "\n";
    } else if (word == "stdin") {
      out += run.stdin_bytes;
    } else if (word == "args") {
      for (size_t i = 1; i < run.argv.size(); ++i) out += "[" + run.argv[i] + "]";
    } else if (word == "env") {
      for (const auto& [key, value] : run.env) {
        if (key == rest) out += value;
      }
    } else if (word == "cat") {
      if (!files.contains(rest)) {
        step.set_verdict(v1::FN_WRONG_EXIT);
        step.set_exit_code(1);
        break;
      }
      out += files[rest];
    } else if (word == "write") {
      const size_t space = rest.find(' ');
      made[rest.substr(0, space)] = rest.substr(space + 1);
    } else if (word == "exit") {
      step.set_exit_code(std::stoi(rest));
      if (step.exit_code() != 0) step.set_verdict(v1::FN_WRONG_EXIT);
      break;
    } else if (word == "verdict") {
      if (rest == "MEMORY") step.set_verdict(v1::FN_MEMORY_LIMIT), step.set_limit("memory");
      if (rest == "OUTPUT") step.set_verdict(v1::FN_OUTPUT_LIMIT), step.set_limit("output");
      if (rest == "WALL") step.set_verdict(v1::FN_TIME_LIMIT), step.set_limit("wall");
      if (rest == "CPU") step.set_verdict(v1::FN_TIME_LIMIT), step.set_limit("cpu");
      break;
    } else if (word == "wait") {
      auto waited = co_await WaitFor(rest);
      if (!waited.ok()) co_return std::move(waited).error();
    } else if (word == "yield") {
      co_await boost::asio::post(co_await boost::asio::this_coro::executor,
                                 boost::asio::use_awaitable);
    } else if (word == "die") {
      Kill();
      state_->dead = true;
      co_return Died();
    } else if (word == "break") {
      co_return Error(Code::kUnavailable, "fn.worker_broken", "the worker is broken");
    } else if (word == "dirty") {
      report.dirty = true;
      report.dirt = "planted";
    } else if (word == "nothing") {
      step.set_verdict(v1::FN_VERDICT_UNSPECIFIED);
      break;
    } else if (!word.empty() && word != "cc") {
      ADD_FAILURE() << "no such line: " << line;
    }
    if (state_->dead) co_return Died();
  }
  step.mutable_stdout()->set_data(out);
  step.mutable_stdout()->set_total(out.size());
  for (const std::string& wanted : run.fetch) {
    if (wanted == "*") {
      for (const auto& [path, content] : made) report.files.push_back({path, content, 0755});
    } else if (made.contains(wanted)) {
      report.files.push_back({wanted, made[wanted], 0755});
    } else {
      report.missing.push_back(wanted);
    }
  }
  co_return report;
}

std::shared_ptr<ScriptedBackend::Shared> ScriptedBackend::MakeShared() {
  return std::make_shared<Shared>();
}

ScriptedBackend::~ScriptedBackend() {
  EXPECT_TRUE(shared_->workers.empty()) << shared_->workers.size() << " workers are left";
}

runtime::Task<v1::FnEnvironment> ScriptedBackend::Resolve(v1::FnEnvironment environment, Deadline) {
  const std::lock_guard lock(shared_->mutex);
  ++shared_->resolved;
  if (!shared_->layers.contains(environment.base())) {
    co_return Error(Code::kNotFound, "layer.not_found", "no layer " + environment.base())
        .WithField("base");
  }
  environment.set_base("id-of-" + environment.base());
  co_return environment;
}

Result<v1::FnLimits> ScriptedBackend::Normalize(v1::FnLimits limits,
                                                std::string_view prefix) const {
  const auto fill = [](uint64_t value, uint64_t fallback) { return value != 0 ? value : fallback; };
  limits.set_wall_ms(fill(limits.wall_ms(), 10'000));
  limits.set_cpu_ms(fill(limits.cpu_ms(), 10'000));
  limits.set_memory_bytes(fill(limits.memory_bytes(), 256 << 20));
  limits.set_processes(fill(limits.processes(), 64));
  limits.set_output_bytes(fill(limits.output_bytes(), 1 << 20));
  limits.set_file_bytes(fill(limits.file_bytes(), 64 << 20));
  limits.set_disk_bytes(fill(limits.disk_bytes(), 64 << 20));
  limits.set_disk_inodes(fill(limits.disk_inodes(), 4096));
  if (limits.wall_ms() > kMaxWallMs) {
    return Error(Code::kInvalidArgument, "spec.out_of_range", "wall_ms is above the maximum")
        .WithField(std::string(prefix) + ".wall_ms");
  }
  return limits;
}

runtime::Task<std::unique_ptr<sandbox::FnWorker>> ScriptedBackend::MakeWorker(
    sandbox::FnWorkerSpec spec, Deadline deadline) {
  const auto home = co_await boost::asio::this_coro::executor;
  std::string name;
  {
    const std::lock_guard lock(shared_->mutex);
    ++shared_->tried;
    shared_->changed.notify_all();
    if (!shared_->make_failures.empty()) {
      Error error = shared_->make_failures.front();
      shared_->make_failures.pop_front();
      co_return error;
    }
  }
  while (true) {
    {
      const std::lock_guard lock(shared_->mutex);
      if (!shared_->hold_makes) {
        name = "w" + std::to_string(++shared_->made);
        break;
      }
    }
    if (deadline.Expired()) co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "held");
    auto slept = co_await runtime::SleepUntil(Deadline::After(std::chrono::milliseconds(1)));
    if (!slept.ok()) co_return std::move(slept).error();
  }
  co_return std::make_unique<ScriptedWorker>(shared_, name, spec.environment.base(), home);
}

runtime::Task<std::vector<std::string>> ScriptedBackend::Sweep(
    const std::vector<v1::SandboxRecord>&, Deadline) {
  co_return std::vector<std::string>{"swept"};
}

void ScriptedBackend::SetLayers(std::set<std::string> names) {
  const std::lock_guard lock(shared_->mutex);
  shared_->layers = std::move(names);
}

void ScriptedBackend::Release(const std::string& name) {
  const std::lock_guard lock(shared_->mutex);
  shared_->released.insert(name);
  for (const auto& [key, worker] : shared_->workers) worker->Wake();
}

void ScriptedBackend::AwaitWaiting(const std::string& name, size_t count) {
  std::unique_lock lock(shared_->mutex);
  EXPECT_TRUE(
      shared_->changed.wait_for(lock, kPatience, [&] { return shared_->waiting[name] >= count; }))
      << shared_->waiting[name] << " of " << count << " wait at " << name;
}

void ScriptedBackend::FailMakes(size_t count, const Error& error) {
  const std::lock_guard lock(shared_->mutex);
  shared_->make_failures.assign(count, error);
}

void ScriptedBackend::HoldMakes(bool hold) {
  const std::lock_guard lock(shared_->mutex);
  shared_->hold_makes = hold;
}

bool ScriptedBackend::Kill(const std::string& worker) {
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->workers.find(worker);
  if (found == shared_->workers.end()) return false;
  found->second->Kill();
  return true;
}

std::vector<std::string> ScriptedBackend::Alive() const {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::string> names;
  for (const auto& [name, worker] : shared_->workers) names.push_back(name);
  return names;
}

size_t ScriptedBackend::made() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->made;
}
size_t ScriptedBackend::makes_tried() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->tried;
}
size_t ScriptedBackend::resolved() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->resolved;
}
size_t ScriptedBackend::most_alive() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->most_alive;
}
std::vector<ScriptedBackend::Ran> ScriptedBackend::runs() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->runs;
}

}  // namespace dsec::fn::testing
