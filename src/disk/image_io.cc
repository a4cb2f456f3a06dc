// SPDX-License-Identifier: Apache-2.0
#include "disk/image_io.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "disk/layer_writer.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using nlohmann::json;

constexpr uint64_t kCopyBytes = 1 << 20;
constexpr uint64_t kGrain = 4096;  // what is zero or equal is looked for in such pieces
constexpr size_t kMaxSaid = 1 << 20;

bool AllZero(std::span<const uint8_t> bytes) {
  return bytes.empty() ||
         (bytes[0] == 0 && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

Error Stopped() { return Error(Code::kCancelled, "disk.cancelled", "stopped on request"); }

// Reads [offset, ...) of a chain without an upper.
Result<void> ReadChain(std::span<const std::shared_ptr<const Layer>> chain,
                       std::span<const Extent> merged, uint64_t offset, std::span<uint8_t> out) {
  std::ranges::fill(out, uint8_t{0});
  Result<void> result;
  const uint64_t first = offset / kSectorBytes;
  Walk(
      merged, first, first + out.size() / kSectorBytes,
      [&](const Extent& part) {
        if (!result.ok() || part.zero) return;
        result = chain[part.layer]->file->ReadNow(
            part.place * kSectorBytes,
            out.subspan((part.first - first) * kSectorBytes, uint64_t{part.count} * kSectorBytes));
      },
      [](uint64_t, uint64_t) {});
  return result;
}

// Runs qemu-img with words that are no shell's; its output. kInvalidArgument "disk.bad_image".
Result<std::string> RunQemuImg(std::vector<std::string> words) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return DiskError("make a pipe");
  const os::UniqueFd from(ends[0]);
  os::UniqueFd to(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), 1);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), 2);
  words.insert(words.begin(), "qemu-img");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, "qemu-img", &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  to.Reset();
  if (error == ENOENT) {
    return Error(Code::kFailedPrecondition, "disk.no_qemu_img",
                 "qcow2 needs qemu-img (Debian: qemu-utils)");
  }
  if (error != 0) return Error::FromErrno(error, "disk.io", "start qemu-img");
  auto said = os::ReadAll(from.get(), kMaxSaid);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  DSEC_TRY(std::string text, std::move(said));
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return Error(Code::kInvalidArgument, "disk.bad_image", "qemu-img: " + text).WithField("image");
  return text;
}

