// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <sqlite3.h>

#include "base/rng.h"
#include "image/byte_source.h"
#include "image/catalog.h"
#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/layer.h"
#include "image/oci_json.h"
#include "image/path.h"
#include "image/tar_source.h"
#include "image/testing/archives.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using testing::MakeTar;

// --- names, manifests ---

TEST(LayerName, Valid_SplitsAtTheTag) {
  EXPECT_EQ(ParseLayerName("debian:12")->str(), "debian:12");
  EXPECT_EQ(ParseLayerName("debian")->str(), "debian:latest");
  EXPECT_EQ(ParseLayerName("team/py3.11-x_y:V1.0_b-2")->tag, "V1.0_b-2");
}

TEST(LayerName, Malformed_NamesTheField) {
  for (const char* text : {"", ":", "a:", ":x", "A:1", "/a:1", "a/:1", "a b:1", "a:.x", "a:-x",
                           "a:x y", "sha256:abc", "a\n:1", "../a:1", "a:x/y"}) {
    auto parsed = ParseLayerName(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.error().reason(), "layer.bad_name");
    EXPECT_EQ(parsed.error().field(), "name");
  }
  EXPECT_FALSE(ParseLayerName(std::string(129, 'a')).ok());
}

Manifest Example() {
  Manifest manifest;
  manifest.meta = {std::string(64, 'a'), 4096};
  manifest.blob = {std::string(64, 'b'), 123456};
  manifest.chunks = {262144, std::string(64, 'c')};
  manifest.config.env = {"PATH=/bin", "X=\"quoted\""};
  manifest.config.user = "1000";
  return manifest;
}

TEST(Manifest, Encode_IsCanonicalAndParsesBack) {
  const Manifest manifest = Example();
  const std::string text = manifest.Encode();
  EXPECT_EQ(text, R"({"blob":{"chunks":{"sha256":")" + std::string(64, 'c') +
                      R"(","size":262144},"sha256":")" + std::string(64, 'b') +
                      R"(","size":123456},)" +
                      R"("config":{"cmd":[],"entrypoint":[],"env":["PATH=/bin","X=\"quoted\""],)" +
                      R"("user":"1000","workdir":""},"format":3,"kind":"base",)" +
                      R"("meta":{"sha256":")" + std::string(64, 'a') + R"(","size":4096}})");
  EXPECT_EQ(*Manifest::Parse(text), manifest);
  EXPECT_EQ(manifest.Id().str(), "sha256:" + Sha256Hex(text));
}

TEST(Manifest, Older_HaveNoChunks) {
  for (const int format : {1, 2}) {
    Manifest manifest = Example();
    manifest.format = format;
    manifest.chunks = {};
    EXPECT_EQ(*Manifest::Parse(manifest.Encode()), manifest);
    EXPECT_EQ(ChunkTable::Parse(manifest, "").error().reason(), "layer.unverifiable");
    // What a later format brings is not of this one.
    manifest.chunks = Example().chunks;
    EXPECT_EQ(Manifest::Parse(manifest.Encode()).error().reason(), "layer.corrupt");
  }
}

TEST(Manifest, ChunksOfNoSize_AreCorrupt) {
  for (const uint32_t bytes : {0u, 1u, 4096u, 65535u, 300000u, 8u << 20}) {
    Manifest manifest = Example();
    manifest.chunks.bytes = bytes;
    EXPECT_EQ(Manifest::Parse(manifest.Encode()).error().reason(), "layer.corrupt") << bytes;
  }
}

