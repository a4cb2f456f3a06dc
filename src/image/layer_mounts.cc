// SPDX-License-Identifier: Apache-2.0
#include "image/layer_mounts.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/fs.h"
#include "image/layer_files.h"
#include "image/root_calls.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::minutes kTrimPeriod{1};
constexpr char kBdiFolder[] = "/sys/class/bdi";
// A create does without the store's answer after this long where it can.
constexpr milliseconds kKeptPatience{1500};
// A mount in use is looked after this often, by an Acquire that waits so long for the answer.
constexpr milliseconds kLookPeriod{1000};
constexpr milliseconds kLookPatience{100};
// For a layer that nobody has asked for yet while calls for another one hang.
constexpr milliseconds kTroubledPatience{2000};
constexpr milliseconds kEndPatience{2000};

// The backing devices of file-backed EROFS mounts. Their numbers are a counter of the kernel and
// nothing leads from a mount to its own, so the ones that a mount added are found by comparing.
Result<std::set<std::string>> ErofsBackingDevices() {
  DSEC_TRY(const auto folder, os::OpenAt(AT_FDCWD, kBdiFolder, O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto names, ListNames(folder.get(), UINT64_MAX));
  std::set<std::string> found;
  for (const std::string& name : names) {
    if (name.starts_with("erofs-")) found.insert(name);
  }
  return found;
}

// A mount that another thread or process makes at the same moment gets this readahead, too; all of
// this process want it, and others are not harmed by it.
Result<void> SetReadAhead(const std::set<std::string>& before, uint32_t kib) {
  DSEC_TRY(const auto after, ErofsBackingDevices());
  for (const std::string& name : after) {
    if (before.contains(name)) continue;
    const std::string path = fmt::format("{}/{}/read_ahead_kb", kBdiFolder, name);
    auto set = os::WriteExisting(AT_FDCWD, path.c_str(), std::to_string(kib));
    // Another one's may have ended meanwhile.
    if (!set.ok() && set.error().sys_errno() != ENOENT) return set;
  }
  return Ok();
}

Result<os::UniqueFd> MountErofs(int meta_fd, int blob_fd) {
  // By descriptor, so that what was checked is what is mounted.
  const std::string meta = fmt::format("/proc/self/fd/{}", meta_fd);
  const std::string blob = fmt::format("/proc/self/fd/{}", blob_fd);
  DSEC_TRY(auto context, os::FsContext::Open("erofs"));
  DSEC_TRY_VOID(context.SetString("source", meta.c_str()));
  DSEC_TRY_VOID(context.SetString("device", blob.c_str()));
  DSEC_TRY_VOID(context.SetFlag("ro"));
  return std::move(context).Mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
}

Result<std::shared_ptr<const os::UniqueFd>> MountWithReadAhead(int meta, int blob, uint32_t kib) {
  auto before = ErofsBackingDevices();
  auto mounted = MountErofs(meta, blob);  // opens the blob once more: may hang
  if (!mounted.ok()) {
    Error error = RootError(mounted.error());
    if (error.reason() == "layer.unreachable") return error;
    return Error(Code::kInternal, "layer.mount_failed", mounted.error().message())
        .WithErrno(mounted.error().sys_errno());
  }
  auto set = before.ok() ? SetReadAhead(*before, kib) : Result<void>(std::move(before).error());
  if (!set.ok()) log::Warn("layer.read_ahead_not_set", {{"error", set.error()}});
  return std::make_shared<const os::UniqueFd>(*std::move(mounted));
}

// The layers' folder, found by its path each time: a mount that went and came back is another one.
Result<os::UniqueFd> OpenBlobs(const std::string& root) {
  const std::string path = root + "/blobs";
  auto fd = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd.ok()) return fd;
  // A store always has it: without it the file system of the store is not mounted.
  if (fd.error().sys_errno() == ENOENT) return Unreachable(path + " is not there");
  return RootError(std::move(fd).error());
}

const MountedLayer::Blob kNoBlob;

