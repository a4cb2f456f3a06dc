// SPDX-License-Identifier: Apache-2.0
#include "image/shared_catalog.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "os/file.h"

namespace dsec::image {
namespace {

// How long a create waits for a catalogue whose answer it could do without.
constexpr std::chrono::milliseconds kKnownPatience{1500};
constexpr size_t kMostKnown = 10'000;

// A connection that has failed once is not trusted with the next question.
bool IsFailedConnection(const Error& error) {
  return error.reason() == "layer.catalog" || error.reason() == "layer.catalog_damaged";
}

bool OutOfReach(const Error& error) {
  // SQLite says "layer.catalog" for an error of the file system, "busy" when locks do not come.
  return error.reason() == "layer.unreachable" || IsFailedConnection(error) ||
         error.reason() == "layer.catalog_busy" || error.reason() == "layer.io";
}

}  // namespace

// Used on one lane alone.
class SharedCatalog::Handle {
 public:
  Handle(std::string root, std::shared_ptr<std::atomic<bool>> seen)
      : root_(std::move(root)), seen_(std::move(seen)) {}

  Result<LayerStore*> Get() {
    struct stat status;
    const std::string blobs = root_ + "/blobs";
    if (::stat(blobs.c_str(), &status) != 0) {
      const int error = errno;
      store_.reset();
      // A store that was there and is not: its file system is not mounted. To make another one in
      // its place would hide that.
      if (error == ENOENT || error == ENOTDIR) {
        if (*seen_) return Unreachable(fmt::format("{} is not there", blobs));
      } else {
        return Unreachable(blobs).WithErrno(error);
      }
    } else if (store_ != nullptr && status.st_dev == device_ && status.st_ino == inode_) {
      return store_.get();
    }
    store_.reset();
    DSEC_TRY(store_, LayerStore::Open(root_));
    if (::stat(blobs.c_str(), &status) != 0) return Unreachable(blobs).WithErrno(errno);
    log::Info("layer.root_opened", {{"root", root_}});
    *seen_ = true;
    device_ = status.st_dev;
    inode_ = status.st_ino;
    return store_.get();
  }
  // The next Get opens anew.
  void Drop() { store_.reset(); }