TEST(ChunkTable, OfABlob_MatchesItsChunksAlone) {
  Rng rng(7);
  for (const size_t size :
       {size_t{0}, size_t{4096}, size_t{65536}, size_t{65537}, size_t{300000}}) {
    std::vector<uint8_t> blob(size);
    for (auto& byte : blob) byte = static_cast<uint8_t>(rng.Next());
    BlobHasher hasher(65536);
    // In pieces that end anywhere.
    for (size_t done = 0; done < size;) {
      const size_t step = std::min<size_t>(size - done, 1 + rng.Below(70000));
      hasher.Update({blob.data() + done, step});
      done += step;
    }
    auto sums = hasher.Finish();
    EXPECT_EQ(sums.sha256, Sha256Hex({reinterpret_cast<const char*>(blob.data()), size}));
    Manifest manifest = Example();
    manifest.blob = {sums.sha256, size};
    manifest.chunks = {65536, Sha256Hex(sums.table)};
    const auto table = ChunkTable::Parse(manifest, sums.table);
    ASSERT_TRUE(table.ok()) << table.error().ToString();
    EXPECT_EQ(table->count(), (size + 65535) / 65536);
    for (uint64_t chunk = 0; chunk < table->count(); ++chunk) {
      std::span<uint8_t> bytes(blob.data() + table->OffsetOf(chunk), table->SizeOf(chunk));
      EXPECT_TRUE(table->Matches(chunk, bytes));
      EXPECT_FALSE(table->Matches(chunk, bytes.first(bytes.size() - 1)));
      EXPECT_FALSE(table->Matches(chunk + 1, bytes));
      bytes[rng.Below(bytes.size())] ^= 1;
      EXPECT_FALSE(table->Matches(chunk, bytes));
    }
    for (std::string other : {sums.table + "x", sums.table.substr(0, sums.table.size() / 2)}) {
      if (other.size() == sums.table.size()) continue;  // of the empty blob
      EXPECT_EQ(ChunkTable::Parse(manifest, other).error().reason(), "layer.corrupt");
    }
    manifest.blob.size += 65536;
    EXPECT_EQ(ChunkTable::Parse(manifest, sums.table).error().reason(), "layer.corrupt");
  }
}

TEST(Manifest, Id_DependsOnContentAndKindAlone) {
  Manifest a = Example();
  Manifest b = Example();
  EXPECT_EQ(a.Id(), b.Id());
  b.kind = LayerKind::kToolkit;
  EXPECT_NE(a.Id(), b.Id());
  b = Example();
  b.config.workdir = "/w";
  EXPECT_NE(a.Id(), b.Id());
}

TEST(Manifest, AnythingElse_IsCorrupt) {
  const std::string good = Example().Encode();
  for (std::string text :
       {std::string("{}"), std::string("["), good + " ", "{\"x\":1," + good.substr(1),
        std::string(good).replace(good.find("base"), 4, "cake")}) {
    auto parsed = Manifest::Parse(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.error().reason(), "layer.corrupt");
  }
}

TEST(Printable, HostileBytes_AreEscapedAndCut) {
  EXPECT_EQ(Printable("a\x1b[0m\n\xff\\"), "a\\x1b[0m\\x0a\\xff\\x5c");
  EXPECT_LT(Printable(std::string(100000, 'a')).size(), 300U);
}

// --- paths ---

TEST(CleanPath, Ordinary_BecomesRelative) {
  EXPECT_EQ(*CleanPath("./a//b/./c/", 10), "a/b/c");
  EXPECT_EQ(*CleanPath("/etc/passwd", 10), "etc/passwd");
  EXPECT_EQ(*CleanPath("", 10), "");
  EXPECT_EQ(*CleanPath("./", 10), "");
  EXPECT_EQ(*CleanPath("..foo/...", 10), "..foo/...");
}

TEST(CleanPath, Hostile_IsRefused) {
  const std::string nul("a\0b", 3);
  for (const std::string& raw :
       {std::string(".."), std::string("a/../b"), std::string("/.."), std::string("a/.."), nul,
        std::string(256, 'x'), std::string("a/b/c/d/e/f/g/h/i/j/k")}) {
    auto clean = CleanPath(raw, 10);
    ASSERT_FALSE(clean.ok()) << Printable(raw);
    EXPECT_EQ(clean.error().reason(), "layer.bad_path");
  }
  std::string longest;
  for (int i = 0; i < 20; ++i) longest += std::string(250, 'x') + "/";
  EXPECT_FALSE(CleanPath(longest, 100).ok());
}

