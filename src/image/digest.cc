// SPDX-License-Identifier: Apache-2.0
#include "image/digest.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "base/check.h"
#include "os/file.h"

namespace dsec::image {

// Failure of the three EVP calls means that the library has no SHA-256 or no memory: nothing to go
// on with.
Sha256::Sha256() : context_(::EVP_MD_CTX_new()) {
  DSEC_CHECK(context_ != nullptr);
  DSEC_CHECK(::EVP_DigestInit_ex(context_, ::EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() { ::EVP_MD_CTX_free(context_); }

void Sha256::Update(std::span<const uint8_t> data) {
  DSEC_CHECK(::EVP_DigestUpdate(context_, data.data(), data.size()) == 1);
}

std::string Sha256::Finish() {
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  DSEC_CHECK(::EVP_DigestFinal_ex(context_, digest.data(), &size) == 1 && size == 32);
  std::string hex;
  for (unsigned i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

Digest Sha256::Next() {
  Digest digest;
  unsigned size = 0;
  DSEC_CHECK(::EVP_DigestFinal_ex(context_, digest.data(), &size) == 1 && size == digest.size());
  DSEC_CHECK(::EVP_DigestInit_ex(context_, nullptr, nullptr) == 1);
  return digest;
}

Digest Sha256Of(std::span<const uint8_t> data) {
  Sha256 sha;
  sha.Update(data);
  return sha.Next();
}

std::string Sha256Hex(std::string_view data) {
  Sha256 sha;
  sha.Update({reinterpret_cast<const uint8_t*>(data.data()), data.size()});
  return sha.Finish();
}

bool IsSha256Hex(std::string_view text) {
  return text.size() == 64 && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

Result<std::string> Sha256File(int fd, const std::function<bool(uint64_t)>& proceed) {
  Sha256 sha;
  std::vector<uint8_t> buffer(1 << 20);
  uint64_t offset = 0;
  while (true) {
    const ssize_t n = ::pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os::ErrnoError("layer.io", "read a file to hash it");
    if (n == 0) return sha.Finish();
    sha.Update({buffer.data(), static_cast<size_t>(n)});
    offset += static_cast<uint64_t>(n);
    if (proceed && !proceed(offset)) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while hashing");
    }
  }
}

}  // namespace dsec::image
