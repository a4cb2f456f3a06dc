// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "dsec/v1/cluster.pb.h"
#include "runtime/deadline.h"
#include "runtime/task.h"
#include "store/store.h"

namespace dsec::ca {

inline constexpr std::chrono::minutes kTokenLife{10};

// What an operator carries to a new machine: dsecjoin1.<cluster>.<SHA-256 of the CA's certificate>.
// <secret>. The fingerprint lets the machine check whom it talks to before it trusts anybody.
struct JoinToken {
  std::string cluster;
  std::string ca_sha256;  // 64 hex digits
  std::string secret;     // 64 hex digits
};
std::string WriteJoinToken(const JoinToken& token);
// kInvalidArgument "join.token".
Result<JoinToken> ParseJoinToken(std::string_view text);

// The store knows the secret's digest alone: "join/<SHA-256>".
std::string JoinKey(std::string_view secret);
// Makes a token and its record, under a lease. Errors of the store.
runtime::Task<JoinToken> MakeJoinToken(store::Store& store, std::string cluster,
                                       std::string ca_sha256, v1::JoinTokenRecord record,
                                       const Clock& clock, runtime::Deadline deadline);

// A token that may be used now by the one with that key, and how to mark it as used in the same
// transaction as what is done with it.
struct TokenUse {
  v1::JoinTokenRecord record;
  store::Condition condition;
  store::Write write;
};
// One that was used already is good for the same key and name once more, until its time is over:
// the answer may have been lost. kUnauthenticated "join.token": unknown, used, or its time is over;
// errors of the store.
runtime::Task<TokenUse> UseJoinToken(store::Store& store, std::string secret,
                                     std::string key_sha256, std::string name, const Clock& clock,
                                     runtime::Deadline deadline);

// A serial number that no other certificate has, as far as the condition holds:
// "ca/serial/<number>". Its lease lives as long as the certificate; the caller revokes it when the
// transaction has not come about.
struct SerialUse {
  uint64_t serial = 0;
  store::LeaseId lease = 0;
  store::Condition condition;
  store::Write write;
};
runtime::Task<SerialUse> NewSerial(store::Store& store, v1::CertificateRecord record,
                                   const Clock& clock, runtime::Deadline deadline);

}  // namespace dsec::ca
