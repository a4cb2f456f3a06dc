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
constexpr std::string_view kJoiningFile = "joining.pem";

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

Result<KeyAndRequest> JoiningRequest(const std::string& folder, const rpc::TlsName& name) {
  DSEC_TRY_VOID(MakeFolder(folder));
  const std::string path = In(folder, kJoiningFile);
  auto key = ReadSecret(path);
  if (key.ok()) return MakeRequest(name, *key);
  if (key.error().sys_errno() != ENOENT) return std::move(key).error();
  DSEC_TRY(KeyAndRequest made, MakeRequest(name));
  DSEC_TRY_VOID(WriteWhole(path, made.key));
  return made;
}

Result<void> ForgetJoining(const std::string& folder) {
  const std::string path = In(folder, kJoiningFile);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("os.unlink", path);
  return Ok();
}

Result<void> InitAuthority(const std::string& folder, const std::string& cluster,
                           const Clock& clock) {
  DSEC_TRY_VOID(MakeFolder(folder));
  std::error_code error;
  if (std::filesystem::exists(In(folder, kAuthorityKeyFile), error)) {
    return Error(Code::kAlreadyExists, "ca.exists", fmt::format("{} has a CA already", folder));
  }
  DSEC_TRY(const KeyAndCertificate made, MakeAuthority(cluster, clock.Wall()));
  // The key last: without it there is none, and the same command begins again.
  DSEC_TRY_VOID(WriteWhole(In(folder, kTrustedFile), made.certificate));
  DSEC_TRY_VOID(WriteWhole(In(folder, kAuthorityFile), made.certificate));
  return WriteWhole(In(folder, kAuthorityKeyFile), made.key);
}

Result<std::string> AddAuthority(const std::string& folder, const Clock& clock) {
  DSEC_TRY(const AuthorityFiles now, LoadAuthority(folder));
  DSEC_TRY(const CertificateView view, LookAt(now.authority.certificate));
  auto next = ReadSecret(In(folder, kNextFile));
  if (!next.ok() && next.error().sys_errno() != ENOENT) return std::move(next).error();
  if (next.ok() && now.trusted.find(*next) != std::string::npos) {
    DSEC_TRY(const CertificateView added, LookAt(*next));
    return Error(Code::kAlreadyExists, "ca.next",
                 fmt::format("{} has a next CA already, {}; `dsec cluster ca switch` lets it sign",
                             folder, added.sha256));
  }
  // One that was not added to the trusted was never told to anybody: made anew, for its age counts
  // from when it is trusted.
  DSEC_TRY(const KeyAndCertificate made, MakeAuthority(view.name.cluster, clock.Wall()));
  DSEC_TRY(const std::string trusted, JoinBundles(made.certificate, now.trusted));
  DSEC_TRY(const CertificateView added, LookAt(made.certificate));
  DSEC_TRY_VOID(WriteWhole(In(folder, kNextKeyFile), made.key));
  DSEC_TRY_VOID(WriteWhole(In(folder, kNextFile), made.certificate));
  DSEC_TRY_VOID(WriteWhole(In(folder, kTrustedFile), trusted));
  return added.sha256;
}

Result<std::string> SwitchAuthority(const std::string& folder, const Clock& clock) {
  auto certificate = ReadSecret(In(folder, kNextFile));
  if (!certificate.ok() && certificate.error().sys_errno() == ENOENT) {
    return Error(Code::kFailedPrecondition, "ca.next",
                 fmt::format("{} has no next CA; `dsec cluster ca add` makes one", folder));
  }
  if (!certificate.ok()) return std::move(certificate).error();
  DSEC_TRY(const std::string key, ReadSecret(In(folder, kNextKeyFile)));
  DSEC_TRY(const std::string trusted, ReadSecret(In(folder, kTrustedFile)));
  DSEC_TRY_VOID(Authority::Load({key, *certificate}));
  DSEC_TRY(const CertificateView next, LookAt(*certificate));
  if (trusted.find(*certificate) == std::string::npos) {
    return Error(
        Code::kFailedPrecondition, "ca.next",
        fmt::format("the next CA in {} is not among the trusted yet; `dsec cluster ca add`",
                    folder));
  }
  // A certificate begins earlier than it was made, by the slack of the clocks.
  const int64_t from =
      next.begins_unix_ms +
      std::chrono::milliseconds(std::chrono::milliseconds(kClockSlack) + kTrustTime).count();
  const int64_t now = UnixMillis(clock.Wall());
  if (now < from) {
    return Error(
        Code::kFailedPrecondition, "ca.too_early",
        fmt::format("the next CA may sign in {} minutes, when every daemon has heard of it",
                    (from - now) / 60'000 + 1));
  }
  // Between these two Load refuses the pair, and apiservers go on with what they have read; the
  // same command mends it.
  DSEC_TRY_VOID(WriteWhole(In(folder, kAuthorityFile), *certificate));
  DSEC_TRY_VOID(WriteWhole(In(folder, kAuthorityKeyFile), key));
  for (const std::string_view file : {kNextFile, kNextKeyFile}) {
    const std::string path = In(folder, file);
    if (unlink(path.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("os.unlink", path);
  }
  return next.sha256;
}

Result<AuthorityFiles> LoadAuthority(const std::string& folder) {
  AuthorityFiles out;
  DSEC_TRY(out.authority.key, ReadSecret(In(folder, kAuthorityKeyFile)));
  DSEC_TRY(out.authority.certificate, ReadSecret(In(folder, kAuthorityFile)));
  DSEC_TRY(out.trusted, ReadSecret(In(folder, kTrustedFile)));
  return out;
}

}  // namespace dsec::ca
