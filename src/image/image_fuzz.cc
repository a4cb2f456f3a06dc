// SPDX-License-Identifier: Apache-2.0
// Everything of an import that is a function of hostile bytes alone. The first byte picks the
// parser.
#include <string>
#include <string_view>

#include "base/check.h"
#include "image/layer.h"
#include "image/oci_json.h"
#include "image/path.h"
#include "image/tar_source.h"

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

}  // namespace
}  // namespace dsec::image

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec::image;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 9) {
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
      break;
    case 7:
      ReadTar({data + 1, size - 1}, true);
      break;
    default: {
      const auto name = ParseLayerName(text);
      DSEC_CHECK(!name.ok() || ParseLayerName(name->str())->str() == name->str());
      break;
    }
  }
  return 0;
}
