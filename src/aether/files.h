// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "aether/identity.h"
#include "base/result.h"
#include "dsec/v1/aether.pb.h"
#include "os/unique_fd.h"

// Operations on the sandbox's files. They block and run on worker threads; none holds state. `root`
// is the sandbox's root directory: every path is resolved below it as processes inside would see
// it, mounts included, by openat2 without magic links, and nothing outside can be reached whatever
// the sandbox does to its directories meanwhile. Errors carry reasons "file.*". The rights of the
// caller inside do not matter: who may use the API may do everything in the sandbox.
namespace dsec::aether {

inline constexpr size_t kMaxReadBytes = 1 << 20;
inline constexpr size_t kMaxPageEntries = 4096;

// `sys_errno` of a call on `path` as an error with its reason: file.not_found, file.name_too_long,
// file.no_space, ...
Error FileError(int sys_errno, std::string_view path);
// Absolute, without NUL, shorter than PATH_MAX. kInvalidArgument "file.bad_path".
Result<void> CheckFilePath(std::string_view path, std::string_view field);

// Names of this form are the agent's own temporaries: hidden from List, Watch and archives.
bool IsHiddenName(std::string_view name);
std::string NewHiddenName();

Result<Identity> LookUpIdentity(int root, const std::string& user);
// A regular file for reading; never blocks on FIFOs and opens no device. "file.not_regular",
// "file.is_a_directory".
Result<os::UniqueFd> OpenRegular(int root, const std::string& path);
// Its parent directory and last name, the latter not followed. "file.bad_path" when there is no
// last name ("/", "..").
struct Place {
  os::UniqueFd directory;
  std::string name;
};
Result<Place> FindPlace(int root, const std::string& path);
// Makes what is missing of a directory path, with this owner and mode 0755.
Result<void> MakeParents(int root, const std::string& directory, const Identity& owner);
v1::FileInfo InfoOf(std::string_view name, const struct stat& status);

Result<v1::FileInfo> Stat(int root, const v1::PathRequest& request);
Result<v1::ListReply> List(int root, const v1::ListRequest& request);
Result<v1::ReadReply> Read(int root, const v1::ReadRequest& request);
Result<v1::Empty> Mkdir(int root, const v1::MkdirRequest& request);
// Between file systems, and for directories that overlayfs will not rename, by copy and removal;
// then not atomic for who looks at `from`, but `to` appears at once.
Result<v1::Empty> Move(int root, const v1::MoveRequest& request);
Result<v1::Empty> Remove(int root, const v1::RemoveRequest& request);
Result<v1::Empty> Chmod(int root, const v1::ChmodRequest& request);

}  // namespace dsec::aether
