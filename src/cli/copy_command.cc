// SPDX-License-Identifier: Apache-2.0
// cp: files as raw bodies, folders as tar streams. What comes from a sandbox is hostile: names are
// resolved below the target without following links.
#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/tree_writer.h"
#include "http/target.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

namespace fs = std::filesystem;
using http::PercentEncode;
using nlohmann::json;

constexpr size_t kPiece = size_t{256} << 10;

// SANDBOX:PATH or a local path.
struct Place {
  std::string sandbox;
  std::string path;
};

Place ParsePlace(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon != std::string::npos && text.substr(0, colon).starts_with("sb-")) {
    return {text.substr(0, colon), text.substr(colon + 1)};
  }
  return {"", text};
}

std::string Route(const Place& place, std::string_view what) {
  return fmt::format("/v1/sandboxes/{}/{}?path={}", PercentEncode(place.sandbox), what,
                     PercentEncode(place.path));
}

// Type of a path inside; empty when it does not exist.
Result<std::string> TypeOf(Connection& api, const Place& place) {
  auto reply = api.Call("GET", Route(place, "files/stat"));
  if (!reply.ok()) {
    if (reply.error().code() == Code::kNotFound && reply.error().reason().starts_with("file.")) {
      return std::string();
    }
    return reply.error();
  }
  const json info = json::parse(reply->body, nullptr, false);
  return info.is_object() ? info.value("type", "") : std::string();
}

std::string BaseName(const std::string& path) {
  fs::path given(path);
  if (!given.has_filename()) given = given.parent_path();
  return given.filename().string();
}

// Adds one local file, folder or link to a tar.
Result<void> AddEntry(archive* out, const fs::path& path, const fs::path& root) {
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) return os::ErrnoError("cli.read", path.string());
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode) && !S_ISLNK(info.st_mode)) {
    return Error(Code::kInvalidArgument, "cli.unpackable",
                 fmt::format("{} is neither a file, a folder nor a link", path.string()));
  }
  const std::unique_ptr<archive_entry, decltype(&archive_entry_free)> entry(archive_entry_new(),
                                                                            archive_entry_free);
  archive_entry_copy_stat(entry.get(), &info);
  archive_entry_set_uid(entry.get(), 0);
  archive_entry_set_gid(entry.get(), 0);
  archive_entry_set_nlink(entry.get(), 1);
  archive_entry_copy_pathname(entry.get(), path.lexically_relative(root).c_str());
  if (S_ISLNK(info.st_mode)) {
    std::error_code error;
    archive_entry_copy_symlink(entry.get(), fs::read_symlink(path, error).c_str());
    if (error) return Error(Code::kInternal, "cli.read", path.string() + ": " + error.message());
    archive_entry_set_size(entry.get(), 0);
  }
  if (archive_write_header(out, entry.get()) != ARCHIVE_OK) {
    return Error(Code::kInternal, "cli.archive", archive_error_string(out));
  }
  if (!S_ISREG(info.st_mode)) return {};
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW));
  std::string data(kPiece, '\0');
  for (;;) {
    const ssize_t got = read(file.get(), data.data(), data.size());
    if (got < 0) return os::ErrnoError("cli.read", path.string());
    if (got == 0) return {};
    if (archive_write_data(out, data.data(), static_cast<size_t>(got)) < 0) {
      return Error(Code::kInternal, "cli.archive", archive_error_string(out));
    }
  }
}

// Packs a folder into an unnamed temporary file; returned at its start.
Result<os::UniqueFd> PackFolder(const fs::path& root) {
  DSEC_TRY(os::UniqueFd file, os::OpenAt(AT_FDCWD, "/tmp", O_TMPFILE | O_RDWR, 0600));
  const std::unique_ptr<archive, decltype(&archive_write_free)> out(archive_write_new(),
                                                                    archive_write_free);
  archive_write_set_format_pax_restricted(out.get());
  archive_write_set_bytes_in_last_block(out.get(), 1);
  if (archive_write_open_fd(out.get(), file.get()) != ARCHIVE_OK) {
    return Error(Code::kInternal, "cli.archive", archive_error_string(out.get()));
  }
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, error), end; !error && it != end;
       it.increment(error)) {
    DSEC_TRY_VOID(AddEntry(out.get(), it->path(), root));
  }
  if (error) return Error(Code::kInternal, "cli.read", root.string() + ": " + error.message());
  if (archive_write_close(out.get()) != ARCHIVE_OK) {
    return Error(Code::kInternal, "cli.archive", archive_error_string(out.get()));
  }
  if (lseek(file.get(), 0, SEEK_SET) != 0) return os::ErrnoError("cli.archive", "lseek");
  return file;
}