TEST(CleanPath, AnyBytes_NeverLeadOutside) {
  EXPECT_TRUE(rc::check([](const std::vector<uint8_t>& choices) {
    std::string raw;
    for (const uint8_t choice : choices) raw += "/./..ab\n"[choice % 8];
    auto clean = CleanPath(raw, 64);
    if (!clean.ok()) return;
    RC_ASSERT(!clean->starts_with('/') && !clean->ends_with('/'));
    RC_ASSERT(("/" + *clean + "/").find("/../") == std::string::npos);
    RC_ASSERT(("/" + *clean).find("//") == std::string::npos || clean->empty());
    RC_ASSERT(*CleanPath(*clean, 64) == *clean);
  }));
}

TEST(Whiteout, Names_AreClassified) {
  EXPECT_EQ(ClassifyWhiteout("a/b")->kind, Whiteout::Kind::kNone);
  EXPECT_EQ(ClassifyWhiteout("a/.whale")->kind, Whiteout::Kind::kNone);
  EXPECT_EQ(ClassifyWhiteout("a/.wh.b")->kind, Whiteout::Kind::kRemove);
  EXPECT_EQ(ClassifyWhiteout("a/.wh.b")->target, "b");
  EXPECT_EQ(ClassifyWhiteout(".wh..wh..opq")->kind, Whiteout::Kind::kOpaque);
  EXPECT_EQ(ClassifyWhiteout(".wh..wh.plnk/1.2")->kind, Whiteout::Kind::kIgnored);
  EXPECT_EQ(ClassifyWhiteout("a/.wh..hidden")->target, ".hidden");
}

TEST(Whiteout, OfNothing_IsRefused) {
  for (const char* path : {".wh.", "a/.wh..", "a/.wh...", ".wh.a/b", "x/.wh.a/y/z"}) {
    auto whiteout = ClassifyWhiteout(path);
    ASSERT_FALSE(whiteout.ok()) << path;
    EXPECT_EQ(whiteout.error().reason(), "layer.bad_whiteout");
  }
}

// --- documents ---

const std::string kHex(64, '1');

TEST(OciIndex, Several_AreChosenByRefAndPlatform) {
  const std::string text =
      R"({"manifests":[
      {"mediaType":"m","digest":"sha256:)" +
      kHex + R"(","size":7,"platform":{"architecture":"s390x","os":"linux"}},
      {"mediaType":"m","digest":"sha256:)" +
      kHex + R"(","size":8,"annotations":{"org.opencontainers.image.ref.name":"v1"}},
      {"mediaType":"m","digest":"sha256:)" +
      kHex + R"(","size":9,"annotations":{"org.opencontainers.image.ref.name":"v2"}}]})";
  const auto list = ParseIndex(text);
  ASSERT_TRUE(list.ok()) << list.error().ToString();
  EXPECT_EQ(Choose(*list, "v2")->size, 9U);
  EXPECT_EQ(Choose(*list, "").error().reason(), "layer.ambiguous_ref");
  EXPECT_EQ(Choose(*list, "v3").error().reason(), "layer.ref_not_found");
  EXPECT_THAT(Choose(*list, "v3").error().message(), ::testing::HasSubstr("v1"));
}

