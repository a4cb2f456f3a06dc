// SPDX-License-Identifier: Apache-2.0
#include "blobfs/keeper.h"

#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/clock.h"
#include "base/log.h"

namespace dsec::blobfs {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{5000};
constexpr milliseconds kLivedWell{5000};

}  // namespace

int KeepWorker(char** argv) {
  char role[] = "worker";
  char* worker[] = {argv[0], role, argv[2], argv[3], nullptr};
  milliseconds pause = kFirstPause;
  while (true) {
    const MonoTime begun = Clock::System().Mono();
    pid_t pid = 0;
    const int error = ::posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, worker, environ);
    int status = 0;
    if (error == 0) {
      while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
      }
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    }
    log::Error("blobfs.worker_ended", {{"status", status}, {"spawn_error", error}});
    if (Clock::System().Mono() - begun > kLivedWell) pause = kFirstPause;
    const timespec wait{pause.count() / 1000, pause.count() % 1000 * 1'000'000};
    ::nanosleep(&wait, nullptr);
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace dsec::blobfs
