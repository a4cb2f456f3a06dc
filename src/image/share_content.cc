// SPDX-License-Identifier: Apache-2.0
#include "image/share_content.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/share_meta.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using Placed = ChunkStore::Placed;

constexpr uint64_t kBlock = StoredForm::kBlock;
constexpr size_t kBuffer = 1 << 20;
// Between two of them lies at most one run of the layer's own.
constexpr size_t kMaxSharedRuns = StoredForm::kMaxRuns / 2 - 1;
constexpr size_t kMaxLinks = StoredForm::kMaxFiles - 1;

// False: the file ends before.
Result<bool> ReadAt(int fd, std::span<uint8_t> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return StoreError("read content to share it");
    if (got == 0) return false;
    offset += static_cast<uint64_t>(got);
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return true;
}

Error NoLinks(int sys_errno) {
  return Error(Code::kFailedPrecondition, "layer.no_links",
               "the file system of the layer store makes no hard links")
      .WithErrno(sys_errno);
}

// What a row of the index may lead to: nothing else is opened or linked.
bool IsPlace(const ChunkIndex::Place& place) {
  if (!IsSha256Hex(place.layer)) return false;
  if (place.name == kBlobName || place.name == kOwnName) return true;
  for (size_t i = 1; i <= kMaxLinks; ++i) {
    if (place.name == StoredForm::SharedName(i)) return true;
  }
  return false;
}

bool IsFileOf(const struct stat& status, uint64_t size) {
  return S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) == size;
}

bool MeansNoLinks(int sys_errno) {
  return sys_errno == EPERM || sys_errno == EOPNOTSUPP || sys_errno == ENOSYS || sys_errno == EXDEV;
}

Result<void> Link(int from, const char* path, int to, const char* name) {
  // A test stands in for a file system that cannot.
  DSEC_FAULT_POINT("layer.share.link");
  if (::linkat(from, path, to, name, 0) == 0) return Ok();
  return os::ErrnoError("layer.io", "link a file of another layer");
}

// Consecutive chunks of the content that lie in a row in one other file.
struct Stretch {
  size_t first = 0;  // chunk
  size_t count = 0;
  uint32_t block = 0;  // of that file
  uint32_t blocks = 0;
};

class Sharer {
 public:
  Sharer(int blobs, int out, ChunkIndex& index, std::span<const Placed> content,
         const std::function<bool(uint64_t)>& proceed, const SharingRules& rules)
      : blobs_(blobs),
        out_(out),
        index_(index),
        content_(content),
        proceed_(proceed),
        rules_(rules),
        files_(content.size()),
        theirs_(kBuffer),
        ours_(kBuffer) {}

  Result<bool> Run() {
    uint64_t total = 0;
    for (const Placed& chunk : content_) total += chunk.blocks;
    if (total < rules_.least_shared) return false;
    struct stat meta;
    if (::fstatat(out_, kMetaName, &meta, AT_SYMLINK_NOFOLLOW) != 0)
      return StoreError("stat the metadata");
    if (static_cast<uint64_t>(meta.st_size) > kMaxSharedMeta) return false;
    DSEC_TRY(const auto ranked, index_.Rank(content_, rules_.candidates));
    if (ranked.empty()) return false;
    DSEC_TRY(blob_, os::OpenAt(out_, kBlobName, O_RDONLY | O_NOFOLLOW));
    for (const int64_t id : ranked) {
      if (made_.links.size() == kMaxLinks || runs_ == kMaxSharedRuns) break;
      DSEC_TRY(const auto file, index_.Load(id));
      if (file.id != 0) DSEC_TRY_VOID(Use(file));
    }
    if (shared_blocks_ * rules_.least_of_layer < total || made_.links.empty()) {
      Undo();
      return false;
    }
    DSEC_FAULT_POINT("layer.share.linked");
    DSEC_TRY_VOID(Write(static_cast<uint64_t>(meta.st_size)));
    return true;
  }

