// SPDX-License-Identifier: Apache-2.0
#include "cli/build_progress.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>

#include "cli/output.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

constexpr size_t kMaxFirstTouch = 64 << 20;

std::atomic<bool> interrupted = false;

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool Interrupted() { return interrupted; }

ProgressLine::ProgressLine(bool wanted) : shown_(wanted && ::isatty(STDERR_FILENO) == 1) {}

void ProgressLine::Show(const image::Progress& progress) {
  if (!shown_) return;
  const char* phase = progress.phase == image::Progress::Phase::kFetch   ? "downloading"
                      : progress.phase == image::Progress::Phase::kRead  ? "reading"
                      : progress.phase == image::Progress::Phase::kWrite ? "writing the image"
                                                                         : "publishing";
  std::string text =
      fmt::format("{}: {} entries, {}", phase, progress.entries, ShowSize(progress.bytes));
  if (progress.total_bytes > 0 && progress.bytes <= progress.total_bytes) {
    text += fmt::format(" of {} ({}%)", ShowSize(progress.total_bytes),
                        progress.bytes * 100 / progress.total_bytes);
  }
  std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
  std::fflush(stderr);
  dirty_ = true;
}

void ProgressLine::Clear() {
  if (!dirty_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  dirty_ = false;
}

Result<std::vector<image::FirstTouch>> ReadFirstTouch(const std::string& path) {
  if (path.empty()) return std::vector<image::FirstTouch>();
  DSEC_TRY(const std::string text, os::ReadFile(AT_FDCWD, path.c_str(), kMaxFirstTouch));
  return image::ParseFirstTouch(text);
}

}  // namespace dsec::cli
