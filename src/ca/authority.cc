// SPDX-License-Identifier: Apache-2.0
#include "ca/authority.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <vector>

#include "ca/openssl.h"

namespace dsec::ca {
namespace {

using internal::Bio;
using internal::Certificate;
using internal::Key;
using internal::WithOpenSslError;

constexpr std::string_view kAuthorityRole = "ca";
constexpr size_t kMaxBundle = size_t{64} << 10;
constexpr size_t kMaxBundleEntries = 16;
constexpr long kVersion3 = 2;

Error OpenSslFailed(std::string_view what) {
  return Error(Code::kInternal, "ca.openssl", WithOpenSslError(what));
}

Error BadMaterial(std::string_view field, std::string_view rule) {
  return Error(Code::kInvalidArgument, "ca.material",
               fmt::format("{}: {}", field, WithOpenSslError(rule)))
      .WithField(std::string(field));
}

Error BadRequest(std::string_view rule) {
  return Error(Code::kInvalidArgument, "ca.request",
               fmt::format("the signing request: {}", WithOpenSslError(rule)));
}

bool AddExtension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  const std::unique_ptr<X509_EXTENSION, decltype(&X509_EXTENSION_free)> extension(
      X509V3_EXT_conf_nid(nullptr, &context, nid, value), &X509_EXTENSION_free);
  return extension && X509_add_ext(certificate, extension.get(), -1) == 1;
}

// The parts of a certificate that all have.
Result<Certificate> Blank(std::string_view common_name, uint64_t serial, EVP_PKEY* key,
                          int64_t begins, int64_t ends) {
  Certificate out(X509_new(), &X509_free);
  X509_NAME* const subject = out ? X509_get_subject_name(out.get()) : nullptr;
  if (subject == nullptr || X509_set_version(out.get(), kVersion3) != 1 ||
      ASN1_INTEGER_set_uint64(X509_get_serialNumber(out.get()), serial) != 1 ||
      ASN1_TIME_set(X509_getm_notBefore(out.get()), begins) == nullptr ||
      ASN1_TIME_set(X509_getm_notAfter(out.get()), ends) == nullptr ||
      X509_set_pubkey(out.get(), key) != 1 ||
      X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(common_name.data()),
                                 static_cast<int>(common_name.size()), -1, 0) != 1) {
    return OpenSslFailed("cannot fill a certificate");
  }
  return out;
}

Result<int64_t> UnixSeconds(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return BadMaterial("certificate", "has no valid times");
  return static_cast<int64_t>(timegm(&parts));
}

int64_t Seconds(WallTime now) { return UnixMillis(now) / 1000; }

Result<rpc::TlsName> NameOf(const X509* certificate) {
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)),
      &GENERAL_NAMES_free);
  return internal::NameIn(names.get());
}

const EVP_MD* DigestFor(EVP_PKEY* key) {
  return EVP_PKEY_get_id(key) == EVP_PKEY_ED25519 ? nullptr : EVP_sha256();
}

bool IsKeyThatWeTake(EVP_PKEY* key) {
  if (EVP_PKEY_get_id(key) == EVP_PKEY_ED25519) return true;
  char group[32] = {};
  size_t size = 0;
  return EVP_PKEY_get_id(key) == EVP_PKEY_EC &&
         EVP_PKEY_get_group_name(key, group, sizeof group, &size) == 1 &&
         std::string_view(group, size) == "prime256v1";
}

}  // namespace

