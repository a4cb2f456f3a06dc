// SPDX-License-Identifier: Apache-2.0
#include "cli/tree_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string_view>
#include <utility>

#include "image/byte_source.h"
#include "image/tar_source.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

using Parts = std::vector<std::string>;

Error Hostile(std::string_view name, std::string_view why) {
  return Error(Code::kInvalidArgument, "archive.hostile",
               fmt::format("{}: {}", image::Printable(name), why));
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

Result<void> WriteFile(image::EntrySource& source, int root, const Parts& parts,
                       const image::Entry& entry) {
  DSEC_TRY(const os::UniqueFd folder, OpenFolder(root, parts, parts.size() - 1));
  DSEC_TRY_VOID(Unlink(folder.get(), parts.back()));
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(folder.get(), parts.back().c_str(),
                                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  uint64_t end = 0;
  while (true) {
    DSEC_TRY(const image::DataRun run, source.ReadData());
    if (run.bytes.empty()) break;
    if (::lseek(file.get(), static_cast<off_t>(run.offset), SEEK_SET) < 0) {
      return os::ErrnoError("cli.write", parts.back());
    }
    DSEC_TRY_VOID(os::WriteAll(
        file.get(), {reinterpret_cast<const char*>(run.bytes.data()), run.bytes.size()}));
    end = run.offset + run.bytes.size();
  }
  if (end != entry.size && ::ftruncate(file.get(), static_cast<off_t>(entry.size)) != 0) {
    return os::ErrnoError("cli.write", parts.back());
  }
  if (fchmod(file.get(), entry.mode & 0777) != 0) return os::ErrnoError("cli.write", parts.back());
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

Result<std::vector<std::string>> UnpackTree(os::UniqueFd tar, int root) {
  image::Warnings warnings;
  // Names as bytes and bounded headers, whatever the archive says.
  DSEC_TRY(const auto source,
           image::TarSource::Open(std::make_unique<image::FileSource>(std::move(tar), "archive"),
                                  "archive", warnings));
  std::vector<std::string> left_out;
  std::vector<std::pair<Parts, std::string>> links;
  std::vector<std::pair<Parts, mode_t>> folders;
  image::Entry entry;
  while (true) {
    DSEC_TRY(const bool more, source->Next(entry));
    if (!more) break;
    DSEC_TRY(Parts parts, Split(entry.path));
    if (entry.type == image::EntryType::kDirectory) {
      DSEC_TRY_VOID(OpenFolder(root, parts, parts.size()));
      folders.emplace_back(std::move(parts), entry.mode);
      continue;
    }
    if (parts.empty()) return Hostile(entry.path, "the root is no folder");
    switch (entry.type) {
      case image::EntryType::kHardlink: {
        DSEC_TRY(const Parts target, Split(entry.target));
        DSEC_TRY_VOID(HardLink(root, target, parts));
        break;
      }
      case image::EntryType::kFile:
        DSEC_TRY_VOID(WriteFile(*source, root, parts, entry));
        break;
      case image::EntryType::kSymlink:
        links.emplace_back(std::move(parts), entry.target);
        break;
      default:
        left_out.push_back(
            fmt::format("{}: not a file, folder or link", image::Printable(entry.path)));
    }
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
