// SPDX-License-Identifier: Apache-2.0
#include "edge/activity.h"

#include <algorithm>

#include "base/check.h"

namespace dsec::edge {

void Activity::SetTtl(int64_t ttl_ms, int64_t expires_ms) {
  ttl_ms_ = ttl_ms;
  rules_.expires_ms = expires_ms;
}

void Activity::CallBegan(int64_t now_ms) {
  ++calls_;
  last_ms_ = std::max(last_ms_, now_ms);
  rules_.claim_until_ms = 0;
}

void Activity::CallEnded(int64_t now_ms) {
  DSEC_CHECK(calls_ > 0);
  --calls_;
  last_ms_ = std::max(last_ms_, now_ms);
}

void Activity::Attach(const std::string& op_id, bool keep, int64_t now_ms) {
  const auto [it, fresh] = ops_.try_emplace(op_id);
  Op& op = it->second;
  if (fresh) op.keep = keep;
  op.kill_at_ms = 0;
  ++op.followers;
  ++followers_;
  last_ms_ = std::max(last_ms_, now_ms);
  rules_.claim_until_ms = 0;
}

void Activity::Detach(const std::string& op_id, bool vanished, int64_t now_ms, int64_t grace_ms) {
  const auto it = ops_.find(op_id);
  DSEC_CHECK(it != ops_.end() && it->second.followers > 0);
  Op& op = it->second;
  --followers_;
  --op.followers;
  // An exec whose start has not been answered yet may be starting: the kill is harmless when it
  // never did.
  if (op.followers == 0 && !op.ended && vanished && !op.keep) op.kill_at_ms = now_ms + grace_ms;
  last_ms_ = std::max(last_ms_, now_ms);
  EraseIfDone(it);
}

void Activity::ExecStarted(const std::string& op_id, bool keep, int64_t now_ms,
                           int64_t orphan_grace_ms) {
  const auto [it, fresh] = ops_.try_emplace(op_id);
  Op& op = it->second;
  if (fresh) op.keep = keep;
  if (op.ended) return;
  op.running = true;
  if (op.followers == 0 && !op.keep && orphan_grace_ms > 0)
    op.kill_at_ms = now_ms + orphan_grace_ms;
}

bool Activity::ExecEnded(const std::string& op_id, int64_t now_ms) {
  const auto it = ops_.find(op_id);
  if (it == ops_.end() || it->second.ended) return false;
  Op& op = it->second;
  const bool news = op.running;
  op.ended = true;
  op.running = false;
  op.kill_at_ms = 0;
  if (op.followers > 0) last_ms_ = std::max(last_ms_, now_ms);
  EraseIfDone(it);
  return news;
}

std::vector<std::string> Activity::RunningExecs() const {
  std::vector<std::string> running;
  for (const auto& [op_id, op] : ops_) {
    if (op.running) running.push_back(op_id);
  }
  return running;
}

bool Activity::Follows(const std::string& op_id) const {
  const auto it = ops_.find(op_id);
  return it != ops_.end() && it->second.followers > 0;
}

void Activity::EraseIfDone(Ops::iterator op) {
  if (op->second.followers == 0 && !op->second.running && op->second.kill_at_ms == 0)
    ops_.erase(op);
}

bool Activity::HeldByExec() const {
  return std::any_of(ops_.begin(), ops_.end(), [](const auto& entry) {
    return !entry.second.ended && (entry.second.followers > 0 || entry.second.kill_at_ms > 0);
  });
}

int64_t Activity::TtlDue() const {
  if (rules_.expires_ms == 0) return 0;
  const bool waits = rules_.ttl_waits_for_exec && HeldByExec();
  return rules_.expires_ms + (waits ? rules_.ttl_extension_ms : 0);
}

int64_t Activity::Due() const {
  int64_t due = 0;
  const auto sooner = [&due](int64_t at) {
    if (at != 0 && (due == 0 || at < due)) due = at;
  };
  sooner(TtlDue());
  if (rules_.idle_ms != 0 && calls_ == 0 && !HeldByExec()) sooner(last_ms_ + rules_.idle_ms);
  sooner(rules_.claim_until_ms);
  for (const auto& [op_id, op] : ops_) sooner(op.kill_at_ms);
  return due;
}

Activity::Verdict Activity::Check(int64_t now_ms) {
  Verdict verdict;
  if (const int64_t due = TtlDue(); due != 0 && due <= now_ms) {
    verdict.end = "ttl";
    verdict.limit_ms = ttl_ms_;
  } else if (rules_.claim_until_ms != 0 && rules_.claim_until_ms <= now_ms) {
    verdict.end = "unclaimed";
  } else if (rules_.idle_ms != 0 && calls_ == 0 && !HeldByExec() &&
             last_ms_ + rules_.idle_ms <= now_ms) {
    verdict.end = "idle";
    verdict.limit_ms = rules_.idle_ms;
  }
  for (auto it = ops_.begin(); it != ops_.end();) {
    const auto op = it++;
    if (op->second.kill_at_ms == 0 || op->second.kill_at_ms > now_ms) continue;
    op->second.kill_at_ms = 0;
    verdict.disconnected.push_back(op->first);
    EraseIfDone(op);
  }
  return verdict;
}

}  // namespace dsec::edge
