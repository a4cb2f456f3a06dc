// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "vmm/qmp.h"
#include "vmm/vmm.h"

namespace dsec::vmm {
namespace {

using nlohmann::json;
using runtime::Deadline;

constexpr auto kLook = std::chrono::milliseconds(5);

std::string Member(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

RunState StateOf(const json& status) {
  const std::string text = Member(status, "status");
  if (text == "running") return RunState::kRunning;
  return text == "paused" || text == "postmigrate" || text == "prelaunch" ? RunState::kPaused
                                                                          : RunState::kOther;
}

// Until a migration, in or out, has ended. An incoming one has no state before its first byte.
Result<void> AwaitMigration(QmpClient& client, Deadline deadline) {
  while (true) {
    DSEC_TRY(const json info, client.Execute("query-migrate"));
    const std::string status = Member(info, "status");
    if (status == "completed") return Ok();
    if (status == "failed" || status == "cancelled") {
      return Error(
          Code::kInternal, "vm.snapshot_failed",
          fmt::format("QEMU says {} {}", status, Member(info, "error-desc").substr(0, 200)));
    }
    if (deadline.Expired())
      return Error(Code::kDeadlineExceeded, "vm.snapshot_failed", "it takes too long");
    // QEMU sends MIGRATION events only to who has turned them on, and after the fact.
    std::this_thread::sleep_for(kLook);
  }
}

}  // namespace

Result<os::PidFd> QemuVmm::Boot(const KeeperPlan& plan, const Machine& machine) {
  return StartKeeper(plan, machine);
}

Result<void> QemuVmm::Pause(const std::string& control, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY_VOID(client.Execute("stop"));
  return Ok();
}

Result<void> QemuVmm::Resume(const std::string& control, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY_VOID(client.Execute("cont"));
  return Ok();
}

Result<void> QemuVmm::Snapshot(const std::string& control, int file, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY_VOID(client.Execute("stop"));
  // 0: no throttle (qapi/migration.json).
  DSEC_TRY_VOID(client.Execute("migrate-set-parameters", {{"max-bandwidth", 0}}));
  // By descriptor: QEMU may not start programs (-sandbox spawn=deny), nor find files.
  DSEC_TRY_VOID(client.Execute("getfd", {{"fdname", "snapshot"}}, file));
  DSEC_TRY_VOID(client.Execute("migrate", {{"uri", "fd:snapshot"}}));
  return AwaitMigration(client, deadline);
}

Result<void> QemuVmm::Restore(const std::string& control, int file, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY_VOID(client.Execute("getfd", {{"fdname", "snapshot"}}, file));
  DSEC_TRY_VOID(client.Execute("migrate-incoming", {{"uri", "fd:snapshot"}}));
  return AwaitMigration(client, deadline);
}

Result<RunState> QemuVmm::Status(const std::string& control, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY(const json status, client.Execute("query-status"));
  return StateOf(status);
}

Result<void> QemuVmm::SetMemory(const std::string& control, uint64_t bytes, Deadline deadline) {
  DSEC_TRY(auto client, QmpClient::Connect(control, deadline));
  DSEC_TRY_VOID(client.Execute("balloon", {{"value", bytes}}));
  return Ok();
}

}  // namespace dsec::vmm
