// SPDX-License-Identifier: Apache-2.0
#include "vmm/port_sync.h"

#include <fmt/format.h>

#include <array>

#include "base/rng.h"

namespace dsec::vmm {

std::string SyncAnswer(std::string_view secret, std::string_view nonce) {
  std::string answer;
  for (const char c : secret) answer += static_cast<char>(~c);
  answer += nonce;
  return answer;
}

PortSync::PortSync(std::string_view secret) : sync_(secret) {
  std::array<uint8_t, kNonceBytes> random;
  SecureRandom(random);
  const std::string nonce(random.begin(), random.end());
  sync_ += nonce;
  answer_ = SyncAnswer(secret, nonce);
}

Result<PortSync::Step> PortSync::Look(std::string_view bytes) {
  const size_t before = window_.size();
  window_ += bytes;
  const size_t found = window_.find(answer_);
  if (found != std::string::npos) {
    const size_t take = found + answer_.size() - before;
    window_.clear();
    return Step{take, true};
  }
  if (window_.size() >= answer_.size()) window_.erase(0, window_.size() - answer_.size() + 1);
  dropped_ += bytes.size();
  if (dropped_ > kMaxStaleBytes) {
    return Error(Code::kUnavailable, "vm.port",
                 fmt::format("{} bytes came from the guest without an answer", dropped_));
  }
  return Step{bytes.size(), false};
}

}  // namespace dsec::vmm