Result<MountedLayer::Blob> BlobOf(int blobs, int file) {
  struct stat folder;
  struct stat status;
  if (::fstat(blobs, &folder) != 0 || ::fstat(file, &status) != 0)
    return RootError(os::ErrnoError("layer.io", "stat the content of a layer"));
  const std::string path = fmt::format("/proc/self/fd/{}", file);
  DSEC_TRY(auto handle, os::OpenAt(AT_FDCWD, path.c_str(), O_PATH));
  return MountedLayer::Blob{folder.st_dev, status.st_ino,
                            std::make_shared<const os::UniqueFd>(std::move(handle))};
}

// Whether mounts of that blob can still read it, and no other file system has come in its place.
Result<bool> Readable(const std::string& root, const MountedLayer::Blob& blob) {
  struct stat status;
  if (::fstat(blob.fd->get(), &status) != 0) {
    if (errno == ENOTCONN || errno == ESTALE) return false;
    return RootError(os::ErrnoError("layer.io", "stat the content of a layer"));
  }
  const auto blobs = OpenBlobs(root);
  if (!blobs.ok() || ::fstat(blobs->get(), &status) != 0) return true;
  return status.st_dev == blob.device;
}

// No answer: may come yet. An error of the client of a file system that has ended: never.
bool MayComeBack(const Error& error) {
  return error.reason() == "layer.unreachable" && error.sys_errno() != ENOTCONN &&
         error.sys_errno() != ESTALE && error.sys_errno() != 0;
}

}  // namespace

// A mount without a use.
struct LayerMounts::Kept {
  LayerInfo info;
  MountedLayer::Blob blob;
  std::shared_ptr<const os::UniqueFd> mount;
};

struct LayerMounts::Slot {
  std::mutex mutex;
  std::weak_ptr<const MountedLayer> mount;
  std::shared_ptr<Pending<Mounted>> mounting;  // the call under way
  MonoTime mounting_since;
  std::shared_ptr<Pending<bool>> looking;  // the look under way
  MonoTime looked;
};

struct LayerMounts::State {
  State(std::string root_path, LayerMountOptions with)
      : root(std::move(root_path)),
        options(std::move(with)),
        threads(options.calls_at_once),
        closers(options.calls_at_once),
        keep(options.keep_idle) {
    std::string folder = options.cache_dir;
    if (folder.empty()) {
      auto own = os::TempDir::Create("dsec-layer-copies-");
      if (own.ok()) folder = own_folder.emplace(*std::move(own)).path();
    }
    cache = LayerCache::Open(folder, options.cache_bytes);
  }

  std::shared_ptr<Slot> SlotOf(const LayerId& id) {
    const std::lock_guard lock(mutex);
    auto& entry = slots[id];
    if (entry == nullptr) entry = std::make_shared<Slot>();
    return entry;
  }

