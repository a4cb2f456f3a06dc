// SPDX-License-Identifier: Apache-2.0
#include "aether/fs_identity.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dsec::aether {
namespace {

// Raw calls: the C library's wrappers would change all threads, and these must not.
uint32_t SetFsUid(uint32_t uid) { return static_cast<uint32_t>(::syscall(SYS_setfsuid, uid)); }
uint32_t SetFsGid(uint32_t gid) { return static_cast<uint32_t>(::syscall(SYS_setfsgid, gid)); }

// Leaving user 0 clears the file capabilities from the effective set, but not from the permitted
// one (capabilities(7)).
void RaisePermitted() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return;
  for (auto& half : data) half.effective = half.permitted;
  if (::syscall(SYS_capset, &header, data) != 0) return;  // then the kernel refuses what it must
}

}  // namespace

ScopedFsIdentity::ScopedFsIdentity(uint32_t uid, uint32_t gid)
    : old_uid_(SetFsUid(ToAgentId(uid))), old_gid_(SetFsGid(ToAgentId(gid))) {
  RaisePermitted();
}

ScopedFsIdentity::~ScopedFsIdentity() {
  SetFsGid(old_gid_);
  SetFsUid(old_uid_);
  RaisePermitted();
}

}  // namespace dsec::aether
