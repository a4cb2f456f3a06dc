// SPDX-License-Identifier: Apache-2.0
// What making a slot, launching it and an exec through its init cost, by step; medians, one JSON
// object a line. Cold: after a pause, when the first migration between cgroups waits for an RCU
// grace period. Warm: right after another.
//
//   spawn_bench [runs]

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "os/fd_passing.h"
#include "spawn/testing/sandbox.h"

namespace dsec::spawn {
namespace {

using testing::Sandbox;

class Series {
 public:
  void Add(const std::string& name, double usec) {
    if (!values_.contains(name)) order_.push_back(name);
    values_[name].push_back(usec);
  }
  void Add(const std::vector<StepTime>& steps) {
    for (const StepTime& step : steps) Add(std::string(step.step), step.usec);
  }
  void Print(const char* title) {
    for (const std::string& name : order_) {
      auto& values = values_[name];
      std::sort(values.begin(), values.end());
      std::printf(
          "{\"benchmark\": \"%s\", \"step\": \"%s\", \"runs\": %zu, \"median_us\": %.0f, "
          "\"p90_us\": %.0f}\n",
          title, name.c_str(), values.size(), values[values.size() / 2],
          values[values.size() * 9 / 10]);
    }
  }

 private:
  std::vector<std::string> order_;
  std::map<std::string, std::vector<double>> values_;
};

double Since(MonoTime begin) {
  return std::chrono::duration<double, std::micro>(Clock::System().Mono() - begin).count();
}

template <typename T>
T Must(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "spawn_bench: %s\n", result.error().ToString().c_str());
  std::exit(1);
}

int Main(int runs) {
  if (auto missing = testing::WhatIsMissing()) {
    std::fprintf(stderr, "spawn_bench: %s\n", missing->c_str());
    return 1;
  }
  auto spawner = Must(Spawner::Start(testing::TestSpawnerOptions()));
  Series cold, warm, launch, exec;
  std::unique_ptr<Sandbox> sandbox;
  for (int i = 0; i < runs; ++i) {
    bool is_cold = i % 2 == 0;
    if (is_cold) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    auto made = Must(Sandbox::MakeSlot(*spawner));
    Series& series = is_cold ? cold : warm;
    series.Add("total", static_cast<double>(made->make_usec));
    series.Add(made->process.steps);
    auto root = Must(made->NewRoot());
    MonoTime begin = Clock::System().Mono();
    auto report = Must(made->Launch(Sandbox::DefaultPlan(), std::move(root)));
    launch.Add("total with connect", Since(begin));
    launch.Add(report.steps);
    if (!is_cold) sandbox = std::move(made);
  }
  for (int i = 0; i < runs * 5; ++i) {
    testing::ExecSpec spec;
    spec.argv = {"/bin/guest", "true"};
    MonoTime begin = Clock::System().Mono();
    auto result = Must(sandbox->Exec(spec));
    exec.Add("true, default cgroup", Since(begin));
    if (!result.Exited(0)) return 1;
  }
  for (int i = 0; i < 60; ++i) {
    std::vector<os::UniqueFd> fds;
    std::string name = "x" + std::to_string(i);
    MonoTime begin = Clock::System().Mono();
    if (*sandbox->Ask("c" + name, &fds) != "ok") return 1;
    exec.Add("make a cgroup", Since(begin));
    testing::ExecSpec spec;
    spec.argv = {"/bin/guest", "true"};
    spec.cgroup = fds[0].get();
    begin = Clock::System().Mono();
    auto result = Must(sandbox->Exec(spec));
    exec.Add("true, own cgroup", Since(begin));
    if (!result.Exited(0)) return 1;
  }
  for (int i = 0; i < runs * 5; ++i) {
    MonoTime begin = Clock::System().Mono();
    pid_t pid = ::fork();
    if (pid == 0) {
      ::execl(testing::GuestPath().c_str(), "guest", "true", nullptr);
      ::_exit(1);
    }
    ::waitpid(pid, nullptr, 0);
    exec.Add("plain fork and exec of the same program", Since(begin));
  }
  cold.Print("slot cold");
  warm.Print("slot warm");
  launch.Print("launch");
  exec.Print("exec");
  return 0;
}

}  // namespace
}  // namespace dsec::spawn

int main(int argc, char** argv) {
  int runs = argc > 1 ? std::atoi(argv[1]) : 40;
  return dsec::spawn::Main(std::clamp(runs, 2, 1000));
}
