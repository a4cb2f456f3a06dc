// SPDX-License-Identifier: Apache-2.0
#include "image/testing/harness.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>

#include "image/tar_source.h"
#include "image/testing/archives.h"
#include "image/testing/unpacker.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image::testing {
namespace {

template <typename Target>
Result<void> Feed(Target& target, const std::vector<std::string>& tars, Warnings& warnings) {
  for (const std::string& tar : tars) {
    DSEC_TRY(auto source, TarSource::Open(std::make_unique<TextSource>(tar), "t", warnings));
    target.BeginLayer(true);
    Entry entry;
    while (true) {
      DSEC_TRY(const bool more, source->Next(entry));
      if (!more) break;
      DSEC_TRY_VOID(target.Add(entry, *source));
    }
  }
  return Ok();
}

}  // namespace

Result<std::span<const uint8_t>> TextSource::Read() {
  const size_t step = std::min(data_.size() - at_, piece_);
  const std::span<const uint8_t> piece(reinterpret_cast<const uint8_t*>(data_.data()) + at_, step);
  at_ += step;
  return piece;
}

Result<LayerId> BuildOneFile(LayerStore& store, const std::string& content,
                             const std::string& name) {
  DSEC_TRY(const auto folder, os::TempDir::Create("dsec-timg-"));
  BuildRequest request;
  request.name = name;
  request.source = SourceKind::kTar;
  request.path = folder.path() + "/layer.tar";
  WriteFile(request.path, MakeTar({File("file", content)}));
  DSEC_TRY(const BuildReport built, store.Build(request, nullptr));
  return built.layer.id;
}

Result<BuiltImage> BuildImage(const std::string& folder, const std::vector<std::string>& tars,
                              const TreeOptions& options, Warnings& warnings,
                              const std::vector<FirstTouch>& first,
                              const Compression& compression) {
  DSEC_TRY(const auto dir, os::OpenAt(AT_FDCWD, folder.c_str(), O_RDONLY | O_DIRECTORY));
  ::unlinkat(dir.get(), kMetaName, 0);
  ::unlinkat(dir.get(), kBlobName, 0);
  DSEC_TRY(const auto chunks, ChunkStore::Create(dir.get(), kBlobName, compression));
  Tree tree;
  TreeBuilder builder(tree, *chunks, options, warnings);
  DSEC_TRY_VOID(Feed(builder, tars, warnings));
  DSEC_TRY_VOID(SettleContent(tree, *chunks));
  PlaceContent(tree, first, *chunks, warnings);
  DSEC_TRY(const auto meta, os::OpenAt(dir.get(), kMetaName, O_RDWR | O_CREAT | O_EXCL, 0600));
  BuiltImage built;
  DSEC_TRY(built.meta, WriteErofs(tree, *chunks, meta.get(), nullptr));
  DSEC_TRY(built.blob, chunks->Finish(nullptr));
  DSEC_TRY_VOID(CheckSuperblock(meta.get()));
  return built;
}

Result<uint64_t> UnpackTars(const std::string& tree, const std::vector<std::string>& tars,
                            const TreeOptions& options, Warnings& warnings) {
  DSEC_TRY(auto dir, os::OpenAt(AT_FDCWD, tree.c_str(), O_RDONLY | O_DIRECTORY));
  Unpacker unpacker(std::move(dir), {options.limits, options.keep_whiteouts}, warnings);
  DSEC_TRY_VOID(Feed(unpacker, tars, warnings));
  return unpacker.Finish();
}

Result<os::UniqueFd> MountImage(const std::string& folder) {
  DSEC_TRY(auto context, os::FsContext::Open("erofs"));
  DSEC_TRY_VOID(context.SetString("source", (folder + "/" + kMetaName).c_str()));
  DSEC_TRY_VOID(context.SetString("device", (folder + "/" + kBlobName).c_str()));
  DSEC_TRY_VOID(context.SetFlag("ro"));
  return std::move(context).Mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
}

std::string FsckImage(const std::string& folder) {
  const std::string log = folder + "/fsck.log";
  // Version 1.5 finds compressed content in the first device alone: all in a row are one.
  const auto meta = os::OpenAt(AT_FDCWD, (folder + "/" + kMetaName).c_str(), O_RDONLY);
  const bool in_a_row = meta.ok() && HasCompressedFiles(meta->get());
  std::string image = kMetaName;
  if (in_a_row) {
    image = "in_a_row";
    const std::string join =
        fmt::format("cd {} && cat {} {} > {}", folder, kMetaName, kBlobName, image);
    if (std::system(join.c_str()) != 0) return "cannot write the devices in a row";
  }
  const std::string command = fmt::format(
      "fsck.erofs --device={0}/{1} --extract {0}/{2} > {3} 2>&1", folder, kBlobName, image, log);
  const int status = std::system(command.c_str());
  if (in_a_row) ::unlink((folder + "/" + image).c_str());
  auto text = os::ReadFile(AT_FDCWD, log.c_str(), 1 << 20);
  ::unlink(log.c_str());
  if (!text.ok()) return text.error().ToString();
  // It says "No errors found" also after some of its own complaints.
  const bool good = status == 0 && text->find("<E>") == std::string::npos &&
                    text->find("No errors found") != std::string::npos;
  return good ? "" : *text;
}

}  // namespace dsec::image::testing
