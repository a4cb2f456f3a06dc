// SPDX-License-Identifier: Apache-2.0
#include "ca/join_token.h"

#include <algorithm>
#include <array>
#include <span>

#include "base/rng.h"
#include "ca/openssl.h"
#include "store/rules.h"

namespace dsec::ca {
namespace {

constexpr std::string_view kTokenPrefix = "dsecjoin1.";
constexpr size_t kSecretBytes = 32;
constexpr size_t kMaxToken = 512;

bool IsHex64(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Error NoToken(std::string_view why) {
  return Error(Code::kUnauthenticated, "join.token", fmt::format("the join token {}", why))
      .WithField("token");
}

}  // namespace

std::string WriteJoinToken(const JoinToken& token) {
  return fmt::format("{}{}.{}.{}", kTokenPrefix, token.cluster, token.ca_sha256, token.secret);
}

Result<JoinToken> ParseJoinToken(std::string_view text) {
  const Error bad = Error(Code::kInvalidArgument, "join.token",
                          "a join token is dsecjoin1.<cluster>.<64 hex digits>.<64 hex digits>")
                        .WithField("join_token");
  if (text.size() > kMaxToken || !text.starts_with(kTokenPrefix)) return bad;
  text.remove_prefix(kTokenPrefix.size());
  const size_t first = text.find('.');
  const size_t second = first == std::string_view::npos ? first : text.find('.', first + 1);
  if (second == std::string_view::npos) return bad;
  JoinToken out{std::string(text.substr(0, first)),
                std::string(text.substr(first + 1, second - first - 1)),
                std::string(text.substr(second + 1))};
  const rpc::TlsName name{out.cluster, "edge", "x"};
  if (!rpc::ParseTlsName(name.Uri()).ok() || !IsHex64(out.ca_sha256) || !IsHex64(out.secret)) {
    return bad;
  }
  return out;
}

std::string JoinKey(std::string_view secret) { return "join/" + internal::Sha256Hex(secret); }

runtime::Task<JoinToken> MakeJoinToken(store::Store& store, std::string cluster,
                                       std::string ca_sha256, v1::JoinTokenRecord record,
                                       const Clock& clock, runtime::Deadline deadline) {
  std::array<uint8_t, kSecretBytes> random{};
  SecureRandom(random);
  JoinToken token{std::move(cluster), std::move(ca_sha256),
                  fmt::format("{:02x}", fmt::join(random, ""))};
  record.set_ends_unix_ms(UnixMillis(clock.Wall() + kTokenLife));
  auto lease = co_await store.Grant(kTokenLife, deadline);
  if (!lease.ok()) co_return std::move(lease).error();
  auto put =
      co_await store.Put(JoinKey(token.secret), record.SerializeAsString(), 0, *lease, deadline);
  if (!put.ok()) co_return std::move(put).error();
  co_return token;
}

runtime::Task<TokenUse> UseJoinToken(store::Store& store, std::string secret,
                                     std::string key_sha256, std::string name, const Clock& clock,
                                     runtime::Deadline deadline) {
  if (!IsHex64(secret)) co_return NoToken("is none");
  const std::string key = JoinKey(secret);
  auto found = co_await store.Get(key, deadline);
  if (!found.ok()) co_return std::move(found).error();
  if (!found->has_value()) co_return NoToken("is unknown, was used, or its ten minutes are over");
  const store::Entry& entry = **found;
  TokenUse use;
  if (!use.record.ParseFromString(entry.value)) {
    co_return Error(Code::kInternal, "join.record_damaged",
                    "the record of a join token is damaged");
  }
  // Leases of a store that was restarted run longer.
  if (UnixMillis(clock.Wall()) >= use.record.ends_unix_ms()) {
    co_return NoToken("is older than ten minutes");
  }
  if (!use.record.used_by_key().empty() &&
      (use.record.used_by_key() != key_sha256 || use.record.used_by_name() != name)) {
    co_return NoToken(fmt::format("was used by {}", use.record.used_by_name()));
  }
  v1::JoinTokenRecord used = use.record;
  used.set_used_by_key(std::move(key_sha256));
  used.set_used_by_name(std::move(name));
  use.condition = {key, entry.version};
  use.write = {key, used.SerializeAsString(), entry.lease};
  co_return use;
}

runtime::Task<SerialUse> NewSerial(store::Store& store, v1::CertificateRecord record,
                                   const Clock& clock, runtime::Deadline deadline) {
  SerialUse use;
  while (use.serial == 0) {
    std::array<uint8_t, 8> random{};
    SecureRandom(random);
    for (const uint8_t byte : random) use.serial = use.serial << 8 | byte;
    use.serial &= INT64_MAX;  // positive in DER as well
  }
  const int64_t life = record.ends_unix_ms() - UnixMillis(clock.Wall());
  auto lease = co_await store.Grant(
      std::clamp(std::chrono::milliseconds(life), store::kMinTtl, store::kMaxTtl), deadline);
  if (!lease.ok()) co_return std::move(lease).error();
  const std::string key = fmt::format("ca/serial/{:016x}", use.serial);
  use.lease = *lease;
  use.condition = {key, 0};
  use.write = {key, record.SerializeAsString(), *lease};
  co_return use;
}

}  // namespace dsec::ca
