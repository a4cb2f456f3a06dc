// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/devices.h"

#include <linux/bpf.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {
namespace {

// Documentation/admin-guide/devices.txt
constexpr int32_t kMemMajor = 1;
constexpr int32_t kMemMinors[] = {3, 5, 7, 8, 9};  // null zero full random urandom
constexpr int32_t kTtyMajor = 5;
constexpr int32_t kTtyMinors[] = {0, 2};  // tty ptmx
constexpr int32_t kFirstPtsMajor = 136;
constexpr int32_t kLastPtsMajor = 143;
constexpr uint32_t kMaxPrograms = 64;  // BPF_CGROUP_MAX_PROGS

int Bpf(int command, bpf_attr& attr) {
  return static_cast<int>(::syscall(SYS_bpf, command, &attr, sizeof(attr)));
}

uint64_t Pointer(const void* at) { return reinterpret_cast<uint64_t>(at); }

bpf_insn Load(uint8_t to, int16_t offset) {  // 32 bits of the context in r1
  return {BPF_LDX | BPF_MEM | BPF_W, to, BPF_REG_1, offset, 0};
}
bpf_insn Jump(uint8_t how, uint8_t reg, int32_t value, int16_t over) {
  return {static_cast<uint8_t>(BPF_JMP | how | BPF_K), reg, 0, over, value};
}
void Return(std::vector<bpf_insn>& code, int32_t value) {
  code.push_back({BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, value});
  code.push_back({BPF_JMP | BPF_EXIT, 0, 0, 0, 0});
}

// if (major == `major`) { allow `minors`, deny the others }
template <size_t N>
void AllowMinors(std::vector<bpf_insn>& code, int32_t major, const int32_t (&minors)[N]) {
  code.push_back(Jump(BPF_JNE, BPF_REG_3, major, static_cast<int16_t>(N * 3 + 2)));
  for (const int32_t minor : minors) {
    code.push_back(Jump(BPF_JNE, BPF_REG_4, minor, 2));
    Return(code, 1);
  }
  Return(code, 0);
}

// struct bpf_cgroup_dev_ctx: access_type (low half: the kind of device), major, minor.
std::vector<bpf_insn> Rules(const std::vector<DeviceNumber>& more) {
  std::vector<bpf_insn> code;
  code.push_back(Load(BPF_REG_2, 0));
  code.push_back({BPF_ALU64 | BPF_AND | BPF_K, BPF_REG_2, 0, 0, 0xffff});
  code.push_back(Load(BPF_REG_3, 4));
  code.push_back(Load(BPF_REG_4, 8));
  for (const DeviceNumber& device : more) {
    const int32_t kind = device.block ? BPF_DEVCG_DEV_BLOCK : BPF_DEVCG_DEV_CHAR;
    code.push_back(Jump(BPF_JNE, BPF_REG_2, kind, 4));
    code.push_back(Jump(BPF_JNE, BPF_REG_3, static_cast<int32_t>(device.major), 3));
    code.push_back(Jump(BPF_JNE, BPF_REG_4, static_cast<int32_t>(device.minor), 2));
    Return(code, 1);
  }
  code.push_back(Jump(BPF_JEQ, BPF_REG_2, BPF_DEVCG_DEV_CHAR, 2));
  Return(code, 0);
  AllowMinors(code, kMemMajor, kMemMinors);
  AllowMinors(code, kTtyMajor, kTtyMinors);
  code.push_back(Jump(BPF_JLT, BPF_REG_3, kFirstPtsMajor, 3));
  code.push_back(Jump(BPF_JGT, BPF_REG_3, kLastPtsMajor, 2));
  Return(code, 1);
  Return(code, 0);
  return code;
}

Error Failed(const char* what) {
  return Error(Code::kFailedPrecondition, "devices.bpf",
               os::ErrnoError("devices.bpf", what).message());
}

Result<uint64_t> TagOf(int program) {
  bpf_prog_info info = {};
  bpf_attr attr = {};
  attr.info.bpf_fd = static_cast<uint32_t>(program);
  attr.info.info_len = sizeof(info);
  attr.info.info = Pointer(&info);
  if (Bpf(BPF_OBJ_GET_INFO_BY_FD, attr) != 0) return Failed("program info");
  uint64_t tag = 0;
  std::memcpy(&tag, info.tag, sizeof(tag));
  return tag;
}

struct Attached {
  std::vector<uint32_t> ids;
  uint32_t flags = 0;
};
// The programs that are attached to the directory itself.
Result<Attached> FindAttached(int cgroup) {
  Attached found;
  found.ids.resize(kMaxPrograms);
  bpf_attr attr = {};
  attr.query.target_fd = static_cast<uint32_t>(cgroup);
  attr.query.attach_type = BPF_CGROUP_DEVICE;
  attr.query.prog_ids = Pointer(found.ids.data());
  attr.query.prog_cnt = kMaxPrograms;
  if (Bpf(BPF_PROG_QUERY, attr) != 0) return Failed("query attached programs");
  found.ids.resize(attr.query.prog_cnt);
  found.flags = attr.query.attach_flags;
  return found;
}

// `program` < 0: the one that is there.
Result<void> Detach(int cgroup, int program) {
  bpf_attr attr = {};
  attr.target_fd = static_cast<uint32_t>(cgroup);
  attr.attach_bpf_fd = static_cast<uint32_t>(program);
  attr.attach_type = BPF_CGROUP_DEVICE;
  if (Bpf(BPF_PROG_DETACH, attr) != 0 && errno != ENOENT) return Failed("detach");
  return Ok();
}

// In place of the one that is there, which the kernel exchanges in one step.
Result<void> Attach(int cgroup, int program) {
  bpf_attr attach = {};
  attach.target_fd = static_cast<uint32_t>(cgroup);
  attach.attach_bpf_fd = static_cast<uint32_t>(program);
  attach.attach_type = BPF_CGROUP_DEVICE;
  attach.attach_flags = BPF_F_ALLOW_OVERRIDE;
  if (Bpf(BPF_PROG_ATTACH, attach) != 0) return Failed("attach");
  return Ok();
}

Result<os::UniqueFd> LoadProgram(const std::vector<bpf_insn>& code) {
  char log[4096] = {};
  bpf_attr attr = {};
  attr.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE;
  attr.insns = Pointer(code.data());
  attr.insn_cnt = static_cast<uint32_t>(code.size());
  attr.license = Pointer("Apache-2.0");
  attr.log_level = 1;
  attr.log_buf = Pointer(log);
  attr.log_size = sizeof(log);
  std::memcpy(attr.prog_name, "dsec_devices", sizeof("dsec_devices"));
  os::UniqueFd program(Bpf(BPF_PROG_LOAD, attr));
  if (!program.valid()) return Failed("load");
  return program;
}

}  // namespace

