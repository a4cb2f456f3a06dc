// SPDX-License-Identifier: Apache-2.0
#include "image/layer_mounts.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/digest.h"
#include "image/erofs_mount.h"
#include "image/erofs_writer.h"
#include "image/layer_files.h"
#include "image/layer_mounts_state.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::minutes kTrimPeriod{1};
// A create does without the store's answer after this long where it can.
constexpr milliseconds kKeptPatience{1500};
// A mount in use is looked after this often, by an Acquire that waits so long for the answer.
constexpr milliseconds kLookPeriod{1000};
constexpr milliseconds kLookPatience{100};
// For a layer that nobody has asked for yet while calls for another one hang.
constexpr milliseconds kTroubledPatience{2000};
constexpr milliseconds kEndPatience{2000};

Result<MountedLayer::Blob> BlobOf(int blobs, int manifest, int file) {
  struct stat folder;
  struct stat published;
  struct stat status;
  if (::fstat(blobs, &folder) != 0 || ::fstat(manifest, &published) != 0 ||
      ::fstat(file, &status) != 0)
    return RootError(os::ErrnoError("layer.io", "stat the content of a layer"));
  const std::string path = fmt::format("/proc/self/fd/{}", file);
  DSEC_TRY(auto handle, os::OpenAt(AT_FDCWD, path.c_str(), O_PATH));
  return MountedLayer::Blob{folder.st_dev, status.st_ino, published.st_ino,
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

Result<os::UniqueFd> OpenBlobs(const std::string& root) {
  const std::string path = root + "/blobs";
  auto fd = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd.ok()) return fd;
  // A store always has it: without it the file system of the store is not mounted.
  if (fd.error().sys_errno() == ENOENT) return Unreachable(path + " is not there");
  return RootError(std::move(fd).error());
}

Result<void> CheckMeta(const LayerId& id, const LayerFiles& files) {
  auto digest = Sha256File(files.meta.get(), nullptr);
  if (!digest.ok()) return RootError(std::move(digest).error());
  if (*digest != files.manifest.meta.sha256)
    return WrongDigest(id, kMetaName, *digest, files.manifest.meta.sha256);
  DSEC_TRY_VOID(CheckSuperblock(files.meta.get()));
  return files.form ? CheckSharedMeta(id, files) : Ok();
}

LayerMounts::LayerMounts(std::string root, LayerMountOptions options)
    : state_(std::make_shared<State>(std::move(root), std::move(options))),
      catalog_(state_->root, state_->options.patience,
               state_->cache.ok() && (*state_->cache)->bytes() > 0) {
  if (state_->remote()) {
    catalog_.set_elsewhere(
        [server = state_->options.server](const LayerId& id) -> Result<LayerInfo> {
          DSEC_TRY(const auto served, server->Open(id, false));
          if (Sha256Hex(served.manifest) != HexOf(id))
            return WrongDigest(id, kManifestName, Sha256Hex(served.manifest), HexOf(id));
          DSEC_TRY(const auto manifest, Manifest::Parse(served.manifest));
          return InfoOf(id, manifest);
        });
  }
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
  state_->prefetcher.Close();
  bool over = state_->prefetcher.Wait(kEndPatience);
  {
    std::list<Kept> ended;
    {
      const std::lock_guard lock(state_->mutex);
      state_->keep = 0;
      ended.swap(state_->kept);
    }
    state_->End(std::move(ended));
  }
  over = state_->threads.Wait(kEndPatience) && state_->closers.Wait(kEndPatience) && over;
  if (!over) log::Error("layer.calls_left_behind", {{"root", state_->root}});
}

Result<void> LayerMounts::Check() const {
  if (state_->cache.ok() || (!state_->copies && !state_->remote())) return Ok();
  return Error(state_->cache.error()).Context("the copies of layers");
}

bool LayerMounts::Settle() const {
  const milliseconds patience = state_->options.patience;
  return state_->threads.Wait(patience) && state_->prefetcher.Wait(patience) &&
         state_->releases.Run<void>([]() -> Result<void> { return Ok(); }, patience).ok() &&
         state_->closers.Wait(patience);
}

Result<std::shared_ptr<const MountedLayer>> LayerMounts::Acquire(const LayerId& id) {
  DSEC_TRY(auto mounted, AcquireAll({id}));
  return std::move(mounted.front());
}

std::shared_ptr<const void> LayerMounts::AcquireLater(const LayerId& id) {
  auto owed = std::make_shared<Owed>(id);
  const std::lock_guard lock(state_->mutex);
  state_->owed.push_back(owed);
  return owed;
}

Result<std::vector<std::shared_ptr<const MountedLayer>>> LayerMounts::Acquire(
    const std::vector<LayerId>& ids) {
  // Nothing new on a node that others take for gone; what runs goes on.
  if (state_->lease && state_->lease->lost()) {
    return Error(
        Code::kUnavailable, "layer.lease_lost",
        fmt::format("node {} was declared gone and has layers in use still", state_->options.node));
  }
  return AcquireAll(ids);
}

Result<std::vector<std::shared_ptr<const MountedLayer>>> LayerMounts::AcquireAll(
    const std::vector<LayerId>& ids) {
  DSEC_TRY_VOID(Check());
  const MonoTime begun = Clock::System().Mono();
  std::vector<Wanted> all;
  bool missing = false;
  for (const LayerId& id : ids) {
    Wanted& wanted = all.emplace_back(id, state_->SlotOf(id));
    // Known to be damaged: the long way finds out whether it still is.
    if (!state_->Damaged(id)) wanted.mounted = InUse(wanted);
    missing = missing || wanted.mounted == nullptr;
  }
  if (missing) {
    Reuses reuses;
    const bool troubled = state_->Troubled(begun);
    for (Wanted& wanted : all) {
      if (wanted.mounted == nullptr) Begin(wanted, troubled, reuses);
    }
    if (!reuses.empty()) StartReuse(state_, std::move(reuses));
  }
  std::vector<Mounted> mounted;
  std::optional<Error> failed;
  for (const Wanted& wanted : all) {  // to the end: each has been joined
    auto one = Finish(wanted, begun).Context("mount layer {}", wanted.id.str());
    if (state_->lease && !one.ok()) state_->lease->Missed(wanted.id);
    if (state_->lease && one.ok()) state_->lease->Got(wanted.id);
    if (one.ok()) {
      mounted.push_back(*std::move(one));
    } else if (!failed) {
      failed = std::move(one).error();
    }
  }
  if (failed) return *std::move(failed);
  return mounted;
}

// The mount that is in use and has not lost what it stands on.
LayerMounts::Mounted LayerMounts::InUse(const Wanted& wanted) {
  Mounted mounted;
  {
    const std::lock_guard lock(wanted.slot->mutex);
    mounted = wanted.slot->mount.lock();
  }
  if (mounted == nullptr) return nullptr;
  const auto there = StillThere(wanted.slot, mounted);
  if (!there.ok()) return mounted;
  if (*there) {
    LookForHold(wanted);
    return mounted;
  }
  log::Warn("layer.mount_lost", {{"layer", wanted.id}});
  const std::lock_guard lock(wanted.slot->mutex);
  if (wanted.slot->mount.lock() == mounted) wanted.slot->mount.reset();
  return nullptr;
}

// A mount that was taken into use without the store gets its hold there, sooner or later.
void LayerMounts::LookForHold(const Wanted& wanted) {
  Slot& slot = *wanted.slot;
  const MonoTime now = Clock::System().Mono();
  const std::lock_guard lock(slot.mutex);
  const auto mounted = slot.mount.lock();
  if (state_->remote() || mounted == nullptr || mounted->hold_ != nullptr ||
      slot.mounting != nullptr || now - slot.hold_wanted < kLookPeriod)
    return;
  slot.hold_wanted = now;
  Wanted call{wanted.id, wanted.slot, std::make_shared<Pending<Mounted>>()};
  if (!StartMount(state_, call)) return;
  slot.mounting = call.pending;
  slot.mounting_since = now;
}

// Joins the call under way for the layer or begins one; what only takes a kept mount into use
// goes to `reuses`.
void LayerMounts::Begin(Wanted& wanted, bool troubled, Reuses& reuses) {
  const MonoTime now = Clock::System().Mono();
  const milliseconds patience = state_->options.patience;
  const bool kept = state_->HasKept(wanted.id) && !state_->Damaged(wanted.id);
  wanted.wait = kept ? std::min(kKeptPatience, patience) : patience;
  Slot& slot = *wanted.slot;
  const std::lock_guard lock(slot.mutex);
  const bool damaged = state_->Damaged(wanted.id);
  if (!damaged && (wanted.mounted = slot.mount.lock()) != nullptr) return;
  if (slot.mounting != nullptr) {
    if (now - slot.mounting_since > patience) wanted.wait = milliseconds(0);
    wanted.pending = slot.mounting;
    wanted.pending->Join();
    return;
  }
  if (troubled) wanted.wait = std::min(wanted.wait, kTroubledPatience);
  wanted.pending = slot.mounting = std::make_shared<Pending<Mounted>>();
  slot.mounting_since = now;
  wanted.pending->Join();
  if (kept) {
    reuses.push_back(wanted);
  } else if (!StartMount(state_, wanted)) {
    slot.mounting.reset();
    wanted.pending->Set(Unreachable("too many calls on it hang").WithErrno(EAGAIN));
  }
}

Result<LayerMounts::Mounted> LayerMounts::Finish(const Wanted& wanted, MonoTime begun) {
  if (wanted.mounted != nullptr) return wanted.mounted;
  const auto spent = std::chrono::ceil<milliseconds>(Clock::System().Mono() - begun);
  auto result = wanted.pending->Wait(std::max(wanted.wait - spent, milliseconds(0)));
  if (result && (result->ok() || !MayComeBack(result->error()))) return *std::move(result);
  // What was there before the trouble began works as far as its pages are cached.
  Mounted mounted;
  if (auto kept = state_->TakeKept(wanted.id, nullptr)) {
    log::Warn("layer.used_without_the_store", {{"layer", wanted.id}});
    const std::lock_guard lock(wanted.slot->mutex);
    if ((mounted = wanted.slot->mount.lock()) != nullptr) {
      state_->Keep(*std::move(kept));
      return mounted;
    }
    mounted = MakeUse(state_, *std::move(kept), nullptr);
    wanted.slot->mount = mounted;
    return mounted;
  }
  {
    const std::lock_guard lock(wanted.slot->mutex);
    if ((mounted = wanted.slot->mount.lock()) != nullptr) return mounted;
  }
  if (result) return *std::move(result);
  return Unreachable("no answer in time");
}

// One thread for all: they differ in nothing that could hang one and not the next.
void LayerMounts::StartReuse(const std::shared_ptr<State>& state, Reuses reuses) {
  const auto all = std::make_shared<const Reuses>(std::move(reuses));
  const bool started = state->threads.Start([state, all] {
    for (const Wanted& wanted : *all) {
      auto mounted = UseAgain(state, wanted);
      if (!mounted.ok() || *mounted != nullptr) {
        Conclude(wanted, std::move(mounted));
      } else if (!StartMount(state, wanted)) {
        MountAndConclude(state, wanted);
      }
    }
  });
  if (started) return;
  for (const Wanted& wanted : *all)
    Conclude(wanted, Unreachable("too many calls on it hang").WithErrno(EAGAIN));
}

// False: so many calls are under way that it was not begun.
bool LayerMounts::StartMount(const std::shared_ptr<State>& state, const Wanted& wanted) {
  return state->threads.Start([state, wanted] { MountAndConclude(state, wanted); });
}

void LayerMounts::MountAndConclude(const std::shared_ptr<State>& state, const Wanted& wanted) {
  bool made = false;
  std::weak_ptr<const os::UniqueFd> layer;
  {
    const Prefetcher::Foreground foreground(state->prefetcher);
    auto mounted = MountNow(state, wanted, made);
    // Not the layer: its last use must not end on a thread that hangs.
    if (mounted.ok() && made)
      layer = std::shared_ptr<const os::UniqueFd>(*mounted, (*mounted)->mount_.get());
    Conclude(wanted, std::move(mounted));
  }
  if (made) ReadAhead(state, wanted.id, std::move(layer));
}

void LayerMounts::Conclude(const Wanted& wanted, Result<Mounted> result) {
  {
    const std::lock_guard lock(wanted.slot->mutex);
    wanted.slot->mounting.reset();
  }
  wanted.pending->Set(std::move(result));  // nobody can join any more
}

// On a thread that may hang: a kept mount of which nothing has changed, or nullptr.
Result<LayerMounts::Mounted> LayerMounts::UseAgain(const std::shared_ptr<State>& state,
                                                   const Wanted& wanted) {
  DSEC_FAULT_POINT("layer.mount.before_open");
  auto hold = state->KeptHold(wanted.id);
  if (hold == nullptr) return Mounted();
  if (state->copies && !(*state->cache)->Unchanged(wanted.id)) return Mounted();
  if (!hold->Again(state->FolderOf(wanted.id))) return Mounted();
  auto kept = state->TakeKept(wanted.id, nullptr);
  if (!kept || kept->hold != hold) {
    // Used without an answer of the store meanwhile, or gone: the long way finds that out.
    if (kept) state->Keep(*std::move(kept));
    hold->End();
    hold->GiveBack();
    return Mounted();
  }
  auto mounted = MakeUse(state, *std::move(kept), std::move(hold));
  const std::lock_guard lock(wanted.slot->mutex);
  wanted.slot->mount = mounted;
  return mounted;
}

// On a thread that may hang.
Result<LayerMounts::Mounted> LayerMounts::MountNow(const std::shared_ptr<State>& state,
                                                   const Wanted& wanted, bool& made) {
  DSEC_FAULT_POINT("layer.mount.before_open");
  std::optional<LocalLayer> local;
  if (state->copies) {
    DSEC_TRY(local, (*state->cache)->Find(wanted.id));
  }
  if (state->remote()) return MountRemote(state, wanted, std::move(local));
  DSEC_TRY(const auto blobs, OpenBlobs(state->root));
  NodeLease::Pin pin;
  if (state->lease) {
    DSEC_TRY(pin, state->lease->Hold(wanted.id));
  }
  DSEC_FAULT_POINT("layer.mount.after_lease");
  DSEC_TRY(LayerFiles files, OpenLayer(blobs.get(), wanted.id, !local.has_value()));
  DSEC_TRY(auto blob, BlobOf(blobs.get(), files.lock.get(), files.content.front().get()));
  BlobServer::Served served;
  if (state->options.server != nullptr) {
    DSEC_TRY(served, state->options.server->Open(wanted.id, false));
    blob.session = served.session;
  }
  DSEC_TRY(auto hold,
           LayerHold::Make(std::move(files.lock), files.content.front().get(), files.first_name));
  {
    // Used without an answer of the store meanwhile: here is its hold there.
    const std::lock_guard lock(wanted.slot->mutex);
    auto mounted = wanted.slot->mount.lock();
    if (mounted != nullptr && mounted->blob_ == blob) {
      if (mounted->hold_ == nullptr) mounted->hold_ = std::move(hold);
      return mounted;
    }
  }
  // Without its copy, or with a damaged one, a mount that was kept is good for nothing.
  auto kept = state->TakeKept(wanted.id, local || !state->copies ? &blob : &kNoBlob);
  if (!kept) {
    if (!state->copies) {
      DSEC_TRY_VOID(CheckMeta(wanted.id, files));
    } else if (!local) {
      const auto release = [&](const LayerId& other) { return state->Release(other); };
      DSEC_TRY(local, (*state->cache)->Add(wanted.id, files.manifest, files.meta.get(), release));
    }
    DSEC_TRY(auto parts, PartsOf(*state, wanted.id, files, local, served));
    DSEC_TRY(auto mount, MountLayer(parts.meta, parts.content, state->options.read_ahead_kib));
    kept = Kept{std::move(pin), std::move(files.info), blob, std::move(mount), nullptr, {}};
    made = true;
  }
  auto mounted = MakeUse(state, *std::move(kept), std::move(hold));
  const std::lock_guard lock(wanted.slot->mutex);
  wanted.slot->mount = mounted;
  return mounted;
}

LayerMounts::Mounted LayerMounts::MakeUse(const std::shared_ptr<State>& state, Kept kept,
                                          std::shared_ptr<LayerHold> hold) {
  if (hold != nullptr) kept.hold = hold;
  auto* layer = new MountedLayer(kept.info, kept.blob, kept.mount, std::move(hold));
  // A weak pointer of a slot keeps this function object: what it holds must leave it.
  auto give_back = [state = std::shared_ptr<State>(state),
                    kept = std::move(kept)](const MountedLayer* used) mutable {
    auto held = std::move(used->hold_);
    delete used;
    if (held != nullptr) {
      held->End();
      // One that came late takes the place of an earlier one, whose file is closed on the lane,
      // too.
      std::swap(kept.hold, held);
      state->releases.Post(
          [current = kept.hold, earlier = std::move(held)] { current->GiveBack(); });
    }
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
        if (state->copies) {
          DSEC_TRY(const auto local, (*state->cache)->Find(id));
          if (!local) return false;
        }
        if (state->options.server != nullptr && blob.session != state->options.server->session())
          return false;
        if (state->remote()) return true;
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

size_t LayerMounts::known() const {
  const std::lock_guard lock(state_->mutex);
  return state_->slots.size();
}

size_t LayerMounts::mounted() const {
  return static_cast<size_t>(std::ranges::count_if(state_->AllSlots(), [](const auto& slot) {
    const std::lock_guard lock(slot->mutex);
    return !slot->mount.expired();
  }));
}

}  // namespace dsec::image
