// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dsec::aether {

// Acts on files as a user of the sandbox, with the agent's capabilities: what is created belongs to
// that user, and nothing is refused for lack of rights. For the calling thread only, until
// destruction. See "Identities" in spawn/agent_abi.h.
class ScopedFsIdentity {
 public:
  ScopedFsIdentity(uint32_t uid, uint32_t gid);
  ~ScopedFsIdentity();
  ScopedFsIdentity(const ScopedFsIdentity&) = delete;
  ScopedFsIdentity& operator=(const ScopedFsIdentity&) = delete;

 private:
  uint32_t old_uid_;
  uint32_t old_gid_;
};

// The sandbox's number of an id as stat() shows it to the agent; what is outside the sandbox's
// range is nobody.
inline uint32_t FromAgentId(uint32_t id) { return id == 0 || id > 65536 ? 65534 : id - 1; }
inline uint32_t ToAgentId(uint32_t id) { return id + 1; }

}  // namespace dsec::aether