Result<void> EnforceDeviceRules(int cgroup) {
  DSEC_TRY(const auto program, LoadProgram(Rules({})));
  DSEC_TRY(const uint64_t tag, TagOf(program.get()));
  DSEC_TRY(const auto there, FindAttached(cgroup));
  for (const uint32_t id : there.ids) {
    bpf_attr get = {};
    get.prog_id = id;
    const os::UniqueFd other(Bpf(BPF_PROG_GET_FD_BY_ID, get));
    if (!other.valid()) continue;
    DSEC_TRY(const uint64_t other_tag, TagOf(other.get()));
    if (there.flags == BPF_F_ALLOW_OVERRIDE && other_tag == tag) return Ok();
    // One that was attached in another way does not let itself be exchanged. Until the new one is
    // there the second line holds.
    if (there.flags != BPF_F_ALLOW_OVERRIDE) DSEC_TRY_VOID(Detach(cgroup, other.get()));
  }
  return Attach(cgroup, program.get());
}

Result<void> AllowDevices(int cgroup, const std::vector<DeviceNumber>& devices) {
  if (devices.empty()) return Detach(cgroup, -1);
  DSEC_TRY(const auto program, LoadProgram(Rules(devices)));
  return Attach(cgroup, program.get());
}

v1::Capability DeviceCapability(const Result<void>& enforced) {
  v1::Capability item;
  item.set_name("device_rules");
  item.set_used(enforced.ok() ? "cgroup-bpf" : "none");
  item.set_ok(enforced.ok());
  item.set_detail(
      enforced.ok()
          ? "null, zero, full, random, urandom, tty and terminals"
          : fmt::format("{}; what remains: user namespaces cannot make device nodes, and all "
                        "mounts but /dev are nodev",
                        enforced.error().message()));
  return item;
}

}  // namespace dsec::sandbox
