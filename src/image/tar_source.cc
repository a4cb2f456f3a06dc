// SPDX-License-Identifier: Apache-2.0
#include "image/tar_source.h"

#include <archive.h>
#include <archive_entry.h>
#include <locale.h>

#include <cerrno>
#include <limits>

#include "base/check.h"

namespace dsec::image {
namespace {

constexpr uint64_t kMaxHeaderBytes = 4 << 20;

// libarchive turns names of pax headers into the locale's character set and, under a UTF-8 locale,
// composes what was decomposed (two names become one). In the C locale it fails to convert, warns
// and hands out the bytes.
class CLocale {
 public:
  CLocale() : previous_(::uselocale(Get())) {}
  ~CLocale() { ::uselocale(previous_); }
  CLocale(const CLocale&) = delete;
  CLocale& operator=(const CLocale&) = delete;

 private:
  static locale_t Get() {
    static const locale_t kC = ::newlocale(LC_ALL_MASK, "C", nullptr);
    DSEC_CHECK(kC != nullptr);
    return kC;
  }
  locale_t previous_;
};

bool IsConversionWarning(std::string_view text) {
  return text.find("can't be converted from UTF-8") != std::string_view::npos;
}

std::string Text(const char* text) { return text != nullptr ? text : ""; }

}  // namespace

struct TarCallbacks {
  static la_ssize_t Read(archive* handle, void* context, const void** out) {
    auto& self = *static_cast<TarSource*>(context);
    auto bytes = self.bytes_->Read();
    if (!bytes.ok()) {
      self.error_ = std::move(bytes).error();
      ::archive_set_error(handle, EIO, "read failed");
      return -1;
    }
    self.pulled_ += bytes->size();
    if (self.bounded_ && self.pulled_ > kMaxHeaderBytes) {
      self.error_ = Error(Code::kInvalidArgument, "layer.header_too_large",
                          fmt::format("{}: the header after member \"{}\" takes more than {} bytes",
                                      self.name_, Printable(self.member_), kMaxHeaderBytes));
      ::archive_set_error(handle, E2BIG, "header too large");
      return -1;
    }
    *out = bytes->data();
    return static_cast<la_ssize_t>(bytes->size());
  }

