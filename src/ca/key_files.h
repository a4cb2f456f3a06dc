// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/result.h"
#include "ca/authority.h"
#include "rpc/tls.h"

namespace dsec::ca {

// Replaces or makes a file of mode 0600: after a crash at any moment it has the old or the new
// content, and it is on disk when this returns. Errors of os/file.h.
Result<void> WriteWhole(const std::string& path, const std::string& content);
// A file of secrets: kFailedPrecondition "ca.file_mode" when others may read it. kNotFound
// "os.open".
Result<std::string> ReadSecret(const std::string& path);

// What a daemon proves its name with, in a folder of its own: identity.pem (key, certificate, its
// CA: one file, so that they fit together always) and trusted.pem.
struct Identity {
  KeyAndCertificate own;
  std::string trusted;
  CertificateView view;

  rpc::TlsOptions Options() const { return {own.certificate, own.key, trusted, view.name.cluster}; }
};
// Makes the folder (0700) when it is missing.
Result<void> SaveIdentity(const std::string& folder, const Identity& identity);
// kNotFound "os.open": there is none. kInvalidArgument "ca.material": damaged.
Result<Identity> LoadIdentity(const std::string& folder);

// The files of the CA, on the machines of apiservers: ca.key, ca.pem, and trusted.pem with all CAs
// that are trusted.
inline constexpr std::string_view kAuthorityKeyFile = "ca.key";
inline constexpr std::string_view kAuthorityFile = "ca.pem";
inline constexpr std::string_view kTrustedFile = "trusted.pem";
// Makes a CA in `folder`. kAlreadyExists "ca.exists" when it has one, unless `replace`: then the
// old one stays trusted.
Result<void> InitAuthority(const std::string& folder, const std::string& cluster, bool replace,
                           const Clock& clock);
struct AuthorityFiles {
  KeyAndCertificate authority;
  std::string trusted;
};
Result<AuthorityFiles> LoadAuthority(const std::string& folder);

}  // namespace dsec::ca