  // All but data.blob.
  void Undo() {
    for (size_t i = 1; i <= kMaxLinks; ++i) ::unlinkat(out_, StoredForm::SharedName(i).c_str(), 0);
    for (const char* name : {kOwnName, kFormName, kSharedMetaName}) ::unlinkat(out_, name, 0);
  }

  SharedContent Take() { return std::move(made_); }

 private:
  // Where the content of a chunk lies.
  struct Where {
    uint32_t link = 0;  // number of the link; 0: nowhere else
    uint32_t block = 0;
  };

  // Takes of the file what is worth it.
  Result<void> Use(const ChunkIndex::File& file) {
    if (file.chunks.empty()) return Ok();
    const std::vector<Stretch> runs = Match(file);
    const uint64_t size = file.chunks.back().block + uint64_t{file.chunks.back().blocks};
    if (!Worth(runs, size)) return Ok();
    const size_t number = made_.links.size() + 1;
    const std::string name = StoredForm::SharedName(number);
    DSEC_TRY(const auto theirs, OpenLink(file, name, size * kBlock));
    if (!theirs.valid()) return Ok();
    std::vector<Stretch> equal;
    for (const auto& run : runs) {
      DSEC_TRY(const bool same, Same(theirs.get(), run));
      if (same) equal.push_back(run);
    }
    if (equal.size() != runs.size())
      log::Warn("layer.chunk_index_wrong", {{"file", file.id}, {"runs", runs.size()}});
    if (!Worth(equal, size)) {
      ::unlinkat(out_, name.c_str(), 0);
      return Ok();
    }
    for (const auto& run : equal) {
      uint32_t block = run.block;
      for (size_t i = run.first; i < run.first + run.count; ++i) {
        files_[i] = {static_cast<uint32_t>(number), block};
        block += content_[i].blocks;
      }
      shared_blocks_ += run.blocks;
    }
    runs_ += equal.size();
    made_.links.push_back({file.id, name});
    sizes_.push_back(size * kBlock);
    return Ok();
  }

  bool Worth(const std::vector<Stretch>& runs, uint64_t file_blocks) const {
    uint64_t blocks = 0;
    for (const auto& run : runs) blocks += run.blocks;
    return blocks >= rules_.least_shared && blocks * rules_.least_of_file >= file_blocks;
  }

  // What of the content that is nowhere else yet seems to be in the file, in runs that are long
  // enough, the longest if they are too many.
  std::vector<Stretch> Match(const ChunkIndex::File& file) const {
    std::vector<Stretch> runs;
    std::unordered_map<uint64_t, size_t> known;
    known.reserve(file.chunks.size());
    for (size_t i = 0; i < file.chunks.size(); ++i) known.try_emplace(file.chunks[i].hash, i);
    Stretch run;
    const auto end = [&] {
      if (run.blocks >= rules_.least_run) runs.push_back(run);
      run = {};
    };
    for (size_t i = 0; i < content_.size(); ++i) {
      const auto found = files_[i].link != 0 ? known.end() : known.find(content_[i].hash);
      if (found == known.end() || file.chunks[found->second].blocks != content_[i].blocks) {
        end();
        continue;
      }
      const uint32_t block = file.chunks[found->second].block;
      if (run.count > 0 && block != run.block + run.blocks) end();
      if (run.count == 0) run = {i, 0, block, 0};
      ++run.count;
      run.blocks += content_[i].blocks;
    }
    end();
    const size_t most = kMaxSharedRuns - runs_;
    if (runs.size() > most) {
      std::ranges::sort(runs, std::greater(), &Stretch::blocks);
      runs.resize(most);
    }
    return runs;
  }

