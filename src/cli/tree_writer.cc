// SPDX-License-Identifier: Apache-2.0
#include "cli/tree_writer.h"

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string_view>
#include <utility>

#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::cli {
namespace {

using Parts = std::vector<std::string>;

Error Hostile(std::string_view name, std::string_view why) {
  return Error(Code::kInvalidArgument, "archive.hostile", fmt::format("{}: {}", name, why));
}

Result<Parts> Split(std::string_view name) {
  if (name.starts_with('/')) return Hostile(name, "absolute name");
  Parts parts;
  while (!name.empty()) {
    const size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part == "..") return Hostile(name, "name with ..");
    if (!part.empty() && part != ".") parts.emplace_back(part);
    name = slash == std::string_view::npos ? std::string_view() : name.substr(slash + 1);
  }
  return parts;
}

// Opens, and makes, the folder of the first `count` parts without following any link.
Result<os::UniqueFd> OpenFolder(int root, const Parts& parts, size_t count) {
  DSEC_TRY(os::UniqueFd current, os::OpenAt(root, ".", O_RDONLY | O_DIRECTORY));
  for (size_t i = 0; i < count; ++i) {
    if (mkdirat(current.get(), parts[i].c_str(), 0755) != 0 && errno != EEXIST) {
      return os::ErrnoError("cli.write", parts[i]);
    }
    auto next = os::OpenAt(current.get(), parts[i].c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!next.ok()) return Hostile(parts[i], "passes through a link or file");
    current = std::move(next).value();
  }
  return current;
}

Result<void> Unlink(int folder, const std::string& name) {
  if (unlinkat(folder, name.c_str(), 0) != 0 && errno != ENOENT) {
    return Hostile(name, "would replace a folder");
  }
  return {};
}

Result<void> WriteFile(archive* in, int root, const Parts& parts, mode_t mode) {
  DSEC_TRY(const os::UniqueFd folder, OpenFolder(root, parts, parts.size() - 1));
  DSEC_TRY_VOID(Unlink(folder.get(), parts.back()));
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(folder.get(), parts.back().c_str(),
                                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  if (archive_read_data_into_fd(in, file.get()) != ARCHIVE_OK) {
    return Error(Code::kInternal, "archive.damaged", archive_error_string(in));
  }
  if (fchmod(file.get(), mode & 0777) != 0) return os::ErrnoError("cli.write", parts.back());
  return {};
}

Result<void> HardLink(int root, const Parts& source, const Parts& target) {
  if (source.empty()) return Hostile(target.back(), "hard link to nothing");
  DSEC_TRY(const os::UniqueFd from, OpenFolder(root, source, source.size() - 1));
  DSEC_TRY(const os::UniqueFd to, OpenFolder(root, target, target.size() - 1));
  struct stat info{};
  if (fstatat(from.get(), source.back().c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
      !S_ISREG(info.st_mode)) {
    return Hostile(source.back(), "hard link to something that is no file of the archive");
  }
  DSEC_TRY_VOID(Unlink(to.get(), target.back()));
  if (linkat(from.get(), source.back().c_str(), to.get(), target.back().c_str(), 0) != 0) {
    return os::ErrnoError("cli.write", target.back());
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> UnpackTree(int tar_fd, int root) {
  const std::unique_ptr<archive, decltype(&archive_read_free)> in(archive_read_new(),
                                                                  archive_read_free);
  archive_read_support_format_tar(in.get());
  archive_read_support_format_empty(in.get());
  if (archive_read_open_fd(in.get(), tar_fd, size_t{64} << 10) != ARCHIVE_OK) {
    return Error(Code::kInternal, "archive.damaged", archive_error_string(in.get()));
  }
  std::vector<std::string> left_out;
  std::vector<std::pair<Parts, std::string>> links;
  std::vector<std::pair<Parts, mode_t>> folders;
  archive_entry* entry = nullptr;
  int status = 0;
  while ((status = archive_read_next_header(in.get(), &entry)) == ARCHIVE_OK) {
    const char* name = archive_entry_pathname(entry);
    if (name == nullptr)
      return Error(Code::kInternal, "archive.damaged", "an entry without a name");
    DSEC_TRY(Parts parts, Split(name));
    const mode_t mode = archive_entry_perm(entry);
    if (const char* linked = archive_entry_hardlink(entry); linked != nullptr && !parts.empty()) {
      DSEC_TRY(const Parts source, Split(linked));
      DSEC_TRY_VOID(HardLink(root, source, parts));
    } else if (archive_entry_filetype(entry) == AE_IFDIR) {
      DSEC_TRY_VOID(OpenFolder(root, parts, parts.size()));
      folders.emplace_back(std::move(parts), mode);
    } else if (archive_entry_filetype(entry) == AE_IFREG && !parts.empty()) {
      DSEC_TRY_VOID(WriteFile(in.get(), root, parts, mode));
    } else if (archive_entry_filetype(entry) == AE_IFLNK && !parts.empty()) {
      const char* target = archive_entry_symlink(entry);
      links.emplace_back(std::move(parts), target == nullptr ? "" : target);
    } else {
      left_out.push_back(fmt::format("{}: not a file, folder or link", name));
    }
  }
  if (status != ARCHIVE_EOF) {
    return Error(Code::kInternal, "archive.damaged", archive_error_string(in.get()));
  }
  for (const auto& [parts, target] : links) {
    DSEC_TRY(const os::UniqueFd folder, OpenFolder(root, parts, parts.size() - 1));
    DSEC_TRY_VOID(Unlink(folder.get(), parts.back()));
    if (symlinkat(target.c_str(), folder.get(), parts.back().c_str()) != 0) {
      return os::ErrnoError("cli.write", parts.back());
    }
  }
  for (auto it = folders.rbegin(); it != folders.rend(); ++it) {
    DSEC_TRY(const os::UniqueFd folder, OpenFolder(root, it->first, it->first.size()));
    if (fchmod(folder.get(), (it->second & 0777) | S_IRWXU) != 0) {
      return os::ErrnoError("cli.write", "fchmod");
    }
  }
  return left_out;
}

}  // namespace dsec::cli