  static la_int64_t Skip(archive*, void* context, la_int64_t count) {
    auto& self = *static_cast<TarSource*>(context);
    auto skipped = self.bytes_->Skip(static_cast<uint64_t>(count));
    if (!skipped.ok()) {
      self.error_ = std::move(skipped).error();
      return ARCHIVE_FATAL;
    }
    return static_cast<la_int64_t>(*skipped);
  }
};

TarSource::TarSource(std::unique_ptr<ByteSource> bytes, std::string name, Warnings& warnings)
    : bytes_(std::move(bytes)),
      name_(std::move(name)),
      warnings_(warnings),
      archive_(::archive_read_new()) {
  DSEC_CHECK(archive_ != nullptr);
}

TarSource::~TarSource() { ::archive_read_free(archive_); }

Error TarSource::Fail() {
  if (error_) return *error_;
  const char* text = ::archive_error_string(archive_);
  return Error(Code::kInvalidArgument, "layer.malformed",
               fmt::format("{}: after member \"{}\": {}", name_, Printable(member_),
                           Printable(text != nullptr ? text : "not a tar archive")));
}

Result<std::unique_ptr<TarSource>> TarSource::Open(std::unique_ptr<ByteSource> bytes,
                                                   std::string name, Warnings& warnings) {
  const CLocale locale;
  std::unique_ptr<TarSource> source(new TarSource(std::move(bytes), std::move(name), warnings));
  archive* handle = source->archive_;
  ::archive_read_support_format_tar(handle);
  ::archive_read_set_read_callback(handle, TarCallbacks::Read);
  ::archive_read_set_skip_callback(handle, TarCallbacks::Skip);
  ::archive_read_set_callback_data(handle, source.get());
  if (::archive_read_open1(handle) != ARCHIVE_OK) return source->Fail();
  return source;
}

Result<bool> TarSource::Next(Entry& entry) {
  if (ended_) return false;
  const CLocale locale;
  // Skipping allocates nothing; it need not be bounded.
  bounded_ = false;
  if (!member_.empty() && ::archive_read_data_skip(archive_) == ARCHIVE_FATAL) return Fail();
  bounded_ = true;
  pulled_ = 0;
  archive_entry* found = nullptr;
  const int status = ::archive_read_next_header(archive_, &found);
  if (status == ARCHIVE_EOF) {
    ended_ = true;
    while (true) {
      DSEC_TRY(const auto rest, bytes_->Read());
      if (rest.empty()) return false;
    }
  }
  if (status != ARCHIVE_OK && status != ARCHIVE_WARN) return Fail();
  DSEC_TRY_VOID(Convert(found, entry));
  member_ = entry.path;
  if (status == ARCHIVE_WARN) {
    const std::string text = Text(::archive_error_string(archive_));
    if (!IsConversionWarning(text)) {
      warnings_.Add(fmt::format("member \"{}\": {}", Printable(entry.path), Printable(text)));
    }
  }
  return true;
}

Result<DataRun> TarSource::ReadData() {
  const CLocale locale;
  pulled_ = 0;
  const void* data = nullptr;
  size_t size = 0;
  la_int64_t offset = 0;
  while (true) {
    const int status = ::archive_read_data_block(archive_, &data, &size, &offset);
    if (status == ARCHIVE_EOF) return DataRun();
    if (status != ARCHIVE_OK && status != ARCHIVE_WARN) return Fail();
    if (size > 0) break;
  }
  return DataRun{static_cast<uint64_t>(offset), {static_cast<const uint8_t*>(data), size}};
}

Result<void> TarSource::Convert(archive_entry* from, Entry& to) {
  to = Entry();
  to.path = Text(::archive_entry_pathname(from));
  const auto refuse = [&](std::string_view rule) {
    return Error(Code::kInvalidArgument, "layer.malformed",
                 fmt::format("{}: member \"{}\": {}", name_, Printable(to.path), rule));
  };
  if (to.path.empty()) return refuse("has no name");
  if (const char* target = ::archive_entry_hardlink(from); target != nullptr) {
    to.type = EntryType::kHardlink;
    to.target = target;
    return Ok();
  }
  switch (::archive_entry_filetype(from)) {
    case AE_IFREG:
      to.type = EntryType::kFile;
      break;
    case AE_IFDIR:
      to.type = EntryType::kDirectory;
      break;
    case AE_IFLNK:
      to.type = EntryType::kSymlink;
      to.target = Text(::archive_entry_symlink(from));
      if (to.target.empty()) return refuse("the link has no target");
      break;
    case AE_IFCHR:
      to.type = EntryType::kCharDevice;
      break;
    case AE_IFBLK:
      to.type = EntryType::kBlockDevice;
      break;
    case AE_IFIFO:
      to.type = EntryType::kFifo;
      break;
    default:
      return refuse("is of a type that a layer cannot hold");
  }
  constexpr la_int64_t kMaxId = std::numeric_limits<uint32_t>::max() - 1;  // -1 means "leave alone"
  const la_int64_t uid = ::archive_entry_uid(from);
  const la_int64_t gid = ::archive_entry_gid(from);
  if (uid < 0 || uid > kMaxId || gid < 0 || gid > kMaxId) {
    return refuse(fmt::format("owner {}:{} is outside 0..{}", uid, gid, kMaxId));
  }
  to.uid = static_cast<uint32_t>(uid);
  to.gid = static_cast<uint32_t>(gid);
  to.mode = static_cast<uint32_t>(::archive_entry_perm(from)) & 07777;
  to.mtime_sec = ::archive_entry_mtime(from);
  const long nanos = ::archive_entry_mtime_nsec(from);
  if (nanos < 0 || nanos >= 1'000'000'000) return refuse("its time has no proper fraction");
  to.mtime_nsec = static_cast<uint32_t>(nanos);
  if (to.type == EntryType::kCharDevice || to.type == EntryType::kBlockDevice) {
    to.dev_major = static_cast<uint32_t>(::archive_entry_rdevmajor(from));
    to.dev_minor = static_cast<uint32_t>(::archive_entry_rdevminor(from));
  }
  if (to.type == EntryType::kFile) {
    const la_int64_t size = ::archive_entry_size(from);
    if (size < 0) return refuse("its size is negative");
    to.size = static_cast<uint64_t>(size);
  }
  ::archive_entry_xattr_reset(from);
  const char* name = nullptr;
  const void* value = nullptr;
  size_t size = 0;
  while (::archive_entry_xattr_next(from, &name, &value, &size) == ARCHIVE_OK) {
    to.xattrs.emplace_back(Text(name), std::string(static_cast<const char*>(value), size));
  }
  // access and default ACLs hold names of users of another machine; mode bits have been taken
  // above.
  if (::archive_entry_acl_count(from, ARCHIVE_ENTRY_ACL_TYPE_POSIX1E) > 3) {
    warnings_.Add(
        fmt::format("member \"{}\": its access control list is left out", Printable(to.path)));
  }
  return Ok();
}

}  // namespace dsec::image
