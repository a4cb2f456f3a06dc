// SPDX-License-Identifier: Apache-2.0
#include "fn/op_table.h"

namespace dsec::fn {

std::string OpKey(const std::string& project, const std::string& op_id) {
  return project.empty() ? op_id : project + "\n" + op_id;
}

std::shared_ptr<Op> OpTable::Find(const std::string& key) {
  DropOld();
  const auto found = ops_.find(key);
  return found == ops_.end() ? nullptr : found->second.op;
}

void OpTable::Add(std::shared_ptr<Op> op) {
  const std::string key = op->key;
  ops_[key] = {std::move(op), std::nullopt};
}

void OpTable::Ended(const std::shared_ptr<Op>& op) {
  const auto found = ops_.find(op->key);
  if (found == ops_.end() || found->second.op != op) return;
  if (!op->end->ok()) {
    ops_.erase(found);
    return;
  }
  // Only the result is kept.
  const std::string op_id = op->call.op_id();
  op->call.Clear();
  op->call.set_op_id(op_id);
  const uint64_t bytes = (*op->end)->ByteSizeLong() + 2 * op->key.size() + sizeof(Op);
  kept_.push_back({op->key, bytes, clock_.Mono()});
  found->second.kept = std::prev(kept_.end());
  bytes_ += bytes;
  DropOld();
}

void OpTable::Forget(const std::string& key) {
  const auto found = ops_.find(key);
  if (found == ops_.end()) return;
  if (found->second.kept) {
    bytes_ -= (*found->second.kept)->bytes;
    kept_.erase(*found->second.kept);
  }
  ops_.erase(found);
}

void OpTable::DropOld() {
  const MonoTime oldest = clock_.Mono() - bounds_.age;
  while (!kept_.empty() &&
         (kept_.size() > bounds_.count || bytes_ > bounds_.bytes || kept_.front().at < oldest)) {
    const std::string key = kept_.front().key;
    Forget(key);
  }
}

}  // namespace dsec::fn
