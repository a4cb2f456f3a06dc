// SPDX-License-Identifier: Apache-2.0
// Artefacts on disk, the compile cache, digests.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fn/artifact_store.h"
#include "fn/compile_cache.h"
#include "fn/digest.h"
#include "os/file.h"

namespace dsec::fn {
namespace {

class ArtifactStoreTest : public ::testing::Test {
 protected:
  void Open(ArtifactBounds bounds = {}) {
    store_.reset();
    auto opened = ArtifactStore::Open(dir_.path() + "/a", bounds, metrics_);
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    store_ = std::move(*opened);
  }
  std::string Put(const std::string& bytes) {
    auto digest = store_->Put(bytes);
    EXPECT_TRUE(digest.ok()) << digest.error().ToString();
    return digest.ok() ? *digest : "";
  }
  size_t Files() {
    size_t count = 0;
    for ([[maybe_unused]] const auto& file :
         std::filesystem::directory_iterator(dir_.path() + "/a")) {
      ++count;
    }
    return count;
  }

  os::TempDir dir_ = std::move(os::TempDir::Create("dsec-fn")).value();
  metrics::Registry registry_;
  FnMetrics metrics_{registry_};
  std::unique_ptr<ArtifactStore> store_;
};

TEST_F(ArtifactStoreTest, Bytes_ComeBackByTheirDigestAlsoAfterARestart) {
  Open();
  const std::string empty = Put("");
  // FIPS 180-2, the digest of nothing.
  EXPECT_EQ(empty, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  const std::string digest = Put(std::string("a\0b", 3));
  EXPECT_EQ(Put(std::string("a\0b", 3)), digest);
  EXPECT_EQ(Files(), 2);
  Open();
  EXPECT_TRUE(store_->Has(digest));
  EXPECT_EQ(*store_->Get(digest), std::string("a\0b", 3));
  EXPECT_EQ(*store_->Get(empty), "");
  EXPECT_EQ(store_->bytes(), 3);
  EXPECT_EQ(store_->Get("sha256:" + std::string(64, 'a')).error().reason(), "artifact.not_found");
  EXPECT_EQ(store_->Get("../../etc/passwd").error().reason(), "artifact.not_found");
}

TEST_F(ArtifactStoreTest, Damage_IsFoundAndGone) {
  Open();
  const std::string digest = Put("some bytes");
  const std::string path = dir_.path() + "/a/" + digest.substr(7);
  std::ofstream(path) << "other byte";
  EXPECT_EQ(store_->Get(digest).error().reason(), "artifact.not_found");
  EXPECT_FALSE(store_->Has(digest));
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(Put("some bytes"), digest);
  EXPECT_EQ(*store_->Get(digest), "some bytes");
  std::filesystem::remove(path);
  EXPECT_EQ(store_->Get(digest).error().reason(), "artifact.not_found");
  EXPECT_EQ(metrics_.artifacts_damaged.value(), 2);
}

TEST_F(ArtifactStoreTest, Bounds_DropTheLeastRecentlyUsed) {
  ArtifactBounds bounds;
  bounds.bytes = 10;
  bounds.item_bytes = 6;
  bounds.count = 3;
  Open(bounds);
  EXPECT_EQ(store_->Put("1234567").error().reason(), "artifact.too_large");
  const std::string a = Put("aaaa");
  const std::string b = Put("bbbb");
  ASSERT_TRUE(store_->Get(a).ok());
  const std::string c = Put("cccc");
  EXPECT_TRUE(store_->Has(a));
  EXPECT_FALSE(store_->Has(b));
  EXPECT_EQ(store_->bytes(), 8);
  const std::string d = Put("d");
  const std::string e = Put("e");
  EXPECT_FALSE(store_->Has(a)) << "too many";
  EXPECT_EQ(Files(), 3);
  bounds.count = 1;
  Open(bounds);
  EXPECT_EQ(Files(), 1);
}

TEST_F(ArtifactStoreTest, WhatDoesNotBelongThere_IsRemoved) {
  Open();
  const std::string digest = Put("x");
  std::ofstream(dir_.path() + "/a/.0.new") << "half";
  std::ofstream(dir_.path() + "/a/readme") << "other";
  std::filesystem::create_directories(dir_.path() + "/a/" + std::string(64, 'a') + "/b");
  Open();
  EXPECT_EQ(Files(), 1);
  EXPECT_TRUE(store_->Has(digest));
}

std::shared_ptr<const Compiled> CompiledOf(const std::string& out) {
  auto compiled = std::make_shared<Compiled>();
  compiled->step.mutable_stdout()->set_data(out);
  return compiled;
}

TEST(CompileCache, Bounds_DropTheLeastRecentlyUsed) {
  CompileCache cache(2, 1000);
  cache.Put("a", CompiledOf("1"));
  cache.Put("b", CompiledOf("2"));
  ASSERT_NE(cache.Find("a"), nullptr);
  cache.Put("c", CompiledOf("3"));
  EXPECT_EQ(cache.Find("b"), nullptr);
  EXPECT_NE(cache.Find("a"), nullptr);
  cache.Put("d", CompiledOf(std::string(990, 'x')));
  EXPECT_EQ(cache.size(), 1) << "its bytes leave no room for another";
  cache.Put("e", CompiledOf(std::string(2000, 'x')));
  EXPECT_EQ(cache.Find("e"), nullptr) << "larger than all";
  EXPECT_NE(cache.Find("d"), nullptr);
  cache.Put("d", CompiledOf("y"));
  EXPECT_EQ(cache.Find("d")->step.stdout().data(), "y");
  cache.Drop("d");
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.bytes(), 0);
}

TEST(CompileCache, Flight_IsForgottenWhenItEnds) {
  CompileCache cache(2, 1000);
  const auto first = cache.Begin("a");
  EXPECT_EQ(cache.Flight("a"), first);
  cache.End("a", first);
  EXPECT_TRUE(first->done.is_set());
  EXPECT_EQ(cache.Flight("a"), nullptr);
  const auto second = cache.Begin("a");
  cache.End("a", first);
  EXPECT_EQ(cache.Flight("a"), second) << "it ends its own alone";
  cache.End("a", second);
}

TEST(FieldDigest, Fields_DoNotRunTogether) {
  const auto of = [](std::initializer_list<std::string_view> fields) {
    FieldDigest digest;
    for (const std::string_view field : fields) digest.Add(field);
    return digest.Finish();
  };
  EXPECT_NE(of({"ab", "c"}), of({"a", "bc"}));
  EXPECT_NE(of({"a"}), of({"a", ""}));
  EXPECT_EQ(of({"a", "b"}), of({"a", "b"}));
}

}  // namespace
}  // namespace dsec::fn