TEST(OciDocuments, Malformed_NameTheField) {
  const auto field = [](const auto& result) { return result.ok() ? "ok" : result.error().field(); };
  EXPECT_EQ(field(ParseIndex("[]")), "$");
  EXPECT_EQ(field(ParseIndex("{")), "$");
  EXPECT_EQ(field(ParseIndex(R"({"manifests":3})")), "$.manifests");
  EXPECT_EQ(field(ParseIndex(R"({"manifests":[3]})")), "$.manifests[0]");
  EXPECT_EQ(field(ParseIndex(R"({"manifests":[{"digest":"sha256:../../etc/passwd","size":1}]})")),
            "$.manifests[0].digest");
  EXPECT_EQ(field(ParseIndex(R"({"manifests":[{"digest":"sha256:)" + kHex + R"(","size":-1}]})")),
            "$.manifests[0].size");
  EXPECT_EQ(field(ParseImageDocument(R"({"config":{"Env":[1]}})")), "$.config.Env");
  EXPECT_EQ(field(ParseImageDocument(R"({"config":{"User":"a\u0000b"}})")), "$.config.User");
  EXPECT_EQ(field(ParseImageDocument(R"({"rootfs":{"diff_ids":["md5:1"]}})")), "$.rootfs.diff_ids");
  EXPECT_EQ(field(ParseDockerManifest("{}", "")), "$");
  EXPECT_EQ(field(ParseDockerManifest(R"([{"Layers":[]}])", "")), "$[0].Config");
  EXPECT_EQ(ParseIndex(std::string(kMaxDocument + 1, ' ')).error().reason(), "layer.malformed");
  EXPECT_FALSE(ParseIndex(std::string(1 << 20, '[')).ok());
}

TEST(OciManifest, EncryptedLayer_IsUnsupported) {
  const std::string descriptor = R"("digest":"sha256:)" + kHex + R"(","size":1})";
  auto parsed = ParseImageManifest(
      R"({"config":{)" + descriptor +
      R"(,"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+encrypted",)" +
      descriptor + "]}");
  EXPECT_EQ(parsed.error().reason(), "layer.unsupported");
}

TEST(OciConfig, Full_IsTakenOver) {
  auto parsed = ParseImageDocument(
      R"({"config":{"Env":["A=1"],"WorkingDir":"/w","User":"u:g","Entrypoint":["/e"],"Cmd":null}})");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->config,
            (ImageConfig{
                .env = {"A=1"}, .workdir = "/w", .user = "u:g", .entrypoint = {"/e"}, .cmd = {}}));
}

// --- byte streams ---