  // nullopt: there is none. With `blob` one of another file has become useless, and goes.
  std::optional<Kept> TakeKept(const LayerId& id, const MountedLayer::Blob* blob) {
    std::list<Kept> taken;
    {
      const std::lock_guard lock(mutex);
      const auto found =
          std::ranges::find_if(kept, [&](const Kept& item) { return item.info.id == id; });
      if (found == kept.end()) return std::nullopt;
      taken.splice(taken.end(), kept, found);
    }
    if (blob == nullptr || taken.front().blob == *blob) return std::move(taken.front());
    End(std::move(taken));
    return std::nullopt;
  }
  bool HasKept(const LayerId& id) {
    const std::lock_guard lock(mutex);
    return std::ranges::any_of(kept, [&](const Kept& item) { return item.info.id == id; });
  }
  void Keep(Kept used) {
    std::list<Kept> ended;
    {
      const std::lock_guard lock(mutex);
      kept.push_front(std::move(used));
      while (kept.size() > keep) ended.splice(ended.end(), kept, std::prev(kept.end()));
    }
    End(std::move(ended));
  }
  // An unmount throws the pages of the layer away, which takes its time.
  void End(std::list<Kept> ended) {
    if (ended.empty()) return;
    auto held = std::make_shared<std::list<Kept>>(std::move(ended));
    if (!closers.Start([held] { held->clear(); })) held->clear();
  }
  // Whether the copy on this node may go; then nothing is kept mounted of it.
  bool Release(const LayerId& id) {
    const auto slot = SlotOf(id);
    const std::lock_guard lock(slot->mutex);
    if (!slot->mount.expired()) return false;
    static_cast<void>(TakeKept(id, &kNoBlob));
    return true;
  }
  // close(2) on a cluster file system may hang like all else.
  void Close(os::UniqueFd fd) {
    if (!fd.valid()) return;
    auto held = std::make_shared<os::UniqueFd>(std::move(fd));
    const bool started = closers.Start([held] { held->Reset(); });
    // So many hang that this one is left open; it is closed at the end of the process.
    if (!started) static_cast<void>(held->Release());
  }
  // The lock of a slot is taken before that of this object.
  std::vector<std::shared_ptr<Slot>> AllSlots() {
    std::vector<std::shared_ptr<Slot>> all;
    const std::lock_guard lock(mutex);
    for (const auto& [id, slot] : slots) all.push_back(slot);
    return all;
  }
  bool Troubled(MonoTime now) {
    return std::ranges::any_of(AllSlots(), [&](const auto& slot) {
      const std::lock_guard lock(slot->mutex);
      return slot->mounting != nullptr && now - slot->mounting_since > options.patience;
    });
  }

  const std::string root;
  const LayerMountOptions options;
  std::optional<os::TempDir> own_folder;
  Result<std::unique_ptr<LayerCache>> cache = Unreachable("");
  RootThreads threads;
  RootThreads closers;
  mutable std::mutex mutex;
  std::map<LayerId, std::shared_ptr<Slot>> slots;
  std::list<Kept> kept;  // most recently used first
  size_t keep;
};

LayerMounts::LayerMounts(std::string root, LayerMountOptions options)
    : state_(std::make_shared<State>(std::move(root), std::move(options))),
      catalog_(state_->root, state_->options.patience,
               state_->cache.ok() && (*state_->cache)->bytes() > 0) {
  trimmer_ = std::jthread([this](const std::stop_token& stop) {
    while (true) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait_for(lock, stop, kTrimPeriod, [] { return false; });
      }
      if (stop.stop_requested()) return;
      Trim();
    }
  });
}

LayerMounts::~LayerMounts() {
  trimmer_.request_stop();
  trimmer_.join();
  {
    std::list<Kept> ended;
    const std::lock_guard lock(state_->mutex);
    state_->keep = 0;
    ended.swap(state_->kept);
  }
  const bool over = state_->threads.Wait(kEndPatience) && state_->closers.Wait(kEndPatience);
  if (!over) log::Error("layer.calls_left_behind", {{"root", state_->root}});
}

Result<void> LayerMounts::Check() const {
  if (state_->cache.ok()) return Ok();
  return Error(state_->cache.error()).Context("the copies of layers");
}

bool LayerMounts::Settle() const {
  return state_->threads.Wait(state_->options.patience) &&
         state_->closers.Wait(state_->options.patience);
}

