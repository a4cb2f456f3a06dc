// SPDX-License-Identifier: Apache-2.0
// The least that a fresh sandbox costs on this kernel, without any platform around it: new mount,
// pid, uts, ipc and net namespaces, an overlay of its own, pivot_root, execution of a static
// binary, its exit. What remains above this figure in other benchmarks is the platform's.
//
//   dsec-floor [--runs N] [--concurrency N] [--no-net]      one JSON object on stdout

#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

namespace {

constexpr char kBase[] = "/tmp";  // covered by a tmpfs that only this process and its children see
constexpr int kMaxRuns = 100000;
constexpr int kMaxConcurrency = 1024;

struct Options {
  int runs = 200;
  int concurrency = 1;
  bool net = true;
};

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "dsec-floor: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

[[noreturn]] void Usage(const char* problem, const char* value) {
  std::fprintf(
      stderr,
      "dsec-floor: %s '%s'\nusage: dsec-floor [--runs 1..%d] [--concurrency 1..%d] [--no-net]\n",
      problem, value, kMaxRuns, kMaxConcurrency);
  std::exit(2);
}

int ParseCount(const char* name, const char* text, int max) {
  int value = 0;
  if (text == nullptr) Usage("missing value of", name);
  auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != '\0' || value < 1 || value > max)
    Usage("not a count in range:", text);
  return value;
}

uint64_t NowNs() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void CopySelf(const char* to) {
  int in = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  int out = ::open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
  if (in < 0 || out < 0) Die("copy the program");
  char data[65536];
  ssize_t n;
  while ((n = ::read(in, data, sizeof(data))) > 0) {
    if (::write(out, data, static_cast<size_t>(n)) != n) Die("copy the program");
  }
  ::close(in);
  ::close(out);
}

void Prepare(int runs) {
  if (::unshare(CLONE_NEWNS) != 0) Die("unshare (needs root)");
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) Die("make mounts private");
  if (::mount("none", kBase, "tmpfs", 0, "mode=0755") != 0 || ::chdir(kBase) != 0)
    Die("mount a tmpfs");
  if (::mkdir("lower", 0755) != 0) Die("mkdir");
  CopySelf("lower/floor");
  for (int i = 0; i < runs; ++i) {
    char path[64];
    for (const char* part : {"%d", "%d/upper", "%d/work", "%d/root"}) {
      std::snprintf(path, sizeof(path), part, i);
      if (::mkdir(path, 0755) != 0) Die("mkdir");
    }
  }
}

// In the new namespaces. Exit statuses tell where it failed.
[[noreturn]] void RunInside(int index) {
  char options[192], root[64];
  std::snprintf(options, sizeof(options),
                "lowerdir=%s/lower,upperdir=%s/%d/upper,workdir=%s/%d/work,volatile", kBase, kBase,
                index, kBase, index);
  std::snprintf(root, sizeof(root), "%s/%d/root", kBase, index);
  if (::mount("overlay", root, "overlay", 0, options) != 0) ::_exit(10);
  if (::chdir(root) != 0 || ::syscall(SYS_pivot_root, ".", ".") != 0) ::_exit(11);
  if (::umount2(".", MNT_DETACH) != 0 || ::chdir("/") != 0) ::_exit(12);
  char name[] = "/floor", mode[] = "--exit";
  char* argv[] = {name, mode, nullptr};
  char* envp[] = {nullptr};
  ::execve(name, argv, envp);
  ::_exit(13);
}

uint64_t RunOnce(int index, bool net) {
  uint64_t begin = NowNs();
  clone_args args = {};
  args.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | (net ? CLONE_NEWNET : 0);
  args.exit_signal = SIGCHLD;
  auto pid = static_cast<pid_t>(::syscall(SYS_clone3, &args, sizeof(args)));
  if (pid < 0) Die("clone3");
  if (pid == 0) RunInside(index);
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) Die("waitpid");
  uint64_t end = NowNs();
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    std::fprintf(stderr, "dsec-floor: run %d ended with status %#x\n", index, status);
    std::exit(1);
  }
  return end - begin;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--exit") == 0) ::_exit(0);
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--runs") == 0) {
      options.runs = ParseCount("--runs", argv[++i], kMaxRuns);
    } else if (std::strcmp(argv[i], "--concurrency") == 0) {
      options.concurrency = ParseCount("--concurrency", argv[++i], kMaxConcurrency);
    } else if (std::strcmp(argv[i], "--no-net") == 0) {
      options.net = false;
    } else {
      Usage("unknown option", argv[i]);
    }
  }
  options.concurrency = std::min(options.concurrency, options.runs);
  Prepare(options.runs);
  size_t bytes = static_cast<size_t>(options.runs) * sizeof(uint64_t);
  auto* times = static_cast<uint64_t*>(
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (times == MAP_FAILED) Die("mmap");

  uint64_t begin = NowNs();
  for (int worker = 0; worker < options.concurrency; ++worker) {
    pid_t pid = ::fork();
    if (pid < 0) Die("fork");
    if (pid != 0) continue;
    for (int i = worker; i < options.runs; i += options.concurrency)
      times[i] = RunOnce(i, options.net);
    ::_exit(0);
  }
  bool ok = true;
  int status = 0;
  while (::wait(&status) > 0) ok &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!ok) return 1;
  double total_ms = static_cast<double>(NowNs() - begin) / 1e6;

  std::vector<uint64_t> sorted(times, times + options.runs);
  std::sort(sorted.begin(), sorted.end());
  auto quantile = [&](double q) {
    return static_cast<double>(
               sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))]) /
           1e6;
  };
  double sum = 0;
  for (uint64_t time : sorted) sum += static_cast<double>(time) / 1e6;
  std::printf(
      "{\"benchmark\": \"floor\", \"runs\": %d, \"concurrency\": %d, \"net\": %s, \"median_ms\": "
      "%.3f, "
      "\"min_ms\": %.3f, \"p90_ms\": %.3f, \"p99_ms\": %.3f, \"mean_ms\": %.3f, \"per_second\": "
      "%.1f}\n",
      options.runs, options.concurrency, options.net ? "true" : "false", quantile(0.5), quantile(0),
      quantile(0.9), quantile(0.99), sum / static_cast<double>(options.runs),
      1000.0 * options.runs / total_ms);
  return 0;
}
