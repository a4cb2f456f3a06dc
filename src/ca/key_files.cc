// SPDX-License-Identifier: Apache-2.0
#include "ca/key_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "ca/openssl.h"
#include "os/file.h"

namespace dsec::ca {
namespace {

constexpr size_t kMaxFile = size_t{256} << 10;

Result<void> MakeFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return Error(Code::kInternal, "ca.folder", fmt::format("{}: {}", folder, error.message()));
  }
  if (chmod(folder.c_str(), 0700) != 0) return os::ErrnoError("ca.folder", folder);
  return Ok();
}

std::string In(const std::string& folder, std::string_view name) {
  return folder + "/" + std::string(name);
}

}  // namespace

Result<void> WriteWhole(const std::string& path, const std::string& content) {
  const std::string partial = path + ".new";
  if (unlink(partial.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("os.unlink", partial);
  DSEC_TRY(const os::UniqueFd file,
           os::OpenAt(AT_FDCWD, partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  DSEC_TRY_VOID(os::WriteAll(file.get(), content));
  if (fsync(file.get()) != 0) return os::ErrnoError("os.write", partial);
  if (rename(partial.c_str(), path.c_str()) != 0) return os::ErrnoError("os.rename", path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  DSEC_TRY(const os::UniqueFd directory,
           os::OpenAt(AT_FDCWD, folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY));
  if (fsync(directory.get()) != 0) return os::ErrnoError("os.write", folder);
  return Ok();
}

Result<std::string> ReadSecret(const std::string& path) {
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW));
  struct stat info{};
  if (fstat(file.get(), &info) != 0) return os::ErrnoError("os.stat", path);
  if ((info.st_mode & 0077) != 0) {
    return Error(Code::kFailedPrecondition, "ca.file_mode",
                 fmt::format("{} can be read by others (mode {:o}); it must be 0600", path,
                             info.st_mode & 07777));
  }
  return os::ReadAll(file.get(), kMaxFile);
}

Result<void> SaveIdentity(const std::string& folder, const Identity& identity) {
  DSEC_TRY_VOID(MakeFolder(folder));
  // First: with an old certificate a longer list of CAs is right as well.
  DSEC_TRY_VOID(WriteWhole(In(folder, kTrustedFile), identity.trusted));
  return WriteWhole(In(folder, "identity.pem"), identity.own.key + identity.own.certificate);
}

Result<Identity> LoadIdentity(const std::string& folder) {
  Identity out;
  DSEC_TRY(const std::string both, ReadSecret(In(folder, "identity.pem")));
  DSEC_TRY(out.trusted, ReadSecret(In(folder, kTrustedFile)));
  const internal::Key key = internal::ReadKey(both);
  const size_t chain = both.find("-----BEGIN CERTIFICATE-----");
  if (!key || chain == std::string::npos) {
    return Error(Code::kInvalidArgument, "ca.material",
                 internal::WithOpenSslError(fmt::format("{}/identity.pem is damaged", folder)));
  }
  out.own.key = both.substr(0, chain);
  out.own.certificate = both.substr(chain);
  DSEC_TRY(out.view, LookAt(out.own.certificate));
  return out;
}

Result<void> InitAuthority(const std::string& folder, const std::string& cluster, bool replace,
                           const Clock& clock) {
  DSEC_TRY_VOID(MakeFolder(folder));
  std::error_code error;
  const bool exists = std::filesystem::exists(In(folder, kAuthorityKeyFile), error);
  std::string trusted;
  if (exists && !replace) {
    return Error(Code::kAlreadyExists, "ca.exists", fmt::format("{} has a CA already", folder));
  }
  if (exists) {
    DSEC_TRY(AuthorityFiles old, LoadAuthority(folder));
    DSEC_TRY(const CertificateView view, LookAt(old.authority.certificate));
    if (view.name.cluster != cluster) {
      return Error(Code::kConflict, "ca.name",
                   fmt::format("{} is the CA of {}", folder, view.name.cluster))
          .WithField("cluster");
    }
    trusted = std::move(old.trusted);
  }
  DSEC_TRY(const KeyAndCertificate made, MakeAuthority(cluster, clock.Wall()));
  DSEC_TRY(trusted, JoinBundles(made.certificate, trusted));
  // What is trusted first, so that nobody meets a certificate of a CA that it does not know. Key
  // and certificate are two files: a crash between them leaves a pair that Load refuses, and the
  // same command with `replace` mends it.
  DSEC_TRY_VOID(WriteWhole(In(folder, kTrustedFile), trusted));
  DSEC_TRY_VOID(WriteWhole(In(folder, kAuthorityFile), made.certificate));
  return WriteWhole(In(folder, kAuthorityKeyFile), made.key);
}

Result<AuthorityFiles> LoadAuthority(const std::string& folder) {
  AuthorityFiles out;
  DSEC_TRY(out.authority.key, ReadSecret(In(folder, kAuthorityKeyFile)));
  DSEC_TRY(out.authority.certificate, ReadSecret(In(folder, kAuthorityFile)));
  DSEC_TRY(out.trusted, ReadSecret(In(folder, kTrustedFile)));
  return out;
}

}  // namespace dsec::ca