Result<std::shared_ptr<const MountedLayer>> LayerMounts::Acquire(const LayerId& id) {
  DSEC_TRY_VOID(Check());
  const auto slot = state_->SlotOf(id);
  Mounted mounted;
  {
    const std::lock_guard lock(slot->mutex);
    mounted = slot->mount.lock();
  }
  if (mounted != nullptr) {
    const auto there = StillThere(slot, mounted);
    if (!there.ok() || *there) return mounted;
    log::Warn("layer.mount_lost", {{"layer", id}});
    const std::lock_guard lock(slot->mutex);
    if (slot->mount.lock() == mounted) slot->mount.reset();
  }

  const MonoTime now = Clock::System().Mono();
  const milliseconds patience = state_->options.patience;
  milliseconds wait = state_->HasKept(id) ? std::min(kKeptPatience, patience) : patience;
  const bool troubled = state_->Troubled(now);
  std::shared_ptr<Pending<Mounted>> pending;
  {
    const std::lock_guard lock(slot->mutex);
    if ((mounted = slot->mount.lock()) != nullptr) return mounted;
    if (slot->mounting != nullptr && now - slot->mounting_since > patience) wait = milliseconds(0);
    if (slot->mounting == nullptr) {
      if (troubled) wait = std::min(wait, kTroubledPatience);
      slot->mounting = StartMount(state_, id, slot);
      slot->mounting_since = now;
    }
    pending = slot->mounting;
    if (pending != nullptr) pending->Join();
  }
  if (pending == nullptr) return Unreachable("too many calls on it hang");
  auto result = pending->Wait(wait);
  if (result && (result->ok() || !MayComeBack(result->error())))
    return std::move(*result).Context("mount layer {}", id.str());
  // What was there before the trouble began works as far as its pages are cached.
  if (auto kept = state_->TakeKept(id, nullptr)) {
    log::Warn("layer.used_without_the_store", {{"layer", id}});
    const std::lock_guard lock(slot->mutex);
    if ((mounted = slot->mount.lock()) != nullptr) {
      state_->Keep(*std::move(kept));
      return mounted;
    }
    mounted = MakeUse(state_, *std::move(kept), os::UniqueFd());
    slot->mount = mounted;
    return mounted;
  }
  {
    const std::lock_guard lock(slot->mutex);
    if ((mounted = slot->mount.lock()) != nullptr) return mounted;
  }
  if (result) return std::move(*result).Context("mount layer {}", id.str());
  return Unreachable("no answer in time").Context("mount layer {}", id.str());
}

std::shared_ptr<Pending<LayerMounts::Mounted>> LayerMounts::StartMount(
    const std::shared_ptr<State>& state, const LayerId& id, const std::shared_ptr<Slot>& slot) {
  auto pending = std::make_shared<Pending<Mounted>>();
  const bool started = state->threads.Start([state, id, slot, pending] {
    auto result = MountNow(state, id, slot);
    {
      const std::lock_guard lock(slot->mutex);
      slot->mounting.reset();
    }
    pending->Set(std::move(result));  // nobody can join any more
  });
  return started ? pending : nullptr;
}

// On a thread that may hang.
Result<LayerMounts::Mounted> LayerMounts::MountNow(const std::shared_ptr<State>& state,
                                                   const LayerId& id,
                                                   const std::shared_ptr<Slot>& slot) {
  LayerCache& cache = **state->cache;
  DSEC_FAULT_POINT("layer.mount.before_open");
  DSEC_TRY(auto local, cache.Find(id));
  DSEC_TRY(const auto blobs, OpenBlobs(state->root));
  DSEC_TRY(LayerFiles files, OpenLayer(blobs.get(), id, !local.has_value()));
  DSEC_TRY(const auto blob, BlobOf(blobs.get(), files.blob.get()));
  {
    // Used without an answer of the store meanwhile: here is its hold there.
    const std::lock_guard lock(slot->mutex);
    auto mounted = slot->mount.lock();
    if (mounted != nullptr && mounted->blob_ == blob) {
      if (!mounted->lock_.valid()) mounted->lock_ = std::move(files.lock);
      return mounted;
    }
  }
  // Without its copy, or with a damaged one, a mount that was kept is good for nothing.
  auto kept = state->TakeKept(id, local ? &blob : &kNoBlob);
  if (!kept) {
    if (!local) {
      const auto release = [&](const LayerId& other) { return state->Release(other); };
      DSEC_TRY(local, cache.Add(id, files.manifest, files.meta.get(), release));
    }
    DSEC_TRY(auto mount, MountWithReadAhead(local->meta.get(), files.blob.get(),
                                            state->options.read_ahead_kib));
    kept = Kept{std::move(files.info), blob, std::move(mount)};
  }
  auto mounted = MakeUse(state, *std::move(kept), std::move(files.lock));
  const std::lock_guard lock(slot->mutex);
  slot->mount = mounted;
  return mounted;
}