Result<LayerInfo> Import(int image, uint64_t image_bytes, int out,
                         std::span<const std::shared_ptr<const Layer>> parent,
                         const Proceed& proceed) {
  LayerInfo info;
  info.uuid = NewUuid();
  info.virtual_bytes = (image_bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
  DSEC_TRY_VOID(CheckDiskBytes(info.virtual_bytes));
  std::vector<Extent> merged;
  if (!parent.empty()) {
    info.parent_uuid = parent.back()->info.uuid;
    if (parent.back()->info.virtual_bytes > info.virtual_bytes) {
      return Error(Code::kInvalidArgument, "disk.size",
                   fmt::format("the image has {} bytes, its parent {}", info.virtual_bytes,
                               parent.back()->info.virtual_bytes))
          .WithField("parent");
    }
    DSEC_TRY(merged, MergeChain(parent));
  }
  DSEC_TRY(auto writer, LayerWriter::Create(out, info));
  std::vector<uint8_t> buffer(kCopyBytes), below(parent.empty() ? 0 : kCopyBytes);
  for (uint64_t at = 0; at < info.virtual_bytes;) {
    if (parent.empty()) {  // else a hole may hide something
      const off_t data = ::lseek(image, static_cast<off_t>(at), SEEK_DATA);
      if (data < 0 && errno == ENXIO) break;
      if (data > 0) at = std::max(at, static_cast<uint64_t>(data) / kGrain * kGrain);
    }
    const auto part =
        std::span(buffer).first(std::min<uint64_t>(buffer.size(), info.virtual_bytes - at));
    const uint64_t there = at < image_bytes ? std::min<uint64_t>(part.size(), image_bytes - at) : 0;
    DSEC_TRY_VOID(ReadFully(image, at, part.first(there)));
    std::ranges::fill(part.subspan(there), uint8_t{0});
    if (!parent.empty())
      DSEC_TRY_VOID(ReadChain(parent, merged, at, std::span(below).first(part.size())));
    // Pieces in a row of one kind are one extent.
    enum class Kind { kNothing, kZero, kData };
    const auto kind_of = [&](uint64_t from) {
      const auto piece = part.subspan(from, std::min<uint64_t>(kGrain, part.size() - from));
      if (parent.empty()) return AllZero(piece) ? Kind::kNothing : Kind::kData;
      if (std::memcmp(piece.data(), below.data() + from, piece.size()) == 0) return Kind::kNothing;
      return AllZero(piece) ? Kind::kZero : Kind::kData;
    };
    for (uint64_t from = 0; from < part.size();) {
      const Kind kind = kind_of(from);
      uint64_t to = from;
      while (to < part.size() && kind_of(to) == kind)
        to = std::min<uint64_t>(to + kGrain, part.size());
      const uint64_t first = (at + from) / kSectorBytes;
      if (kind == Kind::kData) DSEC_TRY_VOID(writer.AddData(first, part.subspan(from, to - from)));
      if (kind == Kind::kZero) DSEC_TRY_VOID(writer.AddZeros(first, (to - from) / kSectorBytes));
      from = to;
    }
    at += part.size();
    if (proceed && !proceed(at)) return Stopped();
  }
  return writer.Finish();
}

// `make` fills the file; it has its name when it is whole.
template <typename T>
Result<T> CreateWhole(const std::string& out, const std::function<Result<T>(int)>& make) {
  DSEC_TRY(auto file,
           os::OpenAt(AT_FDCWD, out.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  auto made = make(file.get());
  if (!made.ok()) static_cast<void>(::unlink(out.c_str()));
  return made;
}

}  // namespace

Result<LayerInfo> ImportRaw(const std::string& image, const std::string& out,
                            std::span<const std::shared_ptr<const Layer>> parent,
                            const Proceed& proceed) {
  DSEC_TRY(const auto file, os::OpenAt(AT_FDCWD, image.c_str(), O_RDONLY | O_NONBLOCK));
  struct stat status;
  if (::fstat(file.get(), &status) != 0) return DiskError("look at " + image);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    return Error(Code::kInvalidArgument, "disk.bad_image",
                 image + " is neither a file nor a block device")
        .WithField("image");
  }
  const off_t end = ::lseek(file.get(), 0, SEEK_END);
  if (end < 0) return DiskError("look at " + image);
  return CreateWhole<LayerInfo>(out, [&](int to) {
    return Import(file.get(), static_cast<uint64_t>(end), to, parent, proceed);
  });
}

Result<LayerInfo> ImportQcow2(const std::string& image, const std::string& out,
                              std::span<const std::shared_ptr<const Layer>> parent,
                              const Proceed& proceed) {
  // Neither the format nor other files are guessed from what the image says.
  const json file = {{"driver", "file"}, {"filename", image}};
  const std::string name =
      "json:" + json{{"driver", "qcow2"}, {"file", file}, {"backing", nullptr}}.dump();
  const std::string plain = "json:" + json{{"driver", "qcow2"}, {"file", file}}.dump();
  DSEC_TRY(const std::string said, RunQemuImg({"info", "--output=json", plain}));
  const json info = json::parse(said, nullptr, false);
  if (!info.is_object()) return Error(Code::kInternal, "disk.io", "qemu-img says no JSON");
  const json data = info.value("format-specific", json::object()).value("data", json::object());
  for (const json& owner : {info, data}) {
    for (const char* key : {"backing-filename", "full-backing-filename", "data-file"}) {
      if (!owner.is_object() || !owner.contains(key)) continue;
      return Error(Code::kInvalidArgument, "disk.image_refers",
                   fmt::format("{} names another file ({}: {}); flatten it first", image, key,
                               owner[key].dump()))
          .WithField("image");
    }
  }
  const std::string raw = out + ".raw.new";
  static_cast<void>(::unlink(raw.c_str()));
  auto converted = RunQemuImg({"convert", "-O", "raw", name, raw});
  auto imported = converted.ok() ? ImportRaw(raw, out, parent, proceed)
                                 : Result<LayerInfo>(std::move(converted).error());
  static_cast<void>(::unlink(raw.c_str()));
  return imported;
}

Result<uint64_t> ExportRaw(std::span<const std::shared_ptr<const Layer>> chain,
                           const std::string& out, const Proceed& proceed) {
  if (chain.empty())
    return Error(Code::kInvalidArgument, "disk.bad_chain", "no layers").WithField("layers");
  DSEC_TRY(const auto merged, MergeChain(chain));
  return CreateWhole<uint64_t>(out, [&](int to) -> Result<uint64_t> {
    if (::ftruncate(to, static_cast<off_t>(chain.back()->info.virtual_bytes)) != 0)
      return DiskError("size " + out);
    std::vector<uint8_t> buffer(kCopyBytes);
    uint64_t bytes = 0;
    for (const Extent& extent : merged) {
      const uint64_t size = uint64_t{extent.count} * kSectorBytes;
      for (uint64_t done = 0; done < size;) {
        const auto part = std::span(buffer).first(std::min<uint64_t>(buffer.size(), size - done));
        DSEC_TRY_VOID(chain[extent.layer]->file->ReadNow(extent.place * kSectorBytes + done, part));
        DSEC_TRY_VOID(WriteFully(to, extent.first * kSectorBytes + done, part));
        done += part.size();
        if (proceed && !proceed(bytes + done)) return Stopped();
      }
      bytes += size;
    }
    if (::fsync(to) != 0) return DiskError("sync " + out);
    return bytes;
  });
}

}  // namespace dsec::disk