 private:
  const std::string root_;
  std::unique_ptr<LayerStore> store_;
  const std::shared_ptr<std::atomic<bool>> seen_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

SharedCatalog::SharedCatalog(std::string root, std::chrono::milliseconds patience, bool seen)
    : patience_(patience) {
  const auto ever = std::make_shared<std::atomic<bool>>(seen);
  names_ = std::make_shared<Handle>(root, ever);
  rest_ = std::make_shared<Handle>(root, ever);
  collection_ = std::make_shared<Handle>(std::move(root), ever);
}

// Closing a database may hang, too.
SharedCatalog::~SharedCatalog() {
  for (auto [lane, handle] : {std::pair(&name_lane_, names_), std::pair(&rest_lane_, rest_),
                              std::pair(&collection_lane_, collection_)}) {
    static_cast<void>(lane->Run<void>(
        [handle]() -> Result<void> {
          handle->Drop();
          return Ok();
        },
        kKnownPatience));
  }
}

template <typename T>
Result<T> SharedCatalog::Ask(RootLane& lane, const std::shared_ptr<Handle>& handle,
                             std::chrono::milliseconds patience,
                             std::function<Result<T>(LayerStore&)> question) {
  auto call = [handle, question = std::move(question)]() -> Result<T> {
    auto store = handle->Get();
    if (!store.ok()) return RootError(std::move(store).error());
    auto answer = question(**store);
    if (!answer.ok() && IsFailedConnection(answer.error())) handle->Drop();
    return answer;
  };
  return lane.Run<T>(std::move(call), patience);
}

std::optional<LayerInfo> SharedCatalog::Recall(const std::string& ref) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(ref);
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

void SharedCatalog::Remember(const std::string& ref, const Result<LayerInfo>& answer) {
  const std::lock_guard lock(mutex_);
  if (!answer.ok()) {
    known_.erase(ref);
    return;
  }
  if (known_.size() >= kMostKnown && !known_.contains(ref)) known_.erase(known_.begin());
  known_.insert_or_assign(ref, *answer);
}

Result<LayerInfo> SharedCatalog::Resolve(std::string_view ref, LayerKind kind) {
  auto found = std::move(FindForUse({std::string(ref)}).front());
  if (!found.ok()) return found;
  DSEC_TRY_VOID(CheckKind(*found, ref, kind));
  return found;
}

std::vector<Result<LayerInfo>> SharedCatalog::FindForUse(const std::vector<std::string>& refs) {
  using Answers = std::vector<Result<LayerInfo>>;
  std::vector<std::optional<LayerInfo>> known;
  for (const std::string& ref : refs) known.push_back(Recall(ref));
  const bool all_known =
      std::ranges::all_of(known, [](const auto& one) { return one.has_value(); });
  const auto ask = [handle = names_, refs]() -> Result<Answers> {
    auto store = handle->Get();
    if (!store.ok()) return RootError(std::move(store).error());
    Answers answers;
    bool failed = false;
    for (const std::string& ref : refs) {
      answers.push_back((*store)->Find(ref));
      failed = failed || (!answers.back().ok() && IsFailedConnection(answers.back().error()));
    }
    if (failed) handle->Drop();
    return answers;
  };
  auto asked =
      name_lane_.Run<Answers>(ask, all_known ? std::min(kKnownPatience, patience_) : patience_);
  Answers answers = asked.ok() ? *std::move(asked) : Answers(refs.size(), std::move(asked).error());
  for (size_t i = 0; i < refs.size(); ++i) {
    Result<LayerInfo>& found = answers[i];
    if (!found.ok() && elsewhere_) {
      if (const auto id = ParseLayerId(refs[i]); id.ok()) {
        // An id never stands for anything else.
        found = known[i] ? Result<LayerInfo>(*known[i]) : elsewhere_(*id);
        if (found.ok()) Remember(refs[i], found);
        continue;
      }
    }
    if (found.ok() || !OutOfReach(found.error())) {
      Remember(refs[i], found);
    } else if (known[i]) {
      log::Warn("layer.answered_from_memory", {{"ref", refs[i]}, {"error", found.error()}});
      found = *std::move(known[i]);
    } else if (found.error().reason() != "layer.unreachable") {
      found = Unreachable(found.error().ToString());
    }
  }
  return answers;
}

Result<LayerInfo> SharedCatalog::Find(std::string_view ref) {
  return Ask<LayerInfo>(rest_lane_, rest_, patience_,
                        [name = std::string(ref)](LayerStore& store) { return store.Find(name); });
}

Result<std::vector<LayerInfo>> SharedCatalog::List(const ListFilter& filter) {
  return Ask<std::vector<LayerInfo>>(rest_lane_, rest_, patience_,
                                     [filter](LayerStore& store) { return store.List(filter); });
}

Result<CollectReport> SharedCatalog::DeleteRemoved() {
  return Ask<CollectReport>(rest_lane_, rest_, patience_,
                            [](LayerStore& store) { return store.DeleteRemoved(); });
}

Result<CollectReport> SharedCatalog::Collect(const CollectOptions& options,
                                             std::chrono::milliseconds patience,
                                             const std::stop_token& stop) {
  const auto pending = std::make_shared<Pending<CollectReport>>();
  pending->Join();
  const std::stop_callback on_stop(
      stop, [pending] { pending->Set(Unreachable("the daemon stops and does not wait for it")); });
  collection_lane_.Post(
      [handle = collection_, options, waiter = std::weak_ptr<Pending<CollectReport>>(pending)] {
        if (waiter.expired()) return;
        auto collect = [&]() -> Result<CollectReport> {
          auto store = handle->Get();
          if (!store.ok()) return RootError(std::move(store).error());
          return (*store)->Collect(options);
        };
        auto report = collect();
        if (!report.ok() && IsFailedConnection(report.error())) handle->Drop();
        if (const auto still = waiter.lock()) still->Set(std::move(report));
      });
  auto report = pending->Wait(patience);
  if (!report) return Unreachable("no answer in time");
  return *std::move(report);
}

Result<std::vector<Lease>> SharedCatalog::Leases() {
  return Ask<std::vector<Lease>>(rest_lane_, rest_, patience_,
                                 [](LayerStore& store) { return ReadLeases(store.root()); });
}

Result<void> SharedCatalog::Forget(std::string_view node) {
  return Ask<void>(rest_lane_, rest_, patience_, [name = std::string(node)](LayerStore& store) {
    return ForgetNode(store.root(), name);
  });
}

Result<void> SharedCatalog::Remove(std::string_view ref) {
  return Ask<void>(rest_lane_, rest_, patience_,
                   [name = std::string(ref)](LayerStore& store) { return store.Remove(name); });
}

}  // namespace dsec::image
