// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"
#include "rpc/tls.h"

struct evp_pkey_st;
struct x509_st;

// The certificate authority of one cluster: X.509 (RFC 5280) with ECDSA on P-256. The name of a
// daemon is a URI, rpc::TlsName; the CA's own has the role "ca".
namespace dsec::ca {

inline constexpr std::chrono::hours kCertificateLife{24};
inline constexpr std::chrono::hours kAuthorityLife{24 * 3650};
// Clocks of the daemons may differ by so much.
inline constexpr std::chrono::minutes kClockSlack{5};
// From the moment a further CA is trusted until it may sign: every certificate was renewed in it,
// and each renewal brings the list of CAs.
inline constexpr std::chrono::hours kTrustTime = kCertificateLife + std::chrono::hours{1};
inline constexpr size_t kMaxRequestBytes = size_t{8} << 10;

// A key and what goes with it.
struct KeyAndCertificate {
  std::string key;          // PEM (PKCS #8)
  std::string certificate;  // PEM
};
struct KeyAndRequest {
  std::string key;      // PEM (PKCS #8)
  std::string request;  // PKCS #10, DER
};

// A new CA. kInvalidArgument "ca.name" when `cluster` is not 1 to 64 of [a-z0-9-].
Result<KeyAndCertificate> MakeAuthority(std::string_view cluster, WallTime now);
// A new key, and the request for a certificate of that name.
Result<KeyAndRequest> MakeRequest(const rpc::TlsName& name);
// The same with a key that exists (PEM). kInvalidArgument "ca.material" when it is none.
Result<KeyAndRequest> MakeRequest(const rpc::TlsName& name, const std::string& key);

// A request of somebody who may be hostile: it parsed, is signed with the key that it brings (P-256
// or Ed25519), and asks for one name.
struct SigningRequest {
  rpc::TlsName name;
  std::string key_sha256;  // of the public key (SubjectPublicKeyInfo), 64 hex digits
  std::shared_ptr<evp_pkey_st> key;
};
// kInvalidArgument "ca.request" with the rule.
Result<SigningRequest> ParseRequest(std::string_view der);

struct Issued {
  std::string certificate;  // PEM: it, and the CA's
  std::string sha256;       // of the DER, 64 hex digits
  int64_t ends_unix_ms = 0;
};

// Signs. Immutable, so any thread.
class Authority {
 public:
  // From PEM. kInvalidArgument "ca.material" with the field: no key, no certificate of a CA that
  // names its cluster, or not of one another.
  static Result<std::shared_ptr<const Authority>> Load(const KeyAndCertificate& material);

  const std::string& cluster() const { return cluster_; }
  const std::string& fingerprint() const { return fingerprint_; }  // SHA-256 of the certificate
  // A certificate of the name that the request asks for: whether it may have it is for the caller
  // to know. kFailedPrecondition "ca.ended": the CA's own certificate has ended;
  // kPermissionDenied "ca.name": a name of another cluster or the CA's role. `serial` > 0.
  Result<Issued> Issue(const SigningRequest& request, uint64_t serial, WallTime now,
                       std::chrono::seconds life = kCertificateLife) const;

 private:
  Authority() = default;

  std::string cluster_;
  std::string fingerprint_;
  std::string certificate_;
  std::shared_ptr<evp_pkey_st> key_;
  std::shared_ptr<x509_st> x509_;
};

// What a PEM text says of its first certificate.
struct CertificateView {
  rpc::TlsName name;
  std::string sha256;
  int64_t begins_unix_ms = 0;
  int64_t ends_unix_ms = 0;
  // When to ask for the next one: at two thirds of its life.
  int64_t RenewUnixMs() const { return begins_unix_ms + (ends_unix_ms - begins_unix_ms) / 3 * 2; }
};
// kInvalidArgument "ca.material".
Result<CertificateView> LookAt(const std::string& pem);

// The certificates of both texts, each once: for the time in which two CAs are trusted. At most 16
// of at most 64 KiB together; kInvalidArgument "ca.material".
Result<std::string> JoinBundles(const std::string& first, const std::string& second);

}  // namespace dsec::ca
