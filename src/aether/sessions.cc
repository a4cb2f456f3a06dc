// SPDX-License-Identifier: Apache-2.0
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "aether/session.h"

namespace dsec::aether {
namespace {

// Bounds of the private file system: a command's text is at most one message long, and each session
// has a handful of files.
constexpr uint64_t kFsBytes = 64u << 20;
constexpr uint32_t kFsInodes = 1024;

}  // namespace

Result<void> Sessions::Check(const v1::ExecRequest& request) const {
  auto found = sessions_.find(request.session());
  if (found != sessions_.end()) return found->second->Check(request);
  if (sessions_.size() + waiting_.size() >= kMaxSessions) {
    return Error(Code::kResourceExhausted, "session.too_many",
                 fmt::format("the sandbox has {} sessions already", kMaxSessions));
  }
  return Ok();
}

void Sessions::Run(Exec& exec) {
  auto found = sessions_.find(exec.session_name());
  if (found != sessions_.end()) {
    found->second->Add(exec);
    return;
  }
  if (fs_.valid()) {
    Make(exec.session_name());
    sessions_.at(exec.session_name())->Add(exec);
    return;
  }
  waiting_.push_back(&exec);
  if (fs_asked_) return;
  inotify_.Reset(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!inotify_.valid()) {
    return FailWaiting(Error::FromErrno(errno, "session.channel", "inotify_init1"));
  }
  inotify_watch_ =
      FdWatch(context_.loop, inotify_.get(), EPOLLIN, [this](uint32_t) { OnInotify(); });
  Result<void> asked = context_.init.MakeFs(kFsBytes, kFsInodes, [this](Result<os::UniqueFd> fs) {
    fs_asked_ = false;
    if (!fs.ok()) return FailWaiting(fs.error());
    fs_ = std::move(fs).value();
    std::deque<Exec*> waiting = std::exchange(waiting_, {});
    for (Exec* ready : waiting) Run(*ready);
  });
  if (!asked.ok()) return FailWaiting(asked.error());
  fs_asked_ = true;
}

void Sessions::Make(const std::string& name) {
  sessions_[name] = std::make_unique<Session>(context_, name, fs_.get(), next_number_++,
                                              inotify_.get(), [this] { OnInotify(); });
}

void Sessions::FailWaiting(const Error& error) {
  inotify_watch_.Reset();
  inotify_.Reset();
  std::deque<Exec*> failed = std::exchange(waiting_, {});
  for (Exec* exec : failed) exec->FailInSession("session", error.sys_errno(), error.ToString());
}

void Sessions::Remove(Exec& exec) {
  std::erase(waiting_, &exec);
  auto found = sessions_.find(exec.session_name());
  if (found != sessions_.end()) found->second->Remove(exec);
}

std::vector<v1::SessionInfo> Sessions::List() const {
  std::vector<v1::SessionInfo> infos;
  for (const auto& [name, session] : sessions_) infos.push_back(session->Info());
  return infos;
}

void Sessions::Close(const std::string& name, std::function<void(Result<void>)> done) {
  auto found = sessions_.find(name);
  if (found == sessions_.end()) {
    done(Error(Code::kNotFound, "session.not_found", "there is no session of this name"));
    return;
  }
  if (found->second->closing()) {
    done(Error(Code::kConflict, "session.closing", "the session is being closed"));
    return;
  }
  found->second->Close([this, name, done = std::move(done)] {
    // Not from within a call of the session itself.
    context_.loop.Post([this, name, done] {
      sessions_.erase(name);
      done(Ok());
    });
  });
}

void Sessions::OnInotify() {
  alignas(inotify_event) char buffer[4096];
  while (true) {
    ssize_t size = ::read(inotify_.get(), buffer, sizeof(buffer));
    if (size <= 0) return;
    for (ssize_t position = 0; position < size;) {
      inotify_event event;
      std::memcpy(&event, buffer + position, sizeof(event));
      std::string_view name;
      if (event.len > 0) name = buffer + position + sizeof(event);
      position += static_cast<ssize_t>(sizeof(event) + event.len);
      for (const auto& [key, session] : sessions_) {
        if (session->watch() == event.wd || (event.mask & IN_Q_OVERFLOW) != 0) {
          session->OnFileEvent(event.mask, name);
        }
      }
    }
  }
}

}  // namespace dsec::aether