Result<KeyAndCertificate> MakeAuthority(std::string_view cluster, WallTime now) {
  ERR_clear_error();
  const rpc::TlsName name{std::string(cluster), std::string(kAuthorityRole), "1"};
  if (!rpc::ParseTlsName(name.Uri()).ok()) {
    return Error(Code::kInvalidArgument, "ca.name", "the name of a cluster is 1 to 64 of [a-z0-9-]")
        .WithField("cluster");
  }
  DSEC_TRY(const Key key, internal::NewKey());
  const int64_t begins = Seconds(now - kClockSlack);
  DSEC_TRY(const Certificate certificate,
           Blank(fmt::format("DSec CA of {}", cluster).substr(0, 64), 1, key.get(), begins,
                 begins + std::chrono::seconds(kAuthorityLife).count()));
  X509* const x509 = certificate.get();
  if (X509_set_issuer_name(x509, X509_get_subject_name(x509)) != 1 ||
      !AddExtension(x509, x509, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") ||
      !AddExtension(x509, x509, NID_key_usage, "critical,keyCertSign,cRLSign") ||
      !AddExtension(x509, x509, NID_subject_key_identifier, "hash") ||
      !AddExtension(x509, x509, NID_subject_alt_name, ("URI:" + name.Uri()).c_str()) ||
      X509_sign(x509, key.get(), EVP_sha256()) <= 0) {
    return OpenSslFailed("cannot sign the CA's certificate");
  }
  KeyAndCertificate out;
  DSEC_TRY(out.key, internal::KeyPem(key.get()));
  DSEC_TRY(out.certificate, internal::CertificatePem(x509));
  return out;
}

Result<KeyAndRequest> MakeRequest(const rpc::TlsName& name) {
  ERR_clear_error();
  DSEC_TRY(const Key key, internal::NewKey());
  DSEC_TRY(const std::string pem, internal::KeyPem(key.get()));
  return MakeRequest(name, pem);
}

Result<KeyAndRequest> MakeRequest(const rpc::TlsName& name, const std::string& pem) {
  ERR_clear_error();
  DSEC_TRY_VOID(rpc::ParseTlsName(name.Uri()));
  const Key key = internal::ReadKey(pem);
  if (!key) {
    return Error(Code::kInvalidArgument, "ca.material",
                 internal::WithOpenSslError("the key of a signing request cannot be used"));
  }
  const std::unique_ptr<X509_REQ, decltype(&X509_REQ_free)> request(X509_REQ_new(), &X509_REQ_free);
  const std::unique_ptr<STACK_OF(X509_EXTENSION), void (*)(STACK_OF(X509_EXTENSION)*)> extensions(
      sk_X509_EXTENSION_new_null(), [](STACK_OF(X509_EXTENSION) * stack) {
        sk_X509_EXTENSION_pop_free(stack, X509_EXTENSION_free);
      });
  X509_EXTENSION* const uri =
      X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, ("URI:" + name.Uri()).c_str());
  if (!request || !extensions || uri == nullptr ||
      sk_X509_EXTENSION_push(extensions.get(), uri) <= 0 ||
      X509_REQ_set_version(request.get(), 0) != 1 ||
      X509_REQ_set_pubkey(request.get(), key.get()) != 1 ||
      X509_REQ_add_extensions(request.get(), extensions.get()) != 1 ||
      X509_REQ_sign(request.get(), key.get(), EVP_sha256()) <= 0) {
    return OpenSslFailed("cannot make a signing request");
  }
  unsigned char* der = nullptr;
  const int size = i2d_X509_REQ(request.get(), &der);
  if (size <= 0) return OpenSslFailed("cannot write a signing request");
  KeyAndRequest out;
  out.request.assign(reinterpret_cast<char*>(der), static_cast<size_t>(size));
  OPENSSL_free(der);
  out.key = pem;
  return out;
}

Result<SigningRequest> ParseRequest(std::string_view der) {
  ERR_clear_error();
  if (der.empty() || der.size() > kMaxRequestBytes) {
    return BadRequest(fmt::format("must have 1 to {} bytes", kMaxRequestBytes));
  }
  const auto* at = reinterpret_cast<const unsigned char*>(der.data());
  const auto* const end = at + der.size();
  const std::unique_ptr<X509_REQ, decltype(&X509_REQ_free)> request(
      d2i_X509_REQ(nullptr, &at, static_cast<long>(der.size())), &X509_REQ_free);
  if (!request || at != end) return BadRequest("is not PKCS #10 in DER");
  Key key(X509_REQ_get_pubkey(request.get()), &EVP_PKEY_free);
  if (!key || !IsKeyThatWeTake(key.get())) return BadRequest("its key must be P-256 or Ed25519");
  if (X509_REQ_verify(request.get(), key.get()) != 1) {
    return BadRequest("is not signed with its own key");
  }
  const std::unique_ptr<STACK_OF(X509_EXTENSION), void (*)(STACK_OF(X509_EXTENSION)*)> extensions(
      X509_REQ_get_extensions(request.get()), [](STACK_OF(X509_EXTENSION) * stack) {
        sk_X509_EXTENSION_pop_free(stack, X509_EXTENSION_free);
      });
  if (!extensions) return BadRequest("asks for no name");
  int critical = 0;
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(
      static_cast<GENERAL_NAMES*>(
          X509V3_get_d2i(extensions.get(), NID_subject_alt_name, &critical, nullptr)),
      &GENERAL_NAMES_free);
  auto name = internal::NameIn(names.get());
  if (!name.ok()) return BadRequest(name.error().message());
  SigningRequest out;
  out.name = std::move(*name);
  out.key_sha256 = internal::KeyFingerprintOf(key.get());
  out.key = std::shared_ptr<EVP_PKEY>(key.release(), &EVP_PKEY_free);
  return out;
}

