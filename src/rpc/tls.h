// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

struct ssl_ctx_st;

// TLS 1.3 and nothing before it, both sides with a certificate: no renegotiation (1.3 has none), no
// session tickets, no early data. A daemon's name is the one URI in its certificate; names of hosts
// mean nothing. This header has no I/O and no types of OpenSSL; tls_session.h is what sockets use.
namespace dsec::rpc {

// dsec://<cluster>/<role>/<id>
struct TlsName {
  std::string cluster;
  std::string role;
  std::string id;

  std::string Uri() const;
  auto operator<=>(const TlsName&) const = default;
};
// Each part is 1 to 64 of [a-z0-9-]. kInvalidArgument "rpc.tls_name".
Result<TlsName> ParseTlsName(std::string_view uri);

struct TlsOptions {
  // PEM: the own certificate, then what is sent along with it (its CA, so that one who knows only
  // the CA's fingerprint can check). Empty: a client that has none yet.
  std::string certificate{};
  std::string key{};      // PEM; of `certificate`
  std::string trusted{};  // PEM: the CAs, one or several. Empty: only with TlsExpect::pin
  std::string cluster{};  // peers must be of it. Empty: only with TlsExpect::pin
};

// Certificates and keys as OpenSSL takes them. Immutable, so any thread.
class TlsContext {
 public:
  // kInvalidArgument "rpc.tls_material" with the field (certificate, key, trusted).
  static Result<std::shared_ptr<const TlsContext>> Create(const TlsOptions& options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  ssl_ctx_st* raw() const { return context_; }
  const std::string& cluster() const { return cluster_; }

 private:
  TlsContext(ssl_ctx_st* context, std::string cluster)
      : context_(context), cluster_(std::move(cluster)) {}

  ssl_ctx_st* const context_;
  const std::string cluster_;
};

// The context that handshakes use from now on. Connections keep the one that they were made with.
// Any thread.
class TlsHolder {
 public:
  explicit TlsHolder(std::shared_ptr<const TlsContext> context) : context_(std::move(context)) {}
  std::shared_ptr<const TlsContext> Get() const {
    const std::lock_guard lock(mutex_);
    return context_;
  }
  void Replace(std::shared_ptr<const TlsContext> context) {
    const std::lock_guard lock(mutex_);
    context_.swap(context);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const TlsContext> context_;
};

// Who may be at the other end.
struct TlsExpect {
  std::vector<std::string> roles{};  // one of these
  std::string id{};                  // empty: any
  bool anonymous = false;            // of a server: a client may come without a certificate
  // SHA-256 (hex) of the certificate of a CA. When set, that CA is trusted, which the peer must
  // send along, and no other; the cluster may be any.
  std::string pin{};
};

// Who is there.
struct TlsPeer {
  TlsName name;
  std::string certificate_sha256;  // of the DER, 64 hex digits
  // Of the certificate. A connection ends when it does, on either side.
  int64_t begins_unix_ms = 0;
  int64_t ends_unix_ms = 0;
};

}  // namespace dsec::rpc