class StringSource : public ByteSource {
 public:
  explicit StringSource(std::string data) : data_(std::move(data)) {}
  Result<std::span<const uint8_t>> Read() override {
    const size_t step = std::min<size_t>(data_.size() - at_, 10'000);
    const std::span<const uint8_t> piece(reinterpret_cast<const uint8_t*>(data_.data()) + at_,
                                         step);
    at_ += step;
    return piece;
  }

 private:
  std::string data_;
  size_t at_ = 0;
};

Result<std::string> ReadAll(ByteSource& source) {
  std::string all;
  while (true) {
    DSEC_TRY(const auto piece, source.Read());
    if (piece.empty()) return all;
    all.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
}

Result<std::string> Inflate(const std::string& data, const ImportLimits& limits = {}) {
  DSEC_TRY(auto source, InflateSource::Open(std::make_unique<StringSource>(data), limits, "t"));
  return ReadAll(*source);
}

TEST(InflateSource, EveryCompression_GivesTheBytesBack) {
  std::string data;
  for (int i = 0; i < 100'000; ++i) data += std::to_string(i);
  EXPECT_TRUE(*Inflate(data) == data);
  for (const char* program : {"gzip", "bzip2", "xz", "zstd -q"}) {
    EXPECT_TRUE(*Inflate(testing::Compress(program, data)) == data) << program;
  }
  EXPECT_TRUE(*Inflate(testing::Compress("gzip", testing::Compress("xz", data))) == data);
  EXPECT_EQ(*Inflate(""), "");
}

TEST(InflateSource, Truncated_IsMalformed) {
  std::string data = testing::Compress("gzip", std::string(100'000, 'a') + "end");
  data.resize(data.size() / 2);
  EXPECT_EQ(Inflate(data).error().reason(), "layer.malformed");
}

TEST(InflateSource, Bomb_IsRefusedEarly) {
  ImportLimits limits;
  limits.ratio_free_bytes = 1 << 20;
  const std::string bomb = testing::Compress("gzip", std::string(64 << 20, '\0'));
  auto inflated = Inflate(bomb, limits);
  ASSERT_FALSE(inflated.ok());
  EXPECT_EQ(inflated.error().reason(), "layer.bomb");
}

TEST(DigestSource, WrongContentOrLength_IsRefused) {
  const std::string data(50'000, 'q');
  DigestSource good(std::make_unique<StringSource>(data), Sha256Hex(data), data.size(), "blob");
  EXPECT_TRUE(*ReadAll(good) == data);
  DigestSource other(std::make_unique<StringSource>(data), std::string(64, '0'), data.size(),
                     "blob");
  EXPECT_EQ(ReadAll(other).error().reason(), "layer.digest_mismatch");
  DigestSource longer(std::make_unique<StringSource>(data), Sha256Hex(data), data.size() - 1,
                      "blob");
  EXPECT_EQ(ReadAll(longer).error().reason(), "layer.digest_mismatch");
}

// --- tar ---

Result<std::vector<Entry>> Entries(const std::string& tar, Warnings& warnings) {
  DSEC_TRY(auto source, TarSource::Open(std::make_unique<StringSource>(tar), "t", warnings));
  std::vector<Entry> list;
  while (true) {
    Entry entry;
    DSEC_TRY(const bool more, source->Next(entry));
    if (!more) return list;
    list.push_back(std::move(entry));
  }
}

TEST(TarSource, Names_AreBytesAndNotNormalised) {
  // "e" with a combining accent and the composed letter: two names, in every header format and
  // locale.
  const std::vector<std::string> names = {"caf\xc3\xa9", "cafe\xcc\x81", "bad\xff\xfe",
                                          " lead",       "-x",           "a\nb"};
  ASSERT_NE(::setlocale(LC_ALL, "C.UTF-8"), nullptr);
  for (const bool pax : {false, true}) {
    std::vector<testing::Member> members;
    for (const std::string& name : names) {
      testing::Member member = testing::File(pax ? "short" : name);
      if (pax) member.pax = {{"path", name}};
      members.push_back(member);
    }
    Warnings warnings;
    const auto entries = Entries(MakeTar(members), warnings);
    ASSERT_TRUE(entries.ok()) << entries.error().ToString();
    std::vector<std::string> found;
    for (const Entry& entry : *entries) found.push_back(entry.path);
    EXPECT_EQ(found, names) << pax;
    EXPECT_EQ(warnings.count(), 0U);
  }
  ::setlocale(LC_ALL, "C");
}

TEST(TarSource, Attributes_AreExact) {
  testing::Member member = testing::File("f", "data");
  member.mode = 06755;
  member.uid = 3'000'000'000;
  member.gid = 4'294'967'294;
  member.pax = {{"mtime", "1234567890.123456789"},
                {"SCHILY.xattr.user.k", std::string("v\0w", 3)},
                {"SCHILY.xattr.security.capability", "cap"}};
  Warnings warnings;
  auto entries = Entries(MakeTar({member, testing::Device("d", 7, 300)}), warnings);
  ASSERT_TRUE(entries.ok()) << entries.error().ToString();
  const Entry& entry = entries->front();
  EXPECT_EQ(entry.mode, 06755U);
  EXPECT_EQ(entry.uid, 3'000'000'000U);
  EXPECT_EQ(entry.gid, 4'294'967'294U);
  EXPECT_EQ(entry.mtime_sec, 1234567890);
  EXPECT_EQ(entry.mtime_nsec, 123456789U);
  EXPECT_THAT(entry.xattrs,
              ::testing::UnorderedElementsAre(::testing::Pair("user.k", std::string("v\0w", 3)),
                                              ::testing::Pair("security.capability", "cap")));
  EXPECT_EQ(entries->back().dev_minor, 300U);
}

TEST(TarSource, HugeHeader_IsRefusedWithBoundedMemory) {
  testing::Member member = testing::File("f");
  member.pax = {{"comment", std::string(20 << 20, 'x')}};
  Warnings warnings;
  auto entries = Entries(MakeTar({testing::File("before"), member}), warnings);
  ASSERT_FALSE(entries.ok());
  EXPECT_THAT(std::string(entries.error().reason()),
              ::testing::AnyOf("layer.header_too_large", "layer.malformed"));
  EXPECT_THAT(entries.error().message(), ::testing::HasSubstr("before"));
}

TEST(TarSource, EndlessSparseMap_IsRefusedWithBoundedMemory) {
  // GNU sparse format 1.0: the map is text in front of the data and may be as long as the member
  // says.
  std::string map = "5000000\n";
  while (map.size() < (20 << 20)) map += "1\n0\n";
  testing::Member member = testing::File("f", map);
  member.pax = {{"GNU.sparse.major", "1"},
                {"GNU.sparse.minor", "0"},
                {"GNU.sparse.name", "f"},
                {"GNU.sparse.realsize", "100"}};
  Warnings warnings;
  auto source = TarSource::Open(std::make_unique<StringSource>(MakeTar({member})), "t", warnings);
  ASSERT_TRUE(source.ok());
  Entry entry;
  auto next = (*source)->Next(entry);
  Result<DataRun> data = next.ok() ? (*source)->ReadData() : Result<DataRun>(next.error());
  ASSERT_FALSE(data.ok());
  EXPECT_EQ(data.error().reason(), "layer.header_too_large");
}

TEST(TarSource, Garbage_IsMalformed) {
  Warnings warnings;
  EXPECT_EQ(Entries(std::string(4096, 'g'), warnings).error().reason(), "layer.malformed");
  EXPECT_EQ(Entries("", warnings).error().reason(), "layer.malformed");
  std::string cut = MakeTar({testing::File("f", std::string(5000, 'x'))});
  cut.resize(2000);
  EXPECT_EQ(Entries(cut, warnings).error().reason(), "layer.malformed");
}

// --- catalogue ---

class CatalogTest : public ::testing::Test {
 protected:
  CatalogTest() : folder_(*os::TempDir::Create("dsec-timg-")) {
    catalog_ = *Catalog::Open(folder_.path() + "/catalog.db");
  }

  static LayerInfo Layer(char digit, LayerKind kind) {
    LayerInfo layer;
    layer.id = LayerId("sha256:" + std::string(64, digit));
    layer.kind = kind;
    layer.meta_bytes = 1;
    layer.source = "test";
    layer.config.user = "u";
    return layer;
  }

  os::TempDir folder_;
  std::unique_ptr<Catalog> catalog_;
};

TEST_F(CatalogTest, Tag_MovesAndIdsStay) {
  const LayerName name{"a", "1"};
  ASSERT_TRUE(catalog_->Put(Layer('1', LayerKind::kBase), name).ok());
  ASSERT_TRUE(catalog_->Put(Layer('2', LayerKind::kBase), name).ok());
  EXPECT_EQ(catalog_->Find("a:1")->id, Layer('2', LayerKind::kBase).id);
  auto old = catalog_->Find("sha256:" + std::string(64, '1'));
  ASSERT_TRUE(old.ok());
  EXPECT_TRUE(old->names.empty());
  EXPECT_EQ(old->config.user, "u");
  EXPECT_EQ(catalog_->Find("sha256:111111111111")->id, old->id);
  EXPECT_EQ(catalog_->Find("sha256:1111").error().reason(), "layer.not_found");
  EXPECT_EQ(catalog_->Find("a:2").error().reason(), "layer.not_found");
}

TEST_F(CatalogTest, NameOfAnotherKind_IsRefusedAndNothingChanges) {
  ASSERT_TRUE(catalog_->Put(Layer('1', LayerKind::kBase), LayerName{"a", "1"}).ok());
  auto put = catalog_->Put(Layer('2', LayerKind::kToolkit), LayerName{"a", "1"});
  EXPECT_EQ(put.error().reason(), "layer.kind_conflict");
  EXPECT_FALSE(catalog_->Find("sha256:" + std::string(64, '2')).ok());
}

TEST_F(CatalogTest, List_FiltersByKindPrefixAndLabel) {
  LayerInfo labelled = Layer('1', LayerKind::kBase);
  labelled.labels = {{"team", "a"}, {"x", "y"}};
  ASSERT_TRUE(catalog_->Put(labelled, LayerName{"py", "1"}).ok());
  ASSERT_TRUE(catalog_->Put(labelled, LayerName{"py", "2"}).ok());
  ASSERT_TRUE(catalog_->Put(Layer('2', LayerKind::kToolkit), LayerName{"kit", "1"}).ok());
  ASSERT_TRUE(catalog_->Put(Layer('3', LayerKind::kToolkit), std::nullopt).ok());
  EXPECT_EQ(catalog_->List({})->size(), 3U);
  EXPECT_EQ(catalog_->List({.kind = LayerKind::kToolkit})->size(), 2U);
  EXPECT_EQ(catalog_->List({.prefix = "py:"})->size(), 1U);
  EXPECT_EQ(catalog_->List({.prefix = "sha256:2"})->size(), 1U);
  EXPECT_EQ(catalog_->List({.prefix = "%"})->size(), 0U);
  EXPECT_EQ(catalog_->List({.labels = {{"team", "a"}, {"x", "y"}}})->size(), 1U);
  EXPECT_EQ(catalog_->List({.labels = {{"team", "b"}}})->size(), 0U);
  const LayerInfo found = catalog_->List({.kind = LayerKind::kBase})->front();
  EXPECT_THAT(found.names, ::testing::ElementsAre("py:1", "py:2"));
  EXPECT_EQ(found.labels.at("team"), "a");
}

TEST_F(CatalogTest, Pages_ShowEveryLayerOnce) {
  constexpr uint64_t kLayers = 2500;  // more than what counts as few
  // As another process would, in one transaction: a Put each would wait for the disk 2,500 times.
  ASSERT_TRUE(catalog_->Put(Layer('f', LayerKind::kBase), std::nullopt).ok());
  sqlite3* database = nullptr;
  ASSERT_EQ(::sqlite3_open((folder_.path() + "/catalog.db").c_str(), &database), SQLITE_OK);
  char* message = nullptr;
  ::sqlite3_exec(database, R"sql(
      BEGIN;
      CREATE TEMP TABLE made AS WITH RECURSIVE counter(n) AS (
          SELECT 0 UNION ALL SELECT n + 1 FROM counter WHERE n < 2499)
        SELECT n, printf('sha256:%064x', n * 7919) AS made_id FROM counter;
      INSERT INTO layers SELECT made_id, iif(n % 2 = 0, 'base', 'workspace'), meta_bytes, blob_bytes, entries,
          content_bytes, created_unix_ms, source, config FROM made, layers;
      DELETE FROM layers WHERE id NOT IN (SELECT made_id FROM made);
      INSERT INTO names SELECT iif(n % 2 = 0, 'even', 'odd') || '/l' || n, '1', made_id FROM made;
      INSERT INTO labels SELECT made_id, 'all', 'yes' FROM made;
      INSERT INTO labels SELECT made_id, 'rest', n % 100 FROM made;
      COMMIT;)sql",
                 nullptr, nullptr, &message);
  EXPECT_EQ(message, nullptr) << message;
  ::sqlite3_close(database);
  const auto count = [&](ListFilter filter) {
    uint64_t found = 0;
    filter.limit = 90;
    while (true) {
      const auto page = catalog_->List(filter);
      EXPECT_TRUE(page.ok());
      found += page->size();
      if (page->size() < filter.limit) return found;
      filter.after = page->back().id.str();
    }
  };
  EXPECT_EQ(count({}), kLayers);
  EXPECT_EQ(count({.kind = LayerKind::kWorkspace}), kLayers / 2);
  EXPECT_EQ(count({.prefix = "even/"}), kLayers / 2);
  EXPECT_EQ(count({.prefix = "even/l24:"}), 1U);
  EXPECT_EQ(count({.prefix = "s"}), kLayers);
  EXPECT_EQ(count({.prefix = "sha256:00"}), kLayers);
  EXPECT_EQ(count({.labels = {{"all", "yes"}}}), kLayers);
  EXPECT_EQ(count({.labels = {{"all", "yes"}, {"rest", "7"}}}), kLayers / 100);
  EXPECT_EQ(count({.kind = LayerKind::kBase, .labels = {{"rest", "7"}}}), 0U);
}

TEST_F(CatalogTest, Removal_TakesNamesAlong) {
  ASSERT_TRUE(catalog_->Put(Layer('1', LayerKind::kBase), LayerName{"a", "1"}).ok());
  ASSERT_TRUE(catalog_->Put(Layer('1', LayerKind::kBase), LayerName{"a", "2"}).ok());
  ASSERT_TRUE(catalog_->RemoveName({"a", "1"}).ok());
  EXPECT_FALSE(catalog_->Find("a:1").ok());
  ASSERT_TRUE(catalog_->RemoveLayer(Layer('1', LayerKind::kBase).id).ok());
  EXPECT_FALSE(catalog_->Find("a:2").ok());
  EXPECT_TRUE(catalog_->List({})->empty());
}

TEST_F(CatalogTest, TwoProcesses_SeeEachOther) {
  auto second = Catalog::Open(folder_.path() + "/catalog.db");
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE((*second)->created());
  EXPECT_TRUE(catalog_->created());
  ASSERT_TRUE((*second)->Put(Layer('1', LayerKind::kBase), LayerName{"a", "1"}).ok());
  EXPECT_TRUE(catalog_->Find("a:1").ok());
}

TEST_F(CatalogTest, Find_IsNeverBehindAnotherProcess) {
  auto second = Catalog::Open(folder_.path() + "/catalog.db");
  ASSERT_TRUE(second.ok());
  const LayerName name{"moving", "1"};
  for (char digit : {'1', '2', '1', '3'}) {
    const LayerInfo layer = Layer(digit, LayerKind::kBase);
    Catalog& writer = digit == '2' ? *catalog_ : **second;
    ASSERT_TRUE(writer.Put(layer, name).ok());
    for (Catalog* reader : {catalog_.get(), second->get()}) {
      for (int i = 0; i < 2; ++i) {
        const auto found = reader->Find("moving:1");
        ASSERT_TRUE(found.ok());
        EXPECT_EQ(found->id, layer.id);
        EXPECT_EQ(reader->Find(layer.id.str())->names, std::vector<std::string>{"moving:1"});
      }
    }
  }
  ASSERT_TRUE((*second)->RemoveName(name).ok());
  EXPECT_EQ(catalog_->Find("moving:1").error().reason(), "layer.not_found");
  ASSERT_TRUE(catalog_->RemoveLayer(Layer('1', LayerKind::kBase).id).ok());
  EXPECT_EQ((*second)->Find(Layer('1', LayerKind::kBase).id.str()).error().reason(),
            "layer.not_found");
}

TEST_F(CatalogTest, ForeignSchema_IsRefused) {
  const std::string path = folder_.path() + "/catalog.db";
  catalog_.reset();
  const std::string command = "sqlite3 " + path + " 'PRAGMA user_version = 99'";
  if (std::system(command.c_str()) != 0) GTEST_SKIP() << "the sqlite3 shell is not installed";
  EXPECT_EQ(Catalog::Open(path).error().reason(), "layer.catalog_version");
}

}  // namespace
}  // namespace dsec::image