Result<std::shared_ptr<const Authority>> Authority::Load(const KeyAndCertificate& material) {
  ERR_clear_error();
  if (material.certificate.size() > kMaxBundle || material.key.size() > kMaxBundle) {
    return BadMaterial("certificate", "too large");
  }
  const Bio bio = internal::BioOf(material.certificate);
  Certificate certificate = internal::ReadCertificate(bio.get());
  if (!certificate || X509_check_ca(certificate.get()) != 1) {
    return BadMaterial("certificate", "must be that of a CA, in PEM");
  }
  auto name = NameOf(certificate.get());
  if (!name.ok() || name->role != kAuthorityRole) {
    return BadMaterial("certificate", "must name its cluster: dsec://<cluster>/ca/<id>");
  }
  Key key = internal::ReadKey(material.key);
  if (!key) return BadMaterial("key", "must be a private key in PEM without passphrase");
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return BadMaterial("key", "is not that of the certificate");
  }
  std::shared_ptr<Authority> out(new Authority());
  out->cluster_ = std::move(name->cluster);
  out->fingerprint_ = internal::FingerprintOf(certificate.get());
  DSEC_TRY(out->certificate_, internal::CertificatePem(certificate.get()));
  out->key_ = std::shared_ptr<EVP_PKEY>(key.release(), &EVP_PKEY_free);
  out->x509_ = std::shared_ptr<X509>(certificate.release(), &X509_free);
  return std::shared_ptr<const Authority>(std::move(out));
}

Result<Issued> Authority::Issue(const SigningRequest& request, uint64_t serial, WallTime now,
                                std::chrono::seconds life) const {
  ERR_clear_error();
  if (request.name.cluster != cluster_ || request.name.role == kAuthorityRole) {
    return Error(Code::kPermissionDenied, "ca.name",
                 fmt::format("{} is no name for a daemon of {}", request.name.Uri(), cluster_));
  }
  DSEC_TRY(const int64_t authority_ends, UnixSeconds(X509_get0_notAfter(x509_.get())));
  const int64_t begins = Seconds(now - kClockSlack);
  const int64_t ends = std::min(Seconds(now) + life.count(), authority_ends);
  if (ends <= Seconds(now)) {
    return Error(Code::kFailedPrecondition, "ca.ended", "the CA's own certificate has ended");
  }
  DSEC_TRY(const Certificate certificate,
           Blank(fmt::format("{} {}", request.name.role, request.name.id).substr(0, 64), serial,
                 request.key.get(), begins, ends));
  X509* const x509 = certificate.get();
  if (X509_set_issuer_name(x509, X509_get_subject_name(x509_.get())) != 1 ||
      !AddExtension(x509, x509_.get(), NID_basic_constraints, "critical,CA:FALSE") ||
      !AddExtension(x509, x509_.get(), NID_key_usage, "critical,digitalSignature") ||
      !AddExtension(x509, x509_.get(), NID_ext_key_usage, "serverAuth,clientAuth") ||
      !AddExtension(x509, x509_.get(), NID_subject_key_identifier, "hash") ||
      !AddExtension(x509, x509_.get(), NID_authority_key_identifier, "keyid") ||
      !AddExtension(x509, x509_.get(), NID_subject_alt_name,
                    ("URI:" + request.name.Uri()).c_str()) ||
      X509_sign(x509, key_.get(), DigestFor(key_.get())) <= 0) {
    return OpenSslFailed("cannot sign a certificate");
  }
  Issued out;
  DSEC_TRY(out.certificate, internal::CertificatePem(x509));
  out.certificate += certificate_;
  out.sha256 = internal::FingerprintOf(x509);
  out.ends_unix_ms = ends * 1000;
  return out;
}

Result<CertificateView> LookAt(const std::string& pem) {
  ERR_clear_error();
  if (pem.size() > kMaxBundle) return BadMaterial("certificate", "too large");
  const Bio bio = internal::BioOf(pem);
  const Certificate certificate = internal::ReadCertificate(bio.get());
  if (!certificate) return BadMaterial("certificate", "must be a certificate in PEM");
  CertificateView out;
  auto name = NameOf(certificate.get());
  if (!name.ok()) return BadMaterial("certificate", name.error().message());
  out.name = std::move(*name);
  out.sha256 = internal::FingerprintOf(certificate.get());
  DSEC_TRY(const int64_t begins, UnixSeconds(X509_get0_notBefore(certificate.get())));
  DSEC_TRY(const int64_t ends, UnixSeconds(X509_get0_notAfter(certificate.get())));
  out.begins_unix_ms = begins * 1000;
  out.ends_unix_ms = ends * 1000;
  return out;
}

Result<std::string> JoinBundles(const std::string& first, const std::string& second) {
  std::string out;
  std::vector<std::string> seen;
  for (const std::string* text : {&first, &second}) {
    if (text->size() > kMaxBundle) return BadMaterial("trusted", "too large");
    const Bio bio = internal::BioOf(*text);
    while (const Certificate one = internal::ReadCertificate(bio.get())) {
      const std::string print = internal::FingerprintOf(one.get());
      if (std::find(seen.begin(), seen.end(), print) != seen.end()) continue;
      seen.push_back(print);
      DSEC_TRY(const std::string pem, internal::CertificatePem(one.get()));
      out += pem;
    }
  }
  if (seen.empty() || seen.size() > kMaxBundleEntries || out.size() > kMaxBundle) {
    return BadMaterial("trusted", fmt::format("must have 1 to {} CAs of at most {} bytes",
                                              kMaxBundleEntries, kMaxBundle));
  }
  return out;
}

}  // namespace dsec::ca
