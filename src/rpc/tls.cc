// SPDX-License-Identifier: Apache-2.0
#include "rpc/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>

#include "rpc/tls_session.h"

namespace dsec::rpc {
namespace {

constexpr size_t kMaxPem = size_t{256} << 10;
constexpr size_t kMaxNamePart = 64;
constexpr long kMaxCertificates = 16 << 10;  // bytes of a peer's chain
constexpr std::string_view kScheme = "dsec://";

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

Error BadMaterial(std::string_view field, std::string_view rule) {
  std::string detail;
  if (const unsigned long code = ERR_get_error(); code != 0) {
    std::array<char, 256> text{};
    ERR_error_string_n(code, text.data(), text.size());
    detail = fmt::format(" ({})", text.data());
  }
  ERR_clear_error();
  return Error(Code::kInvalidArgument, "rpc.tls_material",
               fmt::format("{}: {}{}", field, rule, detail))
      .WithField(std::string(field));
}

Bio BioOf(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free);
}

// All certificates of a PEM text.
Result<std::vector<Certificate>> ReadCertificates(const std::string& pem, std::string_view field) {
  if (pem.size() > kMaxPem) return BadMaterial(field, "too large");
  const Bio bio = BioOf(pem);
  std::vector<Certificate> out;
  for (;;) {
    Certificate one(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &X509_free);
    if (!one) break;
    out.push_back(std::move(one));
  }
  const unsigned long code = ERR_peek_last_error();
  const bool at_end =
      ERR_GET_LIB(code) == ERR_LIB_PEM && ERR_GET_REASON(code) == PEM_R_NO_START_LINE;
  if (!at_end || out.empty()) return BadMaterial(field, "must be certificates in PEM");
  ERR_clear_error();
  return out;
}

Result<void> UseOwn(SSL_CTX* context, const TlsOptions& options) {
  DSEC_TRY(const auto chain, ReadCertificates(options.certificate, "certificate"));
  if (SSL_CTX_use_certificate(context, chain.front().get()) != 1) {
    return BadMaterial("certificate", "cannot be used");
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context, chain[i].get()) != 1) {
      return BadMaterial("certificate", "its chain cannot be used");
    }
  }
  if (options.key.size() > kMaxPem) return BadMaterial("key", "too large");
  const Bio bio = BioOf(options.key);
  // The callback keeps OpenSSL from asking a terminal for a passphrase.
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_passphrase, nullptr),
                &EVP_PKEY_free);
  if (!key) return BadMaterial("key", "must be a private key in PEM without passphrase");
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 || SSL_CTX_check_private_key(context) != 1) {
    return BadMaterial("key", "is not that of the certificate");
  }
  return Ok();
}

Result<void> UseTrusted(SSL_CTX* context, const TlsOptions& options) {
  DSEC_TRY(const auto trusted, ReadCertificates(options.trusted, "trusted"));
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  for (const Certificate& one : trusted) {
    if (X509_STORE_add_cert(store, one.get()) != 1) return BadMaterial("trusted", "cannot be used");
  }
  return Ok();
}

bool IsNamePart(std::string_view text) {
  return !text.empty() && text.size() <= kMaxNamePart &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string_view::npos;
}

}  // namespace

std::string TlsName::Uri() const { return fmt::format("{}{}/{}/{}", kScheme, cluster, role, id); }

Result<TlsName> ParseTlsName(std::string_view uri) {
  const Error bad(Code::kInvalidArgument, "rpc.tls_name",
                  "a name is dsec://<cluster>/<role>/<id>, each part 1 to 64 of [a-z0-9-]");
  if (!uri.starts_with(kScheme)) return bad;
  uri.remove_prefix(kScheme.size());
  const size_t first = uri.find('/');
  if (first == std::string_view::npos) return bad;
  const size_t second = uri.find('/', first + 1);
  if (second == std::string_view::npos) return bad;
  TlsName name{std::string(uri.substr(0, first)),
               std::string(uri.substr(first + 1, second - first - 1)),
               std::string(uri.substr(second + 1))};
  if (!IsNamePart(name.cluster) || !IsNamePart(name.role) || !IsNamePart(name.id)) return bad;
  return name;
}

Result<std::shared_ptr<const TlsContext>> TlsContext::Create(const TlsOptions& options) {
  ERR_clear_error();
  Context context(SSL_CTX_new(TLS_method()), &SSL_CTX_free);
  if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1) {
    return BadMaterial("", "OpenSSL has no TLS 1.3");
  }
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_max_cert_list(context.get(), kMaxCertificates);
  SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                                      SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_cert_verify_callback(context.get(), internal::VerifyPeer, nullptr);
  if (!options.certificate.empty() || !options.key.empty()) {
    DSEC_TRY_VOID(UseOwn(context.get(), options));
  }
  if (!options.trusted.empty()) DSEC_TRY_VOID(UseTrusted(context.get(), options));
  return std::shared_ptr<const TlsContext>(new TlsContext(context.release(), options.cluster));
}

TlsContext::~TlsContext() { SSL_CTX_free(context_); }

}  // namespace dsec::rpc