Connection::Source SourceOf(int fd) {
  return [fd]() -> Result<std::string> {
    std::string data(kPiece, '\0');
    const ssize_t got = read(fd, data.data(), data.size());
    if (got < 0) return os::ErrnoError("cli.read", "read");
    data.resize(static_cast<size_t>(got));
    return data;
  };
}

Result<void> CopyIn(Connection& api, const std::string& local, Place target) {
  std::error_code error;
  const bool folder = fs::is_directory(local, error);
  DSEC_TRY(const std::string type, TypeOf(api, target));
  if (type == "dir") target.path += "/" + BaseName(local);
  if (folder) {
    DSEC_TRY(const os::UniqueFd packed, PackFolder(fs::path(local)));
    DSEC_TRY([[maybe_unused]] const Reply reply,
             api.Upload(Route(target, "archive"), SourceOf(packed.get())));
    return {};
  }
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(AT_FDCWD, local.c_str(), O_RDONLY));
  struct stat info{};
  if (fstat(file.get(), &info) != 0) return os::ErrnoError("cli.read", local);
  DSEC_TRY([[maybe_unused]] const Reply reply,
           api.Upload(fmt::format("{}&mode=0{:o}", Route(target, "files"), info.st_mode & 0777),
                      SourceOf(file.get())));
  return {};
}

Result<void> CopyOutFolder(Connection& api, const Place& source, const std::string& local) {
  DSEC_TRY(os::UniqueFd spool, os::OpenAt(AT_FDCWD, "/tmp", O_TMPFILE | O_RDWR, 0600));
  Result<void> written;
  DSEC_TRY_VOID(api.Download(Route(source, "archive"), [&](std::string_view data) {
    written = os::WriteAll(spool.get(), data);
    return written.ok();
  }));
  DSEC_TRY_VOID(std::move(written));
  if (lseek(spool.get(), 0, SEEK_SET) != 0) return os::ErrnoError("cli.archive", "lseek");
  if (mkdir(local.c_str(), 0777) != 0 && errno != EEXIST) return os::ErrnoError("cli.write", local);
  DSEC_TRY(const os::UniqueFd root, os::OpenAt(AT_FDCWD, local.c_str(), O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const std::vector<std::string> left_out, UnpackTree(std::move(spool), root.get()));
  for (const std::string& line : left_out)
    std::fprintf(stderr, "dsec: left out: %s\n", line.c_str());
  return {};
}

Result<void> CopyOut(Connection& api, const Place& source, std::string local) {
  DSEC_TRY(const std::string type, TypeOf(api, source));
  std::error_code error;
  if (fs::is_directory(local, error)) local = (fs::path(local) / BaseName(source.path)).string();
  if (type == "dir") return CopyOutFolder(api, source, local);
  // Into a new file beside the target, so that a broken transfer leaves an old file as it was.
  const std::string partial = local + ".dsec-partial";
  unlink(partial.c_str());
  DSEC_TRY(const os::UniqueFd file,
           os::OpenAt(AT_FDCWD, partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666));
  Result<void> written;
  auto done = api.Download(Route(source, "files"), [&](std::string_view data) {
    written = os::WriteAll(file.get(), data);
    return written.ok();
  });
  if (done.ok()) done = std::move(written);
  if (done.ok() && rename(partial.c_str(), local.c_str()) != 0)
    done = os::ErrnoError("cli.write", local);
  if (!done.ok()) unlink(partial.c_str());
  return done;
}

void Copy(Context& context, const std::string& from, const std::string& to) {
  const Place source = ParsePlace(from);
  const Place target = ParsePlace(to);
  if (source.sandbox.empty() == target.sandbox.empty()) {
    return context.Fail(
        Error(Code::kInvalidArgument, "cli.value", "exactly one side of cp must be SANDBOX:PATH"));
  }
  auto api = context.Open();
  if (!api) return;
  auto done = source.sandbox.empty() ? CopyIn(*api, from, target) : CopyOut(*api, source, to);
  if (!done.ok()) context.Fail(done.error());
}

}  // namespace

void AddCopyCommand(CLI::App& app, Context& context) {
  auto from = std::make_shared<std::string>();
  auto to = std::make_shared<std::string>();
  auto* copy =
      app.add_subcommand("cp", "Copy a file or folder into or out of a sandbox (SANDBOX:PATH)");
  copy->add_option("from", *from, "Source")->required();
  copy->add_option("to", *to, "Target; an existing folder gets the source inside it")->required();
  copy->callback([&context, from, to] { Copy(context, *from, *to); });
}

}  // namespace dsec::cli
