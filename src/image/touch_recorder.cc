// SPDX-License-Identifier: Apache-2.0
#include "image/touch_recorder.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "base/log.h"
#include "image/fs.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

constexpr std::string_view kPrefix = "dsec-";
constexpr std::array kEvents = {"events/erofs/erofs_read_folio", "events/erofs/erofs_readahead"};
constexpr char kBufferKib[] = "512";
// A part grows no further, so that what follows keeps its place in the order.
constexpr uint64_t kPartPages = 256;
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kMaxStats = 4096;

// The instances of this process.
std::mutex names_mutex;
std::set<std::string>& Names() {
  static std::set<std::string> names;
  return names;
}

Error Unavailable(const Error& error) {
  return Error(Code::kFailedPrecondition, "trace.unavailable",
               fmt::format("first reads cannot be recorded here: {}", error.message()))
      .WithErrno(error.sys_errno());
}

// Without a place in the host's tree, which need not have it mounted.
Result<os::UniqueFd> OpenTracefs() {
  DSEC_TRY(auto context, os::FsContext::Open("tracefs"));
  return std::move(context).Mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
}

Result<void> Write(int dir, const std::string& file, std::string_view text) {
  return os::WriteExisting(dir, file.c_str(), text).Context("write {} of tracefs", file);
}

// The kernel's dev_t (include/linux/kdev_t.h).
uint64_t KernelNumber(uint64_t major, uint64_t minor) { return major << 20 | minor; }

// Takes `before` and the number behind it off the front.
std::optional<uint64_t> NumberAfter(std::string_view& text, std::string_view before) {
  if (!text.starts_with(before)) return std::nullopt;
  text.remove_prefix(before.size());
  uint64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

struct Event {
  uint64_t device = 0, nid = 0, page = 0, pages = 1;
};

// The text of trace_pipe (include/trace/events/erofs.h). The command's name at the front of a line
// is the sandbox's to choose, so a line is read from its last " erofs_": 15 bytes hold no event.
std::optional<Event> ParseEvent(std::string_view line) {
  const size_t at = line.rfind(" erofs_");
  if (at == std::string_view::npos) return std::nullopt;
  line.remove_prefix(at);
  const bool ahead = line.starts_with(" erofs_readahead: ");
  const auto major =
      NumberAfter(line, ahead ? " erofs_readahead: dev = (" : " erofs_read_folio: dev = (");
  const auto minor = NumberAfter(line, ",");
  const auto nid = NumberAfter(line, "), nid = ");
  const auto page = NumberAfter(line, ahead ? ", start = " : ", FILE, index = ");
  const auto pages = ahead ? NumberAfter(line, " nrpage = ") : std::optional<uint64_t>(1);
  if (!major || !minor || !nid || !page || !pages) return std::nullopt;
  return Event{KernelNumber(*major, *minor), *nid, *page, *pages};
}

std::optional<uint64_t> CounterOf(std::string_view stats, std::string_view name) {
  const size_t at = stats.find(name);
  if (at == std::string_view::npos) return std::nullopt;
  stats.remove_prefix(at);
  return NumberAfter(stats, name);
}

}  // namespace

Result<void> TouchRecorder::Check() {
  auto tracefs = OpenTracefs();
  if (!tracefs.ok()) return Unavailable(tracefs.error());
  for (const char* event : kEvents) {
    struct stat status;
    if (::fstatat(tracefs->get(), event, &status, 0) != 0)
      return Unavailable(os::ErrnoError("trace.unavailable", fmt::format("find {}", event)));
  }
  return Ok();
}

Result<std::unique_ptr<TouchRecorder>> TouchRecorder::Begin(const SandboxId& sandbox,
                                                            const std::vector<dev_t>& devices) {
  DSEC_TRY_VOID(Check());
  std::unique_ptr<TouchRecorder> recorder(new TouchRecorder());
  {
    const std::lock_guard lock(names_mutex);
    if (Names().size() >= kAtOnce) {
      return Error(Code::kResourceExhausted, "trace.too_many",
                   fmt::format("{} sandboxes are being recorded already", kAtOnce));
    }
    recorder->name_ = std::string(kPrefix) + sandbox.str();
    Names().insert(recorder->name_);
  }
  for (const dev_t device : devices) {
    recorder->order_.push_back(KernelNumber(major(device), minor(device)));
    recorder->devices_[recorder->order_.back()];
  }
  DSEC_TRY(recorder->tracefs_, OpenTracefs());
  auto enabled = recorder->Enable();
  if (!enabled.ok()) return Unavailable(enabled.error());
  return recorder;
}

