// SPDX-License-Identifier: Apache-2.0
#include "image/pack_rules.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "image/overlay.h"

namespace dsec::image {
namespace {

bool Scrubs(const std::string& pattern, const std::string& path) {
  PackRules rules;
  rules.default_scrub = false;
  rules.scrub = {pattern};
  EXPECT_TRUE(rules.Check().ok()) << pattern;
  return PackFilter(rules).Scrub(path);
}

TEST(PackFilter, Pattern_WithSlashIsAWholePathElseANameAnywhere) {
  EXPECT_TRUE(Scrubs("/tmp/*", "tmp/a"));
  EXPECT_FALSE(Scrubs("/tmp/*", "tmp"));
  EXPECT_FALSE(Scrubs("/tmp/*", "var/tmp/a"));
  EXPECT_FALSE(Scrubs("/tmp/*", "tmp/a/b")) << "its folder is asked about first";
  EXPECT_TRUE(Scrubs("/home/*/.ssh", "home/x/.ssh"));
  EXPECT_TRUE(Scrubs(".cache", "root/.cache"));
  EXPECT_TRUE(Scrubs("*.log", "a/b/c.log"));
  EXPECT_FALSE(Scrubs("*.log", "a.log/b"));
}

TEST(PackFilter, Defaults_LeaveResidueOutAndSourcesIn) {
  PackFilter filter{PackRules()};
  for (const char* path : {"etc/hosts", "tmp/x", "var/log/dpkg.log", "root/.bash_history",
                           "home/u/.cache", "var/cache/apt/archives", "run/lock"}) {
    EXPECT_TRUE(filter.Scrub(path)) << path;
  }
  EXPECT_EQ(filter.scrubbed(), 7U);
  for (const char* path : {"etc", "tmp", "etc/passwd", "work/tmp/x", "work/__pycache__",
                           "work/hosts", "var/lib/dpkg/status"}) {
    EXPECT_FALSE(filter.Scrub(path)) << path;
  }
  EXPECT_EQ(filter.scrubbed(), 7U);
}

TEST(PackFilter, Canary_NamesPathAndRule) {
  PackRules rules;
  rules.canary_paths = {"*.pem", "/work/answers"};
  const PackFilter filter(rules);
  EXPECT_TRUE(filter.CheckPath("work/answer").ok());
  const auto hit = filter.CheckPath("work/answers");
  ASSERT_FALSE(hit.ok());
  EXPECT_EQ(hit.error().reason(), "pack.canary");
  EXPECT_EQ(hit.error().field(), "canary_paths[1]");
  EXPECT_NE(hit.error().message().find("\"work/answers\""), std::string::npos);
  EXPECT_EQ(filter.CheckPath("a/key.pem").error().field(), "canary_paths[0]");
}

// However content is cut into pieces, a text in it is found; what is not there is not.
TEST(PackFilter, Content_IsFoundAcrossPieces) {
  const std::string secret = "BEGIN PRIVATE KEY";
  const std::string content = "aaaaBEGIN PRIVATBEGIN PRIVATE KEYzz";
  for (size_t piece = 1; piece <= content.size(); ++piece) {
    PackRules rules;
    rules.canary_contents = {"nowhere", secret};
    PackFilter filter(rules);
    filter.BeginContent("f");
    Result<void> found;
    for (size_t at = 0; at < content.size() && found.ok(); at += piece) {
      found = filter.CheckContent(std::string_view(content).substr(at, piece), at > 0);
    }
    ASSERT_FALSE(found.ok()) << piece;
    EXPECT_EQ(found.error().field(), "canary_contents[1]");

    // Neither over a hole nor from one file to the next.
    filter.BeginContent("g");
    EXPECT_TRUE(filter.CheckContent("BEGIN PRIV", false).ok());
    EXPECT_TRUE(filter.CheckContent("ATE KEY", false).ok());
    EXPECT_TRUE(filter.CheckContent("BEGIN PRIV", false).ok());
    filter.BeginContent("h");
    EXPECT_TRUE(filter.CheckContent("ATE KEY", true).ok());
  }
}

TEST(PackRules, Check_RefusesWithTheField) {
  const auto refused = [](const std::function<void(PackRules&)>& change) {
    PackRules rules;
    change(rules);
    const auto checked = rules.Check();
    EXPECT_FALSE(checked.ok());
    if (checked.ok()) return std::string();
    EXPECT_EQ(checked.error().reason(), "pack.bad_rule");
    return checked.error().field();
  };
  EXPECT_EQ(refused([](PackRules& r) { r.scrub = {"ok", ""}; }), "scrub[1]");
  EXPECT_EQ(refused([](PackRules& r) { r.scrub = {"/"}; }), "scrub[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.scrub = {"a/b"}; }), "scrub[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.scrub = {std::string(17, '*')}; }), "scrub[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.scrub = {std::string(1025, 'a')}; }), "scrub[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.scrub.resize(257, "a"); }), "scrub");
  EXPECT_EQ(refused([](PackRules& r) { r.canary_paths = {std::string("a\0b", 3)}; }),
            "canary_paths[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.canary_contents = {"abc"}; }), "canary_contents[0]");
  EXPECT_EQ(refused([](PackRules& r) { r.canary_contents.resize(33, "abcd"); }), "canary_contents");
  EXPECT_TRUE(PackRules().Check().ok());
}

std::string Words(std::initializer_list<uint32_t> words) {
  std::string bytes(words.size() * 4, '\0');
  std::memcpy(bytes.data(), words.begin(), bytes.size());
  return bytes;
}

TEST(Overlay, PrivateXattrs_AreTakenOut) {
  XattrList list = {{"trusted.overlay.opaque", "y"},
                    {"trusted.overlay.origin", "?"},
                    {"trusted.other", "1"},
                    {"user.x", "2"}};
  const auto marks = TakeOverlayXattrs(list);
  ASSERT_TRUE(marks.ok());
  EXPECT_TRUE(marks->opaque);
  EXPECT_FALSE(marks->whiteout);
  EXPECT_EQ(list, (XattrList{{"trusted.other", "1"}, {"user.x", "2"}}));
  list = {{"trusted.overlay.opaque", "x"}};
  EXPECT_FALSE(TakeOverlayXattrs(list)->opaque);
  list = {{"trusted.overlay.whiteout", ""}};
  EXPECT_TRUE(TakeOverlayXattrs(list)->whiteout);
  for (const char* name : {"trusted.overlay.redirect", "trusted.overlay.metacopy"}) {
    list = {{name, ""}};
    EXPECT_EQ(TakeOverlayXattrs(list).error().reason(), "pack.redirect");
  }
}

TEST(Overlay, Ids_AreThoseInside) {
  const IdRange ids{1000, 65536};
  EXPECT_EQ(*IdInLayer(1000, ids), 0U);
  EXPECT_EQ(*IdInLayer(66535, ids), 65535U);
  for (const uint32_t id : {0U, 999U, 66536U, UINT32_MAX}) {
    EXPECT_EQ(IdInLayer(id, ids).error().reason(), "pack.foreign_id") << id;
    EXPECT_EQ(*IdInLayer(id, IdRange()), id);
  }
  // user::rw-, user:1000:r--, group::r--, group:1007:r--, mask::r--, other::r--
  XattrList list = {{"system.posix_acl_access",
                     Words({2, 0x00060001, UINT32_MAX, 0x00040002, 1000, 0x00040004, UINT32_MAX,
                            0x00040008, 1007, 0x00040010, UINT32_MAX, 0x00040020, UINT32_MAX})},
                    {"security.capability", Words({0x03000001, 0x400, 0, 0, 0, 1000})}};
  ASSERT_TRUE(MapXattrIds(list, ids).ok());
  EXPECT_EQ(list[0].second, Words({2, 0x00060001, UINT32_MAX, 0x00040002, 0, 0x00040004, UINT32_MAX,
                                   0x00040008, 7, 0x00040010, UINT32_MAX, 0x00040020, UINT32_MAX}));
  EXPECT_EQ(list[1].second, Words({0x02000001, 0x400, 0, 0, 0})) << "of the sandbox's own root";
  list = {{"security.capability", Words({0x03000000, 0x400, 0, 0, 0, 1005})}};
  ASSERT_TRUE(MapXattrIds(list, ids).ok());
  EXPECT_EQ(list[0].second, Words({0x03000000, 0x400, 0, 0, 0, 5}));
  list = {{"system.posix_acl_default", Words({2, 0x00040002, 5})}};
  EXPECT_EQ(MapXattrIds(list, ids).error().reason(), "pack.foreign_id");
  list = {{"system.posix_acl_access", "short"}, {"security.capability", ""}};
  EXPECT_TRUE(MapXattrIds(list, ids).ok());
}

}  // namespace
}  // namespace dsec::image