  // Invalid: there is none any more, or not such a one. What is wrong with one place is no reason
  // to do without the others.
  Result<os::UniqueFd> OpenLink(const ChunkIndex::File& file, const std::string& name,
                                uint64_t size) {
    for (const ChunkIndex::Place& place : file.places) {
      const std::string path = place.layer + "/" + place.name;
      struct stat status;
      if (!IsPlace(place) || ::fstatat(blobs_, path.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
          !IsFileOf(status, size)) {
        DSEC_TRY_VOID(index_.Forget(place));
        continue;
      }
      const auto linked = Link(blobs_, path.c_str(), out_, name.c_str());
      if (!linked.ok() && linked.error().sys_errno() == EMLINK) continue;  // a good one, and full
      if (!linked.ok()) {
        DSEC_TRY_VOID(CheckLinks(out_));
        DSEC_TRY_VOID(index_.Forget(place));
        continue;
      }
      // Another one than was looked at, if it has been exchanged: no FIFO holds this up.
      auto fd = os::OpenAt(out_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      if (fd.ok() && ::fstat(fd->get(), &status) == 0 && IsFileOf(status, size)) return fd;
      ::unlinkat(out_, name.c_str(), 0);
      DSEC_TRY_VOID(index_.Forget(place));
    }
    return os::UniqueFd();
  }

  Result<bool> Same(int theirs, const Stretch& run) {
    const uint64_t bytes = run.blocks * kBlock;
    const uint64_t from = run.block * kBlock, to = content_[run.first].block * kBlock;
    for (uint64_t done = 0; done < bytes;) {
      const size_t step = std::min<uint64_t>(kBuffer, bytes - done);
      const std::span<uint8_t> a(theirs_.data(), step), b(ours_.data(), step);
      DSEC_TRY(const bool there, ReadAt(theirs, a, from + done));
      DSEC_TRY(const bool here, ReadAt(blob_.get(), b, to + done));
      if (!there || !here || std::memcmp(a.data(), b.data(), step) != 0) return false;
      done += step;
      DSEC_TRY_VOID(Step(step));
    }
    return true;
  }

  Result<void> Step(uint64_t bytes) {
    done_ += bytes;
    if (!proceed_ || proceed_(done_)) return Ok();
    return Error(Code::kCancelled, "layer.cancelled", "cancelled while sharing content");
  }

  // The own part, the metadata, the form; then nobody needs data.blob.
  Result<void> Write(uint64_t meta_bytes) {
    MakeForm();
    if (!made_.own.empty()) DSEC_TRY_VOID(WriteOwn());
    DSEC_FAULT_POINT("layer.share.own_written");
    DSEC_TRY(const auto meta_fd, os::OpenAt(out_, kMetaName, O_RDONLY | O_NOFOLLOW));
    DSEC_TRY(auto meta, ReadMeta(meta_fd.get(), meta_bytes));
    DSEC_TRY_VOID(ShareMeta(meta, made_.form));
    DSEC_TRY_VOID(
        Create(kSharedMetaName, {reinterpret_cast<const char*>(meta.data()), meta.size()}));
    DSEC_TRY_VOID(Create(kFormName, made_.form.Encode()));
    DSEC_FAULT_POINT("layer.share.before_blob_goes");
    if (::unlinkat(out_, kBlobName, 0) != 0) return StoreError("remove content that is shared");
    return Ok();
  }

  Result<void> Create(const char* name, std::string_view text) {
    os::UniqueFd fd(::openat(out_, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!fd.valid()) return StoreError("make a file of the layer");
    DSEC_TRY_VOID(os::WriteAll(fd.get(), text));
    if (::fsync(fd.get()) != 0) return StoreError("fsync a file of the layer");
    return Ok();
  }

  void MakeForm() {
    StoredForm& form = made_.form;
    uint64_t own = 0;
    for (size_t i = 0; i < content_.size(); ++i) {
      if (files_[i].link == 0) own += content_[i].blocks;
    }
    if (own > 0) form.files.push_back({kOwnName, own * kBlock});
    const uint32_t first = own > 0 ? 0 : 1;  // of the index of link 1
    for (size_t i = 0; i < made_.links.size(); ++i)
      form.files.push_back({made_.links[i].name, sizes_[i]});
    uint32_t own_block = 0;
    for (size_t i = 0; i < content_.size(); ++i) {
      const Placed& chunk = content_[i];
      StoredForm::Run run{0, own_block, chunk.blocks};
      if (files_[i].link != 0) {
        run.file = files_[i].link - first;
        run.block = files_[i].block;
      } else {
        made_.own.push_back({chunk.hash, own_block, chunk.blocks});
        own_block += chunk.blocks;
      }
      if (!form.runs.empty() && form.runs.back().file == run.file &&
          form.runs.back().block + form.runs.back().blocks == run.block) {
        form.runs.back().blocks += run.blocks;
      } else {
        form.runs.push_back(run);
      }
    }
  }

  Result<void> WriteOwn() {
    DSEC_TRY_VOID(RequireSpace(out_, made_.form.files.front().size, "the layer's own content"));
    os::UniqueFd own(::openat(out_, kOwnName, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!own.valid()) return StoreError("make the layer's own content");
    for (size_t i = 0; i < content_.size();) {
      if (files_[i].link != 0) {
        ++i;
        continue;
      }
      // Those in a row, in one go.
      const uint64_t from = content_[i].block * kBlock;
      uint64_t bytes = 0;
      for (; i < content_.size() && files_[i].link == 0; ++i) bytes += content_[i].blocks * kBlock;
      for (uint64_t done = 0; done < bytes;) {
        const std::span<uint8_t> part(ours_.data(), std::min<uint64_t>(kBuffer, bytes - done));
        DSEC_TRY(const bool read, ReadAt(blob_.get(), part, from + done));
        if (!read) return Error(Code::kInternal, "layer.io", "the blob has lost its end");
        auto wrote =
            os::WriteAll(own.get(), {reinterpret_cast<const char*>(part.data()), part.size()});
        if (!wrote.ok()) {
          errno = wrote.error().sys_errno();
          return StoreError("write the layer's own content");
        }
        done += part.size();
        DSEC_TRY_VOID(Step(part.size()));
      }
    }
    if (::fsync(own.get()) != 0) return StoreError("fsync the layer's own content");
    return Ok();
  }

  const int blobs_;
  const int out_;
  ChunkIndex& index_;
  const std::span<const Placed> content_;
  const std::function<bool(uint64_t)>& proceed_;
  const SharingRules rules_;
  std::vector<Where> files_;  // of each chunk
  std::vector<uint8_t> theirs_, ours_;
  os::UniqueFd blob_;
  SharedContent made_;
  std::vector<uint64_t> sizes_;  // of the links
  uint64_t shared_blocks_ = 0;
  size_t runs_ = 0;
  uint64_t done_ = 0;
};

}  // namespace

Result<std::optional<SharedContent>> ShareContent(int blobs, int out, ChunkIndex& index,
                                                  std::span<const Placed> content,
                                                  const std::function<bool(uint64_t)>& proceed,
                                                  const SharingRules& rules) {
  Sharer sharer(blobs, out, index, content, proceed, rules);
  auto made = sharer.Run();
  if (!made.ok()) {
    sharer.Undo();
    return std::move(made).error();
  }
  if (!*made) return std::optional<SharedContent>();
  return std::optional(sharer.Take());
}

Result<void> CheckLinks(int dir) {
  constexpr char kFile[] = "link-probe";
  constexpr char kLink[] = "link-probe.2";
  DSEC_TRY_VOID(os::CreateFile(dir, kFile, "", 0600));
  const auto linked = Link(dir, kFile, dir, kLink);
  ::unlinkat(dir, kLink, 0);
  ::unlinkat(dir, kFile, 0);
  if (linked.ok()) return Ok();
  if (MeansNoLinks(linked.error().sys_errno())) return NoLinks(linked.error().sys_errno());
  return linked.error();
}

}  // namespace dsec::image
