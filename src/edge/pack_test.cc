// SPDX-License-Identifier: Apache-2.0
#include "edge/testing/edge_fixture.h"

namespace dsec::edge::testing {
namespace {

using std::chrono::milliseconds;

class EdgePack : public EdgeFixture {
 protected:
  static v1::PackRequest RequestOf(const std::string& name) {
    v1::PackRequest request;
    request.set_kind("workspace");
    request.set_name(name);
    return request;
  }
};

TEST_F(EdgePack, RunningSandbox_AnswersTheLayerAndReportsProgress) {
  Start();
  const std::string id = Create("r1");
  std::atomic<uint64_t> entries = 0;
  const auto progress = [&](const v1::PackProgress& state) {
    entries = state.entries();
    return true;
  };
  const auto packed = Run(edge_->Pack(SandboxId(id), RequestOf("w:1"), progress, Soon()));
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->layer().names(0), "w:1");
  EXPECT_EQ(entries, 3U);
  const auto refuse = [](const v1::PackProgress&) { return false; };
  EXPECT_EQ(Run(edge_->Pack(SandboxId(id), RequestOf("w:1"), refuse, Soon())).error().reason(),
            "layer.cancelled");
  v1::PackRequest base = RequestOf("w:1");
  base.set_kind("base");
  EXPECT_EQ(Run(edge_->Pack(SandboxId(id), base, nullptr, Soon())).error().field(), "kind");
  EXPECT_TRUE(Delete(id).ok());
  EXPECT_EQ(Run(edge_->Pack(SandboxId(id), RequestOf("w:1"), nullptr, Soon())).error().reason(),
            "sandbox.ended.user_stop");
  EXPECT_EQ(Run(edge_->Pack(SandboxId("sb-n1-01h00000000000000000000000"), RequestOf("w:1"),
                            nullptr, Soon()))
                .error()
                .reason(),
            "sandbox.not_found");
  CheckInvariants();
}

TEST_F(EdgePack, UnderWay_IsActivityAndEndsWithTheSandbox) {
  Start();
  const std::string id =
      Create("r1", [](v1::CreateRequest& request) { request.mutable_spec()->set_idle_ms(10'000); });
  std::promise<void> began;
  auto packing = Begin(edge_->Pack(
      SandboxId(id), RequestOf("endless"),
      [&](const v1::PackProgress&) {
        began.set_value();
        return true;
      },
      Soon()));
  began.get_future().get();
  Advance(milliseconds(60'000));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  EXPECT_EQ(packing.wait_for(milliseconds(0)), std::future_status::timeout);
  EXPECT_TRUE(Delete(id).ok());
  const auto ended = packing.get();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().reason(), "sandbox.ended.user_stop") << ended.error().ToString();
  CheckInvariants();
}

TEST_F(EdgePack, FirstTouch_AnswersAndIsActivity) {
  Start();
  const std::string id =
      Create("r1", [](v1::CreateRequest& request) { request.mutable_spec()->set_idle_ms(10'000); });
  v1::FirstTouchRequest request;
  request.set_save(true);
  Advance(milliseconds(6'000));
  const auto touched = Run(edge_->FirstTouch(SandboxId(id), request, Soon()));
  ASSERT_TRUE(touched.ok()) << touched.error().ToString();
  EXPECT_TRUE(touched->layers(0).saved());
  Advance(milliseconds(6'000));
  EXPECT_EQ(Get(id).state(), v1::STATE_RUNNING);
  EXPECT_TRUE(Delete(id).ok());
  EXPECT_EQ(Run(edge_->FirstTouch(SandboxId(id), request, Soon())).error().reason(),
            "sandbox.ended.user_stop");
  CheckInvariants();
}

}  // namespace
}  // namespace dsec::edge::testing
