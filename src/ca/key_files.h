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

// The key of a first certificate that is still to come, in joining.pem of the same folder. On disk
// before it is used, so that a daemon that is killed before it has its answer asks again as the
// same one. Makes the key when there is none; the folder, too.
Result<KeyAndRequest> JoiningRequest(const std::string& folder, const rpc::TlsName& name);
// Once the identity is saved. None is no error.
Result<void> ForgetJoining(const std::string& folder);

// The files of the CA, on the machines of apiservers: ca.key, ca.pem, and trusted.pem with all CAs
// that are trusted.
inline constexpr std::string_view kAuthorityKeyFile = "ca.key";
inline constexpr std::string_view kAuthorityFile = "ca.pem";
inline constexpr std::string_view kTrustedFile = "trusted.pem";
// Makes a CA in `folder`. kAlreadyExists "ca.exists" when it has one.
Result<void> InitAuthority(const std::string& folder, const std::string& cluster,
                           const Clock& clock);

// A change of the CA is two steps with a day between them, for nobody may meet a certificate of a
// CA that it does not know yet:
//  - Add makes the next one (next.key, next.pem) and puts it among the trusted; the one there is
//    signs on. kAlreadyExists "ca.next" when there is a next one already.
//  - Switch lets the next one sign. The one before stays trusted. kFailedPrecondition "ca.next":
//    there is none; "ca.too_early": kTrustTime has not passed since Add.
// Killed in the middle, either is finished by the same command. Return the fingerprint of the next.
inline constexpr std::string_view kNextKeyFile = "next.key";
inline constexpr std::string_view kNextFile = "next.pem";
Result<std::string> AddAuthority(const std::string& folder, const Clock& clock);
Result<std::string> SwitchAuthority(const std::string& folder, const Clock& clock);
struct AuthorityFiles {
  KeyAndCertificate authority;
  std::string trusted;
};
Result<AuthorityFiles> LoadAuthority(const std::string& folder);

}  // namespace dsec::ca
