// SPDX-License-Identifier: Apache-2.0
// Everything of an import that is a function of hostile bytes alone. The first byte picks the
// parser.
#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "image/chunk_table.h"
#include "image/content_order.h"
#include "image/erofs_format.h"
#include "image/erofs_writer.h"
#include "image/layer.h"
#include "image/layer_trace.h"
#include "image/node_lease.h"
#include "image/oci_json.h"
#include "image/path.h"
#include "image/share_meta.h"
#include "image/stored_form.h"
#include "image/tar_source.h"
#include "image/tree_builder.h"
#include "os/file.h"

namespace dsec::image {
namespace {

class BytesSource : public ByteSource {
 public:
  explicit BytesSource(std::span<const uint8_t> data) : data_(data) {}
  Result<std::span<const uint8_t>> Read() override {
    const auto piece = data_.first(std::min<size_t>(data_.size(), 700));
    data_ = data_.subspan(piece.size());
    return piece;
  }

 private:
  std::span<const uint8_t> data_;
};

void CheckPath(std::string_view text) {
  const auto clean = CleanPath(text, 64);
  if (!clean.ok()) return;
  DSEC_CHECK(!clean->starts_with('/'));
  DSEC_CHECK(("/" + *clean + "/").find("/../") == std::string::npos);
  DSEC_CHECK(clean->find('\0') == std::string::npos);
  const SplitPath split = Split(*clean);
  DSEC_CHECK(split.name.find('/') == std::string_view::npos);
  const auto whiteout = ClassifyWhiteout(*clean);
  if (!whiteout.ok() || whiteout->kind != Whiteout::Kind::kRemove) return;
  DSEC_CHECK(!whiteout->target.empty() && whiteout->target != "." && whiteout->target != "..");
  DSEC_CHECK(whiteout->target.find('/') == std::string_view::npos);
}

void ReadTar(std::span<const uint8_t> data, bool inflate) {
  Warnings warnings;
  std::unique_ptr<ByteSource> bytes = std::make_unique<BytesSource>(data);
  if (inflate) {
    ImportLimits limits;
    limits.ratio_free_bytes = 1 << 20;
    auto plain = InflateSource::Open(std::move(bytes), limits, "fuzz");
    if (!plain.ok()) return;
    bytes = *std::move(plain);
  }
  auto source = TarSource::Open(std::move(bytes), "fuzz", warnings);
  if (!source.ok()) return;
  Entry entry;
  for (int members = 0; members < 1000; ++members) {
    auto more = (*source)->Next(entry);
    if (!more.ok() || !*more) return;
    uint64_t end = 0;
    for (int runs = 0; runs < 100; ++runs) {
      auto run = (*source)->ReadData();
      if (!run.ok() || run->bytes.empty()) break;
      DSEC_CHECK(run->offset >= end);
      end = run->offset + run->bytes.size();
    }
  }
}

// What is compressed comes back, and what is no compressed piece is told from one.
void Unpack(std::span<const uint8_t> data) {
  const std::span<const uint8_t> piece = data.first(std::min(data.size(), Compressor::kMaxPiece));
  std::vector<uint8_t> out(piece.size());
  static_cast<void>(Compressor::Decompress(piece, out));
  if (piece.empty()) return;
  static Compressor compressor({Compression::kDefault});
  const auto blocks = compressor.Compress(piece);
  if (blocks.empty()) return;
  DSEC_CHECK(blocks.size() % Compressor::kBlock == 0 && blocks.size() < piece.size());
  DSEC_CHECK(Compressor::Decompress(blocks, out).ok());
  DSEC_CHECK(std::equal(out.begin(), out.end(), piece.begin()));
}

// From tar to an image: whatever the archive, the tree is whole and the image well-formed.
void BuildTar(std::span<const uint8_t> data, bool keep_whiteouts, const Compression& compression) {
  static const os::TempDir folder = *os::TempDir::Create("dsec-fuzz-");
  ::unlinkat(folder.fd(), kBlobName, 0);
  ::unlinkat(folder.fd(), kMetaName, 0);
  Warnings warnings;
  auto source = TarSource::Open(std::make_unique<BytesSource>(data), "fuzz", warnings);
  if (!source.ok()) return;
  auto chunks = *ChunkStore::Create(folder.fd(), kBlobName, compression);
  Tree tree;
  const ImportLimits limits{.max_bytes = 1 << 24, .max_entries = 1000, .max_depth = 16};
  TreeBuilder builder(tree, *chunks, {limits, keep_whiteouts}, warnings);
  Entry entry;
  builder.BeginLayer(true);
  for (uint64_t members = 0;; ++members) {
    // A second layer over the first.
    if (members == 5) builder.BeginLayer(true);
    auto more = (*source)->Next(entry);
    if (!more.ok() || !*more) break;
    if (!builder.Add(entry, **source).ok()) return;
  }
  DSEC_CHECK(SettleContent(tree, *chunks).ok());
  PlaceContent(tree, {}, *chunks, warnings);
  const auto meta = *os::OpenAt(folder.fd(), kMetaName, O_RDWR | O_CREAT, 0600);
  const auto image = WriteErofs(tree, *chunks, meta.get(), nullptr);
  DSEC_CHECK(image.ok() && image->digest.size % erofs::kBlockBytes == 0);
  DSEC_CHECK(CheckSuperblock(meta.get()).ok());
  const auto blob = chunks->Finish(nullptr);
  DSEC_CHECK(blob.ok() && blob->digest.size <= limits.max_bytes + 1000 * erofs::kBlockBytes);
}

// A size that the runs of a form may fit: of what is no form, any.
uint64_t FormBytes(std::string_view text) {
  const auto form = nlohmann::json::parse(text, nullptr, false);
  uint64_t blocks = 0;
  if (!form.is_object() || !form.value("runs", nlohmann::json()).is_array()) return 4096;
  for (const auto& run : form["runs"]) {
    if (run.is_array() && run.size() == 3 && run[2].is_number_unsigned())
      blocks += run[2].get<uint64_t>();
  }
  return blocks * StoredForm::kBlock;
}

// Metadata that nothing has proved, for a form of one other file; one byte says how many blocks the
// runs have.
void RewriteMeta(std::string_view text) {
  if (text.empty()) return;
  const auto blocks = static_cast<uint32_t>(static_cast<unsigned char>(text[0]) + 1);
  std::vector<uint8_t> meta(text.begin() + 1, text.end());
  meta.resize((meta.size() + erofs::kBlockBytes - 1) / erofs::kBlockBytes * erofs::kBlockBytes);
  const StoredForm form{{{kOwnName, 1 << 20}, {StoredForm::SharedName(1), 2 << 20}},
                        {{0, 0, blocks}, {1, 7, blocks}, {0, blocks, 0x80000}}};
  std::vector<uint8_t> copy = meta;
  const auto chunks = ChunksOf(copy);
  DSEC_CHECK(copy == meta);
  const auto shared = ShareMeta(copy, form);
  if (!shared.ok()) return;
  DSEC_CHECK(copy.size() == meta.size());
  // Two calls give the same.
  std::vector<uint8_t> again = meta;
  DSEC_CHECK(ShareMeta(again, form).ok() && again == copy);
}

}  // namespace
}  // namespace dsec::image

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec::image;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 15) {
    case 0: {
      const auto index = ParseIndex(text);
      if (index.ok()) static_cast<void>(Choose(*index, "ref"));
      break;
    }
    case 1:
      static_cast<void>(ParseImageManifest(text));
      break;
    case 2:
      static_cast<void>(ParseImageDocument(text));
      break;
    case 3:
      static_cast<void>(ParseDockerManifest(text, ""));
      break;
    case 4: {
      const auto manifest = Manifest::Parse(text);
      DSEC_CHECK(!manifest.ok() || manifest->Encode() == text);
      break;
    }
    case 5:
      CheckPath(text);
      break;
    case 6:
      ReadTar({data + 1, size - 1}, false);
      BuildTar({data + 1, size - 1}, false, {});
      BuildTar({data + 1, size - 1}, true, {Compression::kLowest});
      break;
    case 7:
      ReadTar({data + 1, size - 1}, true);
      break;
    case 8: {
      const auto name = ParseLayerName(text);
      DSEC_CHECK(!name.ok() || ParseLayerName(name->str())->str() == name->str());
      break;
    }
    case 10:
      Unpack({data + 1, size - 1});
      break;
    case 11: {
      const auto trace = LayerTrace::Parse(text);
      if (!trace.ok()) break;
      DSEC_CHECK(trace->Encode() == text);
      DSEC_CHECK(ParseFirstTouch(trace->Lines()).ok());
      // Larger ones differ in nothing but the time that they take.
      if (trace->bytes() > (1 << 30)) break;
      uint64_t planned = 0;
      for (const FirstTouch& part : PlanReads(*trace, 1 << 20)) {
        DSEC_CHECK(part.length > 0 && part.length <= 1 << 20);
        planned += part.length;
      }
      DSEC_CHECK(planned <= trace->bytes() + (trace->parts.size() << 16));
      LayerTrace merged = LayerTrace::Merge(*trace, *trace);
      DSEC_CHECK(merged.bytes() <= trace->bytes());
      break;
    }
    case 12: {
      // A line of a manifest, then the table that it is to prove.
      const size_t end = text.find('\n');
      const auto manifest = Manifest::Parse(text.substr(0, end));
      if (!manifest.ok() || end == text.npos) break;
      const auto table = ChunkTable::Parse(*manifest, std::string(text.substr(end + 1)));
      if (!table.ok()) break;
      for (uint64_t chunk = 0; chunk < table->count(); ++chunk)
        DSEC_CHECK(table->OffsetOf(chunk) + table->SizeOf(chunk) <= manifest->blob.size);
      break;
    }
    case 13:
      RewriteMeta(text);
      break;
    case 14: {
      const auto form = StoredForm::Parse(text, FormBytes(text));
      if (!form.ok()) break;
      DSEC_CHECK(form->Encode() == text);
      const FormMap map(*form);
      uint64_t block = 0;
      for (const StoredForm::Run& run : form->runs) {
        const FormMap::Place place = map.Find(block + run.blocks - 1);
        DSEC_CHECK(place.file == run.file && place.block == run.block + run.blocks - 1);
        DSEC_CHECK((uint64_t{place.block} + place.blocks) * StoredForm::kBlock <=
                   form->files[place.file].size);
        block += run.blocks;
      }
      DSEC_CHECK(map.Find(block).blocks == 0);
      break;
    }
    default: {
      const auto lease = Lease::Parse(text);
      DSEC_CHECK(!lease.ok() || lease->Encode() == text);
      break;
    }
  }
  return 0;
}
