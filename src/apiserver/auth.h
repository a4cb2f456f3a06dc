// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "http/message.h"

namespace dsec::apiserver {

// Who makes a request.
struct Principal {
  std::string name;
  std::string project;
};

// The keys that are accepted; only their SHA-256 is kept. Immutable after set-up.
class ApiKeys {
 public:
  void Add(std::string_view key, Principal principal);
  // By `Authorization: Bearer` or `X-API-Key`. kUnauthenticated "auth.missing" / "auth.invalid".
  // Takes the same time for every wrong key.
  Result<const Principal*> Authenticate(const http::Fields& fields) const;

 private:
  using Digest = std::array<uint8_t, 32>;
  static Digest Hash(std::string_view key);
  std::vector<std::pair<Digest, Principal>> keys_;
};

// The key of the single-machine mode, one line in a file of mode 0600. Made on first use, complete
// or not at all, from 32 random bytes. kFailedPrecondition "auth.key_file" when others than the
// owner may read the file or it holds no key of at least 16 characters; errno with the same reason.
Result<std::string> LoadOrCreateApiKey(const std::string& path);

}  // namespace dsec::apiserver
