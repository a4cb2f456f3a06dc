// SPDX-License-Identifier: Apache-2.0
#include "aether/leftovers.h"

namespace dsec::aether {

void Leftovers::Add(std::unique_ptr<ExecCgroup> cgroup, std::unique_ptr<StreamReader> out,
                    std::unique_ptr<StreamReader> err) {
  AddReader(std::move(out));
  AddReader(std::move(err));
  if (cgroup == nullptr || cgroup->Remove()) return;
  cgroup->WhenEmpty(loop_, [this] { sweep_ = Timer(loop_, loop_.now(), [this] { Sweep(); }); });
  cgroups_.push_back(std::move(cgroup));
}

void Leftovers::AddReader(std::unique_ptr<StreamReader> reader) {
  if (reader == nullptr || reader->ended()) return;
  reader->Discard([this] { sweep_ = Timer(loop_, loop_.now(), [this] { Sweep(); }); });
  readers_.push_back(std::move(reader));
  if (readers_.size() > kMaxReaders) readers_.pop_front();
}

void Leftovers::Sweep() {
  std::erase_if(readers_, [](const auto& reader) { return reader->ended(); });
  std::erase_if(cgroups_,
                [](const auto& cgroup) { return !cgroup->Populated() && cgroup->Remove(); });
  if (cgroups_.empty() && when_gone_) {
    auto call = std::exchange(when_gone_, nullptr);
    call();
  }
}

void Leftovers::Kill() {
  for (const auto& cgroup : cgroups_) {
    if (!cgroup->Kill().ok()) continue;  // gone meanwhile
  }
}

void Leftovers::WhenGone(std::function<void()> callback) {
  when_gone_ = std::move(callback);
  sweep_ = Timer(loop_, loop_.now(), [this] { Sweep(); });
}

}  // namespace dsec::aether
