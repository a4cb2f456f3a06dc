// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dsec::edge {

// When one sandbox must end by time, and which of its execs lost their last follower: the rules of
// TTL, idle time, claim and disconnect, without I/O. All times are Unix milliseconds; 0 means
// "none". Not thread-safe.
//
// Activity is: an exec, file or session call under way or just ended, and an exec with a follower.
// Reads of the sandbox's own record are not, nor is a detached exec.
class Activity {
 public:
  struct Rules {
    int64_t expires_ms = 0;  // TTL
    int64_t idle_ms = 0;
    int64_t claim_until_ms = 0;       // the create's reply was lost; any activity lifts this
    bool ttl_waits_for_exec = false;  // an exec with a follower holds the TTL off ...
    int64_t ttl_extension_ms = 0;     // ... for at most this long
  };
  struct Verdict {
    std::string end;                        // "ttl", "idle", "unclaimed", or empty
    int64_t limit_ms = 0;                   // of what ended it: the configured value
    std::vector<std::string> disconnected;  // execs to be killed; each is named once
  };

  Activity(const Rules& rules, int64_t ttl_ms, int64_t now_ms)
      : rules_(rules), ttl_ms_(ttl_ms), last_ms_(now_ms) {}

  const Rules& rules() const { return rules_; }
  int64_t ttl_ms() const { return ttl_ms_; }
  int64_t last_ms() const { return last_ms_; }
  void SetTtl(int64_t ttl_ms, int64_t expires_ms);
  void SetIdle(int64_t idle_ms) { rules_.idle_ms = idle_ms; }
  void SetClaim(int64_t until_ms) { rules_.claim_until_ms = until_ms; }

  void CallBegan(int64_t now_ms);
  void CallEnded(int64_t now_ms);

  // A follower of the op has come. `keep`: the exec survives the loss of its followers; the rule of
  // a known op stays.
  void Attach(const std::string& op_id, bool keep, int64_t now_ms);
  // It has left: in order, or (vanished) by the loss of its connection.
  void Detach(const std::string& op_id, bool vanished, int64_t now_ms, int64_t grace_ms);
  // The op runs. `orphan_grace_ms`: it has no follower (found at adoption) and is killed after this
  // unless one comes; 0 for an exec just started.
  void ExecStarted(const std::string& op_id, bool keep, int64_t now_ms, int64_t orphan_grace_ms);
  // False when the end is not news: the op is unknown or its end was reported before.
  bool ExecEnded(const std::string& op_id, int64_t now_ms);
  // Known to run, as far as replies told.
  std::vector<std::string> RunningExecs() const;
  bool Follows(const std::string& op_id) const;
  size_t Followers() const { return followers_; }

  // When to call Check next; 0 = no need.
  int64_t Due() const;
  Verdict Check(int64_t now_ms);

 private:
  struct Op {
    bool keep = false;
    bool running = false;
    bool ended = false;
    uint32_t followers = 0;
    int64_t kill_at_ms = 0;
  };
  using Ops = std::unordered_map<std::string, Op>;
  void EraseIfDone(Ops::iterator op);
  // An exec has a follower, or may get it back within its grace.
  bool HeldByExec() const;
  int64_t TtlDue() const;

  Rules rules_;
  int64_t ttl_ms_;
  int64_t last_ms_;
  uint32_t calls_ = 0;
  size_t followers_ = 0;  // over all ops
  Ops ops_;
};

}  // namespace dsec::edge
