// SPDX-License-Identifier: Apache-2.0
#include "image/compress_probe.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "image/chunk_store.h"
#include "image/content_order.h"
#include "image/erofs_mount.h"
#include "image/erofs_writer.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kContentBytes = 40'000;
constexpr uint32_t kReadAheadKib = 128;

std::string Content() {
  std::string text;
  for (int i = 0; text.size() < kContentBytes; ++i)
    text += fmt::format("line {} of the probe\n", i);
  return text;
}

Result<void> Try(int folder) {
  const std::string content = Content();
  DSEC_TRY(const auto chunks, ChunkStore::Create(folder, kBlobName, {Compression::kDefault}));
  chunks->BeginFile();
  DSEC_TRY_VOID(
      chunks->Write(0, {reinterpret_cast<const uint8_t*>(content.data()), content.size()}));
  Tree tree;
  Inode file;
  file.mode = S_IFREG | 0444;
  file.size = content.size();
  DSEC_TRY(file.data, chunks->EndFile(content.size()));
  tree.Link(Tree::kRoot, "file", tree.AddInode(file), 1);
  Warnings warnings;
  DSEC_TRY_VOID(SettleContent(tree, *chunks));
  PlaceContent(tree, {}, *chunks, warnings);
  DSEC_TRY(const auto meta, os::OpenAt(folder, kMetaName, O_RDWR | O_CREAT | O_EXCL, 0600));
  DSEC_TRY_VOID(WriteErofs(tree, *chunks, meta.get(), nullptr));
  DSEC_TRY_VOID(chunks->Finish(nullptr));
  DSEC_TRY(const auto blob, os::OpenAt(folder, kBlobName, O_RDONLY));
  DSEC_TRY(const auto mount, MountLayer(meta.get(), {{blob.get()}}, kReadAheadKib));
  DSEC_TRY(const std::string read, os::ReadFile(mount->get(), "file", 2 * kContentBytes));
  if (read == content) return Ok();
  return Error(Code::kInternal, "layer.corrupt", "the kernel reads other content than was written");
}

}  // namespace

Result<void> ProbeCompressedLayers(const std::string& dir) {
  DSEC_TRY(const auto parent, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  const std::string name = fmt::format(".probe-{}.compressed", ::getpid());
  static_cast<void>(os::RemoveTree(parent.get(), name.c_str()));  // of a process that was killed
  DSEC_TRY_VOID(os::MakeDir(parent.get(), name.c_str(), 0700));
  auto tried = [&]() -> Result<void> {
    DSEC_TRY(const auto folder, os::OpenAt(parent.get(), name.c_str(), O_RDONLY | O_DIRECTORY));
    return Try(folder.get());
  }();
  auto removed = os::RemoveTree(parent.get(), name.c_str());
  return tried.ok() ? std::move(removed) : std::move(tried);
}

}  // namespace dsec::image