Result<void> TouchRecorder::Enable() {
  const std::string path = "instances/" + name_;
  DSEC_TRY_VOID(os::MakeDir(tracefs_.get(), path.c_str(), 0700));
  DSEC_TRY(instance_, os::OpenAt(tracefs_.get(), path.c_str(), O_RDONLY | O_DIRECTORY));
  const int dir = instance_.get();
  DSEC_TRY_VOID(Write(dir, "buffer_size_kb", kBufferKib));
  // What comes first is kept.
  DSEC_TRY_VOID(Write(dir, "options/overwrite", "0"));
  DSEC_TRY_VOID(Write(dir, "buffer_percent", "25"));  // wakes the reader
  std::string filter;
  for (const auto& [device, unused] : devices_)
    filter += fmt::format("{}dev == {}", filter.empty() ? "" : " || ", device);
  for (const char* event : kEvents) {
    DSEC_TRY_VOID(Write(dir, fmt::format("{}/filter", event), filter));
    DSEC_TRY_VOID(Write(dir, fmt::format("{}/enable", event), "1"));
  }
  DSEC_TRY(pipe_, os::OpenAt(dir, "trace_pipe", O_RDONLY | O_NONBLOCK));
  stop_.Reset(::eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return os::ErrnoError("trace.unavailable", "eventfd");
  follower_ = std::thread([this] { Follow(); });
  return Ok();
}

TouchRecorder::~TouchRecorder() {
  if (follower_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(::write(stop_.get(), &one, sizeof one));
    follower_.join();
  }
  static_cast<void>(Stop());
  pipe_.Reset();
  const bool made = instance_.valid();
  instance_.Reset();
  // Busy while somebody looks at it; the next Sweep removes it then.
  const std::string path = "instances/" + name_;
  if (made && ::unlinkat(tracefs_.get(), path.c_str(), AT_REMOVEDIR) != 0)
    log::Warn("trace.instance_stays", {{"name", name_}, {"errno", errno}});
  const std::lock_guard lock(names_mutex);
  Names().erase(name_);
}

Result<void> TouchRecorder::Stop() {
  const std::lock_guard lock(mutex_);
  if (stopped_ || !instance_.valid()) return Ok();
  for (const char* event : kEvents)
    DSEC_TRY_VOID(Write(instance_.get(), fmt::format("{}/enable", event), "0"));
  stopped_ = true;
  return Ok();
}

bool TouchRecorder::stopped() {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void TouchRecorder::Follow() {
  pthread_setname_np(pthread_self(), "layer_trace");
  while (true) {
    std::array<pollfd, 2> fds = {pollfd{stop_.get(), POLLIN, 0}, pollfd{pipe_.get(), POLLIN, 0}};
    if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    const std::lock_guard lock(mutex_);
    if (auto drained = Drain(); !drained.ok()) {
      log::Warn("trace.reading_ended", {{"error", drained.error()}});
      return;
    }
  }
}

Result<void> TouchRecorder::Drain() {
  std::vector<char> buffer(kReadBytes);
  while (true) {
    const ssize_t got = ::read(pipe_.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Ok();
    if (got < 0) return os::ErrnoError("trace.unavailable", "read trace_pipe");
    if (got == 0) return Ok();
    rest_.append(buffer.data(), static_cast<size_t>(got));
    size_t begin = 0;
    for (size_t end; (end = rest_.find('\n', begin)) != std::string::npos; begin = end + 1)
      Take(std::string_view(rest_).substr(begin, end - begin));
    rest_.erase(0, begin);
  }
}

void TouchRecorder::Take(std::string_view line) {
  const auto event = ParseEvent(line);
  if (!event) return;
  const auto found = devices_.find(event->device);
  if (found != devices_.end()) Add(found->second, event->nid, event->page, event->pages);
}

void TouchRecorder::Add(Device& device, uint64_t nid, uint64_t page, uint64_t pages) {
  constexpr uint64_t kMaxPage = 1ull << 34;  // of any file of a layer, and sums stay small
  if (truncated_ || page > kMaxPage || pages > kMaxPage) return;
  File& file = device.files[nid];
  for (const auto& [begin, end] : file.seen.Add(page, page + pages)) {
    if (file.last < device.touches.size()) {
      Touch& last = device.touches[file.last];
      if (last.page + last.pages == begin && last.pages + (end - begin) <= kPartPages) {
        last.pages += end - begin;
        continue;
      }
    }
    if (parts_ == kMaxTraceParts) {
      truncated_ = true;
      return;
    }
    ++parts_;
    file.last = device.touches.size();
    device.touches.push_back({nid, begin, end - begin});
  }
}

Result<uint64_t> TouchRecorder::Lost() const {
  DSEC_TRY(const auto cpus, os::OpenAt(instance_.get(), "per_cpu", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto names, ListNames(cpus.get(), UINT64_MAX));
  uint64_t lost = 0;
  for (const std::string& name : names) {
    DSEC_TRY(const std::string stats,
             os::ReadFile(cpus.get(), (name + "/stats").c_str(), kMaxStats));
    const auto dropped = CounterOf(stats, "dropped events: ");
    const auto overrun = CounterOf(stats, "\noverrun: ");
    if (!dropped || !overrun)
      return Error(Code::kInternal, "trace.unavailable", "per_cpu/*/stats of tracefs is unknown");
    lost += *dropped + *overrun;
  }
  return lost;
}

Result<TouchRecorder::Touches> TouchRecorder::Read() {
  const std::lock_guard lock(mutex_);
  DSEC_TRY_VOID(Drain());
  Touches touches;
  DSEC_TRY(touches.lost, Lost());
  touches.truncated = truncated_;
  for (const uint64_t device : order_) touches.devices.push_back(devices_[device].touches);
  return touches;
}

Result<std::vector<std::string>> TouchRecorder::Sweep(const NodeId& node) {
  std::vector<std::string> removed;
  if (!Check().ok()) return removed;  // then there never was one
  DSEC_TRY(const auto tracefs, OpenTracefs());
  DSEC_TRY(const auto instances, os::OpenAt(tracefs.get(), "instances", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto names, ListNames(instances.get(), UINT64_MAX));
  for (const std::string& name : names) {
    if (!name.starts_with(kPrefix)) continue;
    const auto sandbox = ParseSandboxId(name.substr(kPrefix.size()));
    const auto owner = sandbox.ok() ? NodeOf(*sandbox) : Result<NodeId>(sandbox.error());
    if (!owner.ok() || *owner != node) continue;
    {
      const std::lock_guard lock(names_mutex);
      if (Names().contains(name)) continue;
    }
    if (::unlinkat(instances.get(), name.c_str(), AT_REMOVEDIR) != 0) {
      // Somebody looks at it; the next time.
      log::Warn("trace.instance_stays", {{"name", name}, {"errno", errno}});
      continue;
    }
    removed.push_back(fmt::format("trace of first reads {}: removed", name));
  }
  return removed;
}

Result<LayerTrace> NameTouches(int mount, const std::vector<TouchRecorder::Touch>& touches) {
  std::unordered_map<uint64_t, std::string> names;  // empty: not found yet
  for (const auto& touch : touches) names[touch.nid];
  size_t missing = names.size();
  std::vector<std::string> folders = {"."};
  while (!folders.empty() && missing > 0) {
    const std::string path = std::move(folders.back());
    folders.pop_back();
    DSEC_TRY(auto fd, os::OpenAt(mount, path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::fdopendir(fd.get()), &::closedir);
    if (folder == nullptr) return os::ErrnoError("layer.io", "open a folder of a layer");
    fd.Release();
    const std::string front = path == "." ? "" : path + "/";
    const size_t below = folders.size();
    errno = 0;
    // Names come in byte order; their numbers are those of the inodes.
    while (const dirent* entry = ::readdir(folder.get())) {
      const std::string_view name = entry->d_name;
      if (entry->d_type == DT_DIR && name != "." && name != "..") {
        folders.push_back(front + std::string(name));
      } else if (entry->d_type == DT_REG) {
        const auto found = names.find(entry->d_ino);
        if (found == names.end() || !found->second.empty()) continue;
        found->second = front + std::string(name);
        --missing;
      }
      errno = 0;
    }
    if (errno != 0) return os::ErrnoError("layer.io", "list a folder of a layer");
    std::reverse(folders.begin() + static_cast<ptrdiff_t>(below), folders.end());
  }
  LayerTrace trace;
  for (const auto& touch : touches) {
    const std::string& name = names[touch.nid];
    if (!name.empty())
      trace.parts.push_back({name, touch.page * kTracePage, touch.pages * kTracePage});
  }
  return trace;
}

}  // namespace dsec::image
