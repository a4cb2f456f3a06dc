// SPDX-License-Identifier: Apache-2.0
#include "apiserver/auth.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/rng.h"

namespace dsec::apiserver {
namespace {

constexpr size_t kMinKeyLength = 16;
constexpr size_t kMaxKeyLength = 512;

Error KeyFileError(int number, std::string_view call, const std::string& path) {
  return Error::FromErrno(number, "auth.key_file", fmt::format("{} {}", call, path));
}

// The file's content, or an empty string when there is no file.
Result<std::string> ReadKey(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) {
    if (errno == ENOENT) return std::string();
    return KeyFileError(errno, "open", path);
  }
  struct stat info{};
  std::string text(kMaxKeyLength, '\0');
  const ssize_t count = ::fstat(fd, &info) == 0 ? ::read(fd, text.data(), text.size()) : -1;
  const int number = errno;
  ::close(fd);
  if (count < 0) return KeyFileError(number, "read", path);
  if ((info.st_mode & 077) != 0) {
    return Error(Code::kFailedPrecondition, "auth.key_file",
                 fmt::format("{} has mode {:04o}; only its owner may read it (0600)", path,
                             info.st_mode & 07777));
  }
  text.resize(static_cast<size_t>(count));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' '))
    text.pop_back();
  if (text.size() < kMinKeyLength) {
    return Error(Code::kFailedPrecondition, "auth.key_file",
                 fmt::format("{} holds no key of at least {} characters", path, kMinKeyLength));
  }
  return text;
}

}  // namespace

ApiKeys::Digest ApiKeys::Hash(std::string_view key) {
  Digest digest{};
  SHA256(reinterpret_cast<const uint8_t*>(key.data()), key.size(), digest.data());
  return digest;
}

void ApiKeys::Add(std::string_view key, Principal principal) {
  keys_.emplace_back(Hash(key), std::move(principal));
}

Result<const Principal*> ApiKeys::Authenticate(const http::Fields& fields) const {
  constexpr std::string_view kBearer = "Bearer ";
  auto key = fields.Find("X-API-Key");
  if (const auto authorization = fields.Find("Authorization"); authorization && !key) {
    if (!http::EqualsIgnoreCase(authorization->substr(0, kBearer.size()), kBearer)) {
      return Error(Code::kUnauthenticated, "auth.invalid", "Authorization must be Bearer <key>");
    }
    key = authorization->substr(kBearer.size());
  }
  if (!key || key->empty()) {
    return Error(Code::kUnauthenticated, "auth.missing",
                 "an API key is required: Authorization: Bearer <key>");
  }
  const Digest digest = Hash(*key);
  const Principal* found = nullptr;
  for (const auto& [known, principal] : keys_) {
    if (CRYPTO_memcmp(known.data(), digest.data(), digest.size()) == 0) found = &principal;
  }
  if (found == nullptr)
    return Error(Code::kUnauthenticated, "auth.invalid", "the API key is not known");
  return found;
}

Result<std::string> LoadOrCreateApiKey(const std::string& path) {
  DSEC_TRY(std::string key, ReadKey(path));
  if (!key.empty()) return key;
  uint8_t random[32];
  SecureRandom(random);
  for (const uint8_t byte : random) key += fmt::format("{:02x}", byte);
  const std::string line = key + "\n";
  const std::string temporary = fmt::format("{}.{}", path, ::getpid());
  const int fd =
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return KeyFileError(errno, "open", temporary);
  const bool written = ::fchmod(fd, 0600) == 0 &&
                       ::write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  int number = errno;
  ::close(fd);
  // A link does not replace a key that another process made meanwhile.
  if (written && ::link(temporary.c_str(), path.c_str()) == 0) {
    ::unlink(temporary.c_str());
    return key;
  }
  if (written) number = errno;
  ::unlink(temporary.c_str());
  if (written && number == EEXIST) return ReadKey(path);
  return KeyFileError(number, "write", path);
}

}  // namespace dsec::apiserver
