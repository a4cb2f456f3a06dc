// SPDX-License-Identifier: Apache-2.0
#include "ca/openssl.h"

#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/pem.h>

#include <array>

namespace dsec::ca::internal {
namespace {

std::string Hex(const unsigned char* bytes, size_t size) {
  return fmt::format("{:02x}", fmt::join(bytes, bytes + size, ""));
}

}  // namespace

std::string WithOpenSslError(std::string_view what) {
  std::string text(what);
  if (const unsigned long code = ERR_peek_last_error(); code != 0) {
    const char* reason = ERR_reason_error_string(code);
    text += fmt::format(" ({})", reason != nullptr ? reason : fmt::format("{:#x}", code));
  }
  ERR_clear_error();
  return text;
}

Bio BioOf(std::string_view bytes) {
  return {BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())), &BIO_free};
}

std::string TextOf(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<size_t>(size)};
}

Result<Key> NewKey() {
  Key key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  if (!key) return Error(Code::kInternal, "ca.openssl", WithOpenSslError("cannot make a key"));
  return key;
}

Result<std::string> KeyPem(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_mem()), &BIO_free);
  if (!bio ||
      PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return Error(Code::kInternal, "ca.openssl", WithOpenSslError("cannot write a key"));
  }
  return TextOf(bio.get());
}

Key ReadKey(std::string_view pem) {
  const Bio bio = BioOf(pem);
  // Keeps OpenSSL from asking a terminal.
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  return {PEM_read_bio_PrivateKey(bio.get(), nullptr, no_passphrase, nullptr), &EVP_PKEY_free};
}

Certificate ReadCertificate(BIO* bio) {
  Certificate out(PEM_read_bio_X509(bio, nullptr, nullptr, nullptr), &X509_free);
  ERR_clear_error();
  return out;
}

Result<std::string> CertificatePem(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()), &BIO_free);
  if (!bio || PEM_write_bio_X509(bio.get(), certificate) != 1) {
    return Error(Code::kInternal, "ca.openssl", WithOpenSslError("cannot write a certificate"));
  }
  return TextOf(bio.get());
}

std::string Sha256Hex(std::string_view bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    return {};
  }
  return Hex(digest.data(), size);
}

std::string FingerprintOf(const X509* certificate) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  if (X509_digest(certificate, EVP_sha256(), digest.data(), &size) != 1) return {};
  return Hex(digest.data(), size);
}

std::string KeyFingerprintOf(EVP_PKEY* key) {
  unsigned char* der = nullptr;
  const int size = i2d_PUBKEY(key, &der);
  if (size <= 0) return {};
  std::string out = Sha256Hex({reinterpret_cast<char*>(der), static_cast<size_t>(size)});
  OPENSSL_free(der);
  return out;
}

Result<rpc::TlsName> NameIn(const GENERAL_NAMES* names) {
  if (names == nullptr || sk_GENERAL_NAME_num(names) != 1) {
    return Error(Code::kInvalidArgument, "ca.request", "one subject alternative name is needed");
  }
  const GENERAL_NAME* name = sk_GENERAL_NAME_value(names, 0);
  if (name->type != GEN_URI) {
    return Error(Code::kInvalidArgument, "ca.request",
                 "the subject alternative name must be a URI");
  }
  const ASN1_IA5STRING* text = name->d.uniformResourceIdentifier;
  return rpc::ParseTlsName({reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                            static_cast<size_t>(ASN1_STRING_length(text))});
}

}  // namespace dsec::ca::internal