LayerMounts::Mounted LayerMounts::MakeUse(const std::shared_ptr<State>& state, Kept kept,
                                          os::UniqueFd lock) {
  auto* layer = new MountedLayer(kept.info, kept.blob, kept.mount, std::move(lock));
  // A weak pointer of a slot keeps this function object: what it holds must leave it.
  auto give_back = [state = std::shared_ptr<State>(state),
                    kept = std::move(kept)](const MountedLayer* used) mutable {
    state->Close(std::move(used->lock_));
    delete used;
    state->Keep(std::move(kept));
    state.reset();
  };
  return Mounted(layer, std::move(give_back));
}

// Whether a mount in use still has its copy, undamaged, and the file system that the store is on;
// an error: it is not known now.
Result<bool> LayerMounts::StillThere(const std::shared_ptr<Slot>& slot, const Mounted& mounted) {
  std::shared_ptr<Pending<bool>> looking;
  {
    const std::lock_guard lock(slot->mutex);
    const MonoTime now = Clock::System().Mono();
    if (slot->looking != nullptr || now - slot->looked < kLookPeriod) return true;
    looking = std::make_shared<Pending<bool>>();
    looking->Join();
    // Not the layer: its last use must not end on a thread that hangs.
    const auto look = [state = state_, id = mounted->info().id, slot, looking,
                       blob = mounted->blob_] {
      const auto answer = [&]() -> Result<bool> {
        DSEC_TRY(const auto local, (*state->cache)->Find(id));
        if (!local) return false;
        return Readable(state->root, blob);
      }();
      {
        const std::lock_guard lock(slot->mutex);
        slot->looking.reset();
        slot->looked = Clock::System().Mono();
      }
      looking->Set(answer);
    };
    if (!state_->threads.Start(look)) return true;
    slot->looking = looking;
  }
  auto answer = looking->Wait(kLookPatience);
  if (!answer) return Unreachable("no answer in time");
  return *std::move(answer);
}

size_t LayerMounts::idle() const {
  const std::lock_guard lock(state_->mutex);
  return state_->kept.size();
}

void LayerMounts::Trim() {
  std::set<LayerId> ids;
  {
    const std::lock_guard lock(state_->mutex);
    for (const Kept& kept : state_->kept) ids.insert(kept.info.id);
  }
  if (ids.empty()) return;
  const auto gone = std::make_shared<Pending<std::set<LayerId>>>();
  gone->Join();
  const bool started = state_->threads.Start([state = state_, ids, gone] {
    gone->Set([&]() -> Result<std::set<LayerId>> {
      DSEC_TRY(const auto blobs, OpenBlobs(state->root));
      std::set<LayerId> missing;
      for (const LayerId& id : ids) {
        const auto opened = OpenLayer(blobs.get(), id, false);
        if (!opened.ok() && opened.error().reason() != "layer.unreachable") missing.insert(id);
      }
      return missing;
    }());
  });
  if (!started) return;
  const auto found = gone->Wait(state_->options.patience);
  if (!found || !found->ok()) return;
  std::list<Kept> ended;  // after the lock
  const std::lock_guard lock(state_->mutex);
  for (auto it = state_->kept.begin(); it != state_->kept.end();) {
    const auto next = std::next(it);
    if ((*found)->contains(it->info.id)) ended.splice(ended.end(), state_->kept, it);
    it = next;
  }
}

size_t LayerMounts::mounted() const {
  return static_cast<size_t>(std::ranges::count_if(state_->AllSlots(), [](const auto& slot) {
    const std::lock_guard lock(slot->mutex);
    return !slot->mount.expired();
  }));
}

}  // namespace dsec::image
