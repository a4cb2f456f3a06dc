// SPDX-License-Identifier: Apache-2.0
// What LayerMounts does each minute, on a thread of its own.
#include <list>
#include <memory>
#include <set>
#include <vector>

#include "base/log.h"
#include "image/layer_mounts_state.h"

namespace dsec::image {

void LayerMounts::RenewLease() {
  if (!state_->lease || state_->renewing.exchange(true)) return;
  const bool started = state_->threads.Start([state = state_] {
    const auto renewed = state->lease->Renew();
    if (!renewed.ok()) log::Warn("layer.lease_not_renewed", {{"error", renewed.error()}});
    state->renewing = false;
  });
  if (!started) state_->renewing = false;
}

void LayerMounts::GiveOwed() {
  std::vector<std::shared_ptr<Owed>> all;
  {
    const std::lock_guard lock(state_->mutex);
    std::erase_if(state_->owed, [](const auto& one) { return one.expired(); });
    for (const auto& one : state_->owed) {
      if (auto owed = one.lock()) all.push_back(std::move(owed));
    }
  }
  std::erase_if(all, [](const auto& owed) { return owed->mounted != nullptr; });
  for (const auto& owed : all) {
    auto mounted = AcquireAll({owed->id});
    if (mounted.ok()) owed->mounted = std::move(mounted->front());
    // As good as any for the others.
    if (!mounted.ok() && mounted.error().reason() == "layer.unreachable") return;
  }
}

void LayerMounts::Trim() {
  std::set<LayerId> ids;
  std::list<Kept> given_up;  // after the lock
  const auto given_up_apart = std::make_shared<std::list<std::shared_ptr<void>>>();
  bool used = false;
  {
    const std::lock_guard lock(state_->mutex);
    used = state_->ever_used;
    given_up_apart->swap(state_->left_apart);
    if (state_->lease && state_->lease->lost()) given_up.swap(state_->kept);
    given_up.splice(given_up.end(), state_->left);  // those of an outage that is over, perhaps
    const MonoTime now = Clock::System().Mono();
    while (!state_->kept.empty() && now - state_->kept.back().since > state_->options.keep_for)
      given_up.splice(given_up.end(), state_->kept, std::prev(state_->kept.end()));
    for (const Kept& kept : state_->kept) ids.insert(kept.info.id);
  }
  state_->End(std::move(given_up));
  if (!given_up_apart->empty())
    static_cast<void>(state_->closers.Start([given_up_apart] { given_up_apart->clear(); }));
  state_->DropIdleSlots();
  if (!used) return;  // the store may not be there yet
  RenewLease();
  GiveOwed();
  if (const auto deleted = catalog_.DeleteRemoved(); !deleted.ok())
    log::Warn("layer.removed_files_stay", {{"error", deleted.error()}});
  if (ids.empty() || state_->remote()) return;
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
  std::list<Kept> ended;
  {
    const std::lock_guard lock(state_->mutex);
    for (auto it = state_->kept.begin(); it != state_->kept.end();) {
      const auto next = std::next(it);
      if ((*found)->contains(it->info.id)) ended.splice(ended.end(), state_->kept, it);
      it = next;
    }
  }
  state_->End(std::move(ended));
}

}  // namespace dsec::image
