// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "rpc/tls.h"

// What the parts of this folder share of OpenSSL.
namespace dsec::ca::internal {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

// `what`, with the error that OpenSSL has left on this thread; its queue is empty afterwards.
std::string WithOpenSslError(std::string_view what);

Bio BioOf(std::string_view bytes);
std::string TextOf(BIO* bio);

Result<Key> NewKey();
Result<std::string> KeyPem(EVP_PKEY* key);
// Null when it is none or has a passphrase.
Key ReadKey(std::string_view pem);
// Null when there is none.
Certificate ReadCertificate(BIO* bio);
Result<std::string> CertificatePem(X509* certificate);
std::string FingerprintOf(const X509* certificate);
std::string KeyFingerprintOf(EVP_PKEY* key);
std::string Sha256Hex(std::string_view bytes);

// The one name among subject alternative names, which must be all that there is.
Result<rpc::TlsName> NameIn(const GENERAL_NAMES* names);

}  // namespace dsec::ca::internal
