// SPDX-License-Identifier: Apache-2.0
#include "base/fault.h"

#include <unistd.h>

#include <charconv>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "base/check.h"
#include "base/rng.h"

namespace dsec::fault {
namespace internal {
std::atomic<bool> any_armed = false;
}

namespace {

enum class Kind { kError, kKill, kDelay, kBlock };

struct Action {
  Kind kind = Kind::kError;
  int sys_errno = 0;
  std::chrono::nanoseconds delay{0};
  uint64_t remaining = UINT64_MAX;
  double probability = 1;
  uint64_t generation = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // armed, disarmed or fired
  std::map<std::string, Action, std::less<>> armed;
  std::map<std::string, uint64_t, std::less<>> fired;
  uint64_t generations = 0;
  Rng rng = Rng::FromSystem();
};

State& Global() {
  static State* const kState = new State();
  return *kState;
}

Error Invalid(std::string_view item, std::string_view rule) {
  return Error(Code::kInvalidArgument, "fault.invalid",
               fmt::format("fault \"{}\": {}", item, rule));
}

// Number for which the errno of this platform has that name; 0 if there is none.
int ErrnoByName(std::string_view name) {
  for (int number = 1; number < 134; ++number) {
    const char* known = strerrorname_np(number);
    if (known != nullptr && name == known) return number;
  }
  return 0;
}

template <typename T>
bool ParseNumber(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseDuration(std::string_view text, std::chrono::nanoseconds& out) {
  const size_t unit_at = text.find_first_not_of("0123456789");
  if (unit_at == std::string_view::npos) return false;
  uint32_t count = 0;
  if (!ParseNumber(text.substr(0, unit_at), count)) return false;
  const std::string_view unit = text.substr(unit_at);
  if (unit == "ns") {
    out = std::chrono::nanoseconds(count);
  } else if (unit == "us") {
    out = std::chrono::microseconds(count);
  } else if (unit == "ms") {
    out = std::chrono::milliseconds(count);
  } else if (unit == "s") {
    out = std::chrono::seconds(count);
  } else {
    return false;
  }
  return true;
}

// Cuts `text` at the last `mark` and returns what follows it; empty if there is none.
std::string_view CutSuffix(std::string_view& text, char mark) {
  const size_t at = text.rfind(mark);
  if (at == std::string_view::npos) return {};
  const std::string_view suffix = text.substr(at + 1);
  text = text.substr(0, at);
  return suffix;
}

Result<std::pair<std::string, Action>> ParseItem(std::string_view item) {
  const size_t equals = item.find('=');
  if (equals == 0 || equals == std::string_view::npos) return Invalid(item, "must be name=action");
  Action action;
  std::string_view rest = item.substr(equals + 1);
  if (rest.find('%') != std::string_view::npos &&
      (!ParseNumber(CutSuffix(rest, '%'), action.probability) || !(action.probability >= 0) ||
       action.probability > 1)) {
    return Invalid(item, "%probability must be a number from 0 to 1");
  }
  if (rest.find('*') != std::string_view::npos &&
      (!ParseNumber(CutSuffix(rest, '*'), action.remaining) || action.remaining == 0)) {
    return Invalid(item, "*count must be a positive number");
  }
  if (rest == "kill") {
    action.kind = Kind::kKill;
  } else if (rest == "block") {
    action.kind = Kind::kBlock;
  } else if (rest.starts_with("error:")) {
    action.kind = Kind::kError;
    action.sys_errno = ErrnoByName(rest.substr(6));
    if (action.sys_errno == 0) return Invalid(item, "unknown errno name");
  } else if (rest.starts_with("delay:")) {
    action.kind = Kind::kDelay;
    if (!ParseDuration(rest.substr(6), action.delay)) {
      return Invalid(item, "delay must be a whole number of ns, us, ms or s");
    }
  } else {
    return Invalid(item, "action must be error:ENAME, kill, delay:TIME or block");
  }
  return std::pair(std::string(item.substr(0, equals)), action);
}

}  // namespace

Result<void> Arm(std::string_view spec) {
  std::map<std::string, Action> parsed;
  while (!spec.empty()) {
    const size_t end = spec.find(';');
    const std::string_view item = spec.substr(0, end);
    spec = end == std::string_view::npos ? std::string_view() : spec.substr(end + 1);
    if (item.empty()) continue;
    DSEC_TRY(auto entry, ParseItem(item));
    parsed[std::move(entry.first)] = entry.second;
  }
  State& state = Global();
  const std::lock_guard lock(state.mutex);
  for (auto& [name, action] : parsed) {
    action.generation = ++state.generations;
    state.armed[name] = action;
  }
  internal::any_armed.store(!state.armed.empty(), std::memory_order_relaxed);
  state.changed.notify_all();
  return Ok();
}

Result<void> ArmFromEnv() {
  const char* spec = std::getenv("DSEC_FAULTS");
  if (spec == nullptr) return Ok();
  return Arm(spec).Context("environment variable DSEC_FAULTS");
}

void Disarm(std::string_view name) {
  State& state = Global();
  const std::lock_guard lock(state.mutex);
  if (const auto found = state.armed.find(name); found != state.armed.end()) {
    state.armed.erase(found);
  }
  internal::any_armed.store(!state.armed.empty(), std::memory_order_relaxed);
  state.changed.notify_all();
}

void DisarmAll() {
  State& state = Global();
  const std::lock_guard lock(state.mutex);
  state.armed.clear();
  internal::any_armed.store(false, std::memory_order_relaxed);
  state.changed.notify_all();
}

uint64_t Fired(std::string_view name) {
  State& state = Global();
  const std::lock_guard lock(state.mutex);
  const auto found = state.fired.find(name);
  return found == state.fired.end() ? 0 : found->second;
}

bool WaitFired(std::string_view name, uint64_t count, std::chrono::milliseconds timeout) {
  State& state = Global();
  std::unique_lock lock(state.mutex);
  return state.changed.wait_for(lock, timeout, [&] {
    const auto found = state.fired.find(name);
    return found != state.fired.end() && found->second >= count;
  });
}

Result<void> internal::Pass(std::string_view name) {
  State& state = Global();
  std::unique_lock lock(state.mutex);
  const auto found = state.armed.find(name);
  if (found == state.armed.end() || found->second.remaining == 0) return Ok();
  constexpr uint64_t kScale = uint64_t{1} << 53;
  if (static_cast<double>(state.rng.Below(kScale)) >=
      found->second.probability * static_cast<double>(kScale)) {
    return Ok();
  }
  --found->second.remaining;
  const Action action = found->second;
  ++state.fired[std::string(name)];
  state.changed.notify_all();
  switch (action.kind) {
    case Kind::kError:
      return Error::FromErrno(action.sys_errno, "fault.injected", std::string(name));
    case Kind::kKill:
      ::kill(::getpid(), SIGKILL);
      ::pause();
      return Ok();
    case Kind::kDelay:
      lock.unlock();
      std::this_thread::sleep_for(action.delay);
      return Ok();
    case Kind::kBlock:
      state.changed.wait(lock, [&] {
        const auto now = state.armed.find(name);
        return now == state.armed.end() || now->second.generation != action.generation;
      });
      return Ok();
  }
  return Ok();
}

}  // namespace dsec::fault
