// SPDX-License-Identifier: Apache-2.0
#include "aether/watch.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "aether/directory.h"
#include "aether/files.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

constexpr uint32_t kMask = IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_DELETE |
                           IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_ONLYDIR;
constexpr size_t kMaxFoundPaths = 4096;
constexpr std::chrono::milliseconds kCoalesce(10);

int AddWatch(int inotify, int directory) {
  // inotify(7) takes paths only; this one names just the directory that has been opened.
  return ::inotify_add_watch(inotify, fmt::format("/proc/self/fd/{}", directory).c_str(), kMask);
}

}  // namespace

Result<std::shared_ptr<WatchedTree>> Watch::Open(int root, const std::string& path,
                                                 bool recursive) {
  DSEC_TRY_VOID(CheckFilePath(path, "path"));
  auto tree = std::make_shared<WatchedTree>();
  tree->path = path;
  tree->recursive = recursive;
  Result<os::UniqueFd> base = os::OpenInRoot(root, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (base.ok()) {
    tree->base = std::move(base).value();
  } else if (base.error().sys_errno() == ENOTDIR) {
    DSEC_TRY(Place place, FindPlace(root, path));
    struct stat status;
    if (::fstatat(place.directory.get(), place.name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      return FileError(errno, path);
    }
    tree->base = std::move(place.directory);
    tree->only = place.name;
    tree->recursive = false;
    tree->path = path.substr(0, path.rfind('/'));
  } else {
    return FileError(base.error().sys_errno(), path);
  }
  while (tree->path.ends_with('/')) tree->path.pop_back();
  tree->inotify.Reset(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!tree->inotify.valid()) return FileError(errno, path);
  Found found = Cover(*tree, "", kMaxDirectories);
  if (found.directories.empty()) {
    return Error(Code::kResourceExhausted, "watch.refused",
                 "the kernel has no room for another watch");
  }
  tree->directories = std::move(found.directories);
  // An entry without a watch descriptor marks what could not be covered.
  if (found.incomplete) tree->directories[-1] = "";
  return tree;
}

Watch::Found Watch::Cover(const WatchedTree& tree, const std::string& below, size_t room) {
  Found found;
  std::vector<std::string> todo = {below};
  while (!todo.empty()) {
    std::string path = std::move(todo.back());
    todo.pop_back();
    if (found.directories.size() >= room) {
      found.incomplete = true;
      break;
    }
    Result<os::UniqueFd> directory =
        os::OpenBeneath(tree.base.get(), path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY);
    if (!directory.ok()) continue;  // gone again, a link, or a mount
    int watch = AddWatch(tree.inotify.get(), directory->get());
    if (watch < 0) {
      found.incomplete = true;
      break;
    }
    found.directories[watch] = path;
    if (!tree.recursive) break;
    DirectoryReader reader(directory->get());
    while (true) {
      Result<std::optional<DirectoryReader::Entry>> entry = reader.Next();
      if (!entry.ok() || !entry->has_value()) break;
      std::string name = path + std::string((*entry)->name);
      if (IsHiddenName((*entry)->name)) continue;
      if ((*entry)->type == DT_DIR) todo.push_back(name + '/');
      if (found.paths.size() < kMaxFoundPaths) {
        found.paths.push_back(std::move(name));
      } else if (!below.empty()) {
        found.incomplete = true;
      }
    }
  }
  return found;
}

Watch::Watch(Loop& loop, WorkerPool& workers, std::shared_ptr<WatchedTree> tree)
    : loop_(loop),
      workers_(workers),
      tree_(std::move(tree)),
      watch_(loop, tree_->inotify.get(), EPOLLIN, [this](uint32_t) { OnEvents(); }) {
  if (tree_->directories.erase(-1) > 0) Report("overflow", "");
}

Watch::~Watch() {
  *self_ = nullptr;
  for (Waiter& waiter : waiters_)
    waiter.reply(Error(Code::kGone, "watch.closed", "the watch has been closed"));
}

void Watch::OnEvents() {
  alignas(inotify_event) char buffer[8192];
  ssize_t size = ::read(tree_->inotify.get(), buffer, sizeof(buffer));
  for (ssize_t position = 0; position < size;) {
    inotify_event event;
    std::memcpy(&event, buffer + position, sizeof(event));
    std::string name;
    if (event.len > 0) name = buffer + position + sizeof(event);
    position += static_cast<ssize_t>(sizeof(event) + event.len);
    if ((event.mask & IN_Q_OVERFLOW) != 0) {
      Report("overflow", "");
      continue;
    }
    auto directory = tree_->directories.find(event.wd);
    if (directory == tree_->directories.end()) continue;
    std::string below = directory->second + name;
    if ((event.mask & IN_IGNORED) != 0) {
      tree_->directories.erase(directory);
      continue;
    }
    if ((event.mask & IN_DELETE_SELF) != 0) {
      if (below.empty()) Report("removed", below);  // others are told by their parent
      continue;
    }
    if (IsHiddenName(name) || (!tree_->only.empty() && name != tree_->only)) continue;
    if ((event.mask & IN_CREATE) != 0) Report("created", below);
    if ((event.mask & IN_MOVED_TO) != 0) Report("moved", below);
    if ((event.mask & (IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE)) != 0) Report("modified", below);
    if ((event.mask & (IN_DELETE | IN_MOVED_FROM)) != 0) Report("removed", below);
    bool new_directory =
        (event.mask & IN_ISDIR) != 0 && (event.mask & (IN_CREATE | IN_MOVED_TO)) != 0;
    if (new_directory && tree_->recursive) AddDirectory(below + '/');
  }
}

// What was made in a new directory before its watch stood is found by looking.
void Watch::AddDirectory(const std::string& below) {
  size_t room = kMaxDirectories - std::min(kMaxDirectories, tree_->directories.size());
  Result<void> asked =
      workers_.Run<Found>([tree = tree_, below, room] { return Cover(*tree, below, room); },
                          [self = self_](const Found& found) {
                            Watch* watch = *self;
                            if (watch == nullptr) return;
                            for (auto& [descriptor, path] : found.directories)
                              watch->tree_->directories[descriptor] = path;
                            for (const std::string& path : found.paths)
                              watch->Report("created", path);
                            if (found.incomplete) watch->Report("overflow", "");
                          });
  if (!asked.ok()) Report("overflow", "");
}

void Watch::Report(const char* type, const std::string& below) {
  std::string path = tree_->path + "/" + below;
  if (path.size() > 1 && path.ends_with('/')) path.pop_back();
  bool repeated = !events_.empty() && events_.back().path() == path &&
                  events_.back().type() == type && std::strcmp(type, "modified") == 0;
  // Someone may have seen the last one already; then this is news again.
  if (repeated && flush_.armed()) return;
  v1::WatchEvent& event = events_.emplace_back();
  event.set_seq(++last_seq_);
  event.set_type(type);
  event.set_path(std::move(path));
  if (events_.size() > kMaxEvents) events_.pop_front();
  if (!flush_.armed()) flush_ = Timer(loop_, loop_.now() + kCoalesce, [this] { Answer(); });
}

v1::WatchReply Watch::Reply(uint64_t after_seq) const {
  v1::WatchReply reply;
  uint64_t first = events_.empty() ? last_seq_ + 1 : events_.front().seq();
  if (after_seq + 1 < first) {
    v1::WatchEvent& lost = *reply.add_events();
    lost.set_seq(first - 1);
    lost.set_type("overflow");
    lost.set_path(tree_->path.empty() ? "/" : tree_->path);
    after_seq = first - 1;
  }
  uint64_t next = after_seq;
  for (size_t i = static_cast<size_t>(after_seq + 1 - first);
       i < events_.size() && reply.events_size() < static_cast<int>(kEventsPerReply); ++i) {
    *reply.add_events() = events_[i];
    next = events_[i].seq();
  }
  reply.set_next_seq(next);
  return reply;
}

void Watch::Wait(uint64_t caller, uint64_t after_seq, std::chrono::milliseconds wait,
                 ReplyFn reply) {
  after_seq = std::min(after_seq, last_seq_);
  if (wait.count() == 0 || (last_seq_ > after_seq && !flush_.armed())) {
    reply(Reply(after_seq));
    return;
  }
  auto position =
      waiters_.insert(waiters_.end(), Waiter{caller, after_seq, std::move(reply), Timer()});
  position->limit = Timer(loop_, loop_.now() + wait, [this, position] {
    Waiter due = std::move(*position);
    waiters_.erase(position);
    due.reply(Reply(due.after_seq));
  });
}

void Watch::DropCaller(uint64_t caller) {
  waiters_.remove_if([caller](const Waiter& waiter) { return waiter.caller == caller; });
}

void Watch::Answer() {
  std::list<Waiter> due;
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    auto next = std::next(waiter);
    if (last_seq_ > waiter->after_seq) due.splice(due.end(), waiters_, waiter);
    waiter = next;
  }
  for (Waiter& waiter : due) {
    waiter.limit.Reset();
    waiter.reply(Reply(waiter.after_seq));
  }
}

}  // namespace dsec::aether
