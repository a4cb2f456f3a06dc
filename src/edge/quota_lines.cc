// SPDX-License-Identifier: Apache-2.0
#include "edge/quota_lines.h"

#include <utility>
#include <vector>

namespace dsec::edge {

// Keeps a line while somebody stands in it.
class QuotaLines::User {
 public:
  User(QuotaLines& lines, std::string project) : lines_(lines), project_(std::move(project)) {
    std::lock_guard lock(lines_.mutex_);
    auto& line = lines_.lines_[project_];
    if (line == nullptr) line = std::make_shared<Line>(lines_.max_waiting_, lines_.retry_);
    if (lines_.closed_) line->queue.Close();
    ++line->users;
    line_ = line;
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;
  ~User() {
    std::lock_guard lock(lines_.mutex_);
    if (--line_->users == 0) lines_.lines_.erase(project_);
  }
  FairQueue& queue() const { return line_->queue; }

 private:
  QuotaLines& lines_;
  const std::string project_;
  std::shared_ptr<Line> line_;
};

runtime::Task<void> QuotaLines::Enter(std::string project,
                                      std::shared_ptr<FairQueue::Ticket> ticket,
                                      FairQueue::Take take, runtime::Deadline deadline) {
  const User user(*this, std::move(project));
  auto entered = co_await user.queue().Enter(std::move(ticket), std::move(take), deadline);
  co_return entered;
}

bool QuotaLines::Waits(const std::string& project) const {
  std::lock_guard lock(mutex_);
  const auto it = lines_.find(project);
  return it != lines_.end() && it->second->queue.waiting() > 0;
}

void QuotaLines::Poke() {
  std::vector<std::shared_ptr<Line>> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [project, line] : lines_) all.push_back(line);
  }
  for (const auto& line : all) line->queue.Poke();
}

void QuotaLines::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& [project, line] : lines_) line->queue.Close();
}

}  // namespace dsec::edge
