// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/dev_folder.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

#include "os/file.h"
#include "os/mount.h"

namespace dsec::sandbox {
namespace {

constexpr std::string_view kDev = "/dev/";
// Documentation/admin-guide/devices.txt; as the spawner's template has them.
constexpr std::pair<const char*, DeviceNumber> kUsual[] = {
    {"null", {false, 1, 3}},   {"zero", {false, 1, 5}},    {"full", {false, 1, 7}},
    {"random", {false, 1, 8}}, {"urandom", {false, 1, 9}}, {"tty", {false, 5, 0}}};
constexpr std::pair<const char*, const char*> kLinks[] = {{"ptmx", "pts/ptmx"},
                                                          {"fd", "/proc/self/fd"},
                                                          {"stdin", "/proc/self/fd/0"},
                                                          {"stdout", "/proc/self/fd/1"},
                                                          {"stderr", "/proc/self/fd/2"}};

Result<void> MakeNode(int dir, const std::string& path, const DeviceNumber& number,
                      uint32_t owner) {
  for (size_t slash = path.find('/'); slash != std::string::npos;
       slash = path.find('/', slash + 1)) {
    if (::mkdirat(dir, path.substr(0, slash).c_str(), 0755) != 0 && errno != EEXIST)
      return os::ErrnoError("fn.dev", path);
  }
  const mode_t kind = number.block ? S_IFBLK : S_IFCHR;
  if (::mknodat(dir, path.c_str(), kind | 0666, ::makedev(number.major, number.minor)) != 0 ||
      ::fchmodat(dir, path.c_str(), 0666, 0) != 0 ||
      ::fchownat(dir, path.c_str(), owner, owner, AT_SYMLINK_NOFOLLOW) != 0) {
    return os::ErrnoError("fn.dev", path);
  }
  return Ok();
}

}  // namespace

Result<std::vector<DeviceNode>> FindDevices(const std::vector<std::string>& paths) {
  std::vector<DeviceNode> nodes;
  for (const std::string& path : paths) {
    struct stat info;
    const bool there = ::stat(path.c_str(), &info) == 0;
    const std::string inside =
        path.starts_with(kDev) ? path.substr(kDev.size()) : path.substr(path.rfind('/') + 1);
    if (!there || (!S_ISCHR(info.st_mode) && !S_ISBLK(info.st_mode)) || inside.empty() ||
        inside.find("..") != std::string::npos) {
      return Error(Code::kInvalidArgument, "fn.bad_device",
                   fmt::format("'{}' is no device of this node", path))
          .WithField("devices");
    }
    nodes.push_back({inside, {S_ISBLK(info.st_mode), major(info.st_rdev), minor(info.st_rdev)}});
  }
  return nodes;
}

std::vector<DeviceNumber> NumbersOf(const std::vector<DeviceNode>& nodes) {
  std::vector<DeviceNumber> numbers;
  for (const DeviceNode& node : nodes) numbers.push_back(node.number);
  return numbers;
}

Result<os::UniqueFd> MakeDevFolder(const std::vector<DeviceNode>& nodes, uint32_t owner) {
  DSEC_TRY(auto context, os::FsContext::Open("tmpfs"));
  DSEC_TRY_VOID(context.SetString("source", "dev"));
  DSEC_TRY_VOID(context.SetString("size", "64k"));
  DSEC_TRY_VOID(context.SetString("mode", "0755"));
  DSEC_TRY(auto mount, std::move(context).Mount(MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC));
  for (const char* dir : {"pts", "shm"}) DSEC_TRY_VOID(os::MakeDir(mount.get(), dir, 0755));
  for (const auto& [name, number] : kUsual)
    DSEC_TRY_VOID(MakeNode(mount.get(), name, number, owner));
  for (const auto& [name, target] : kLinks) {
    if (::symlinkat(target, mount.get(), name) != 0) return os::ErrnoError("fn.dev", name);
  }
  for (const DeviceNode& node : nodes)
    DSEC_TRY_VOID(MakeNode(mount.get(), node.path, node.number, owner));
  DSEC_TRY_VOID(os::SetMountAttributes(mount.get(), MOUNT_ATTR_RDONLY, 0));
  return mount;
}

}  // namespace dsec::sandbox
