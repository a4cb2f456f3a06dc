// SPDX-License-Identifier: Apache-2.0
#include "cluster/node_record.h"

#include <gtest/gtest.h>

#include <functional>

namespace dsec::cluster {
namespace {

v1::NodeRecord Sample() {
  v1::NodeRecord record;
  record.set_node_id("n1");
  record.set_address("10.0.0.1:7979");
  record.set_epoch(3);
  record.set_boot_id("6e5bd2c1-aaaa-bbbb-cccc-0123456789ab");
  record.set_certificate_sha256(std::string(64, 'a'));
  record.set_state(v1::NODE_JOINED);
  record.set_pool("cloud");
  (*record.mutable_labels())["zone"] = "a";
  auto* capability = record.add_capabilities();
  capability->set_name("disk_quota");
  capability->set_used("prjquota");
  capability->set_ok(true);
  return record;
}

TEST(NodeRecord, ComesBackAsItWas) {
  const v1::NodeRecord record = Sample();
  auto bytes = EncodeNodeRecord(record);
  ASSERT_TRUE(bytes.ok()) << bytes.error().ToString();
  auto parsed = ParseNodeRecord(*bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
  EXPECT_EQ(parsed->version(), kNodeRecordVersion);
  parsed->clear_version();
  EXPECT_EQ(parsed->SerializeAsString(), record.SerializeAsString());
  EXPECT_EQ(NodeKey("n1"), "node/n1");
}

TEST(NodeRecord, EachRuleNamesItsField) {
  const std::pair<std::string, std::function<void(v1::NodeRecord&)>> cases[] = {
      {"node_id", [](auto& r) { r.set_node_id("N 1"); }},
      {"address", [](auto& r) { r.set_address("10.0.0.1"); }},
      {"address", [](auto& r) { r.set_address("::1:70"); }},
      {"address", [](auto& r) { r.set_address("h:70000"); }},
      {"address", [](auto& r) { r.set_address(std::string(300, 'h') + ":1"); }},
      {"address", [](auto& r) { r.set_address("a b:1"); }},
      {"epoch", [](auto& r) { r.set_epoch(0); }},
      {"epoch", [](auto& r) { r.set_epoch(kMaxEpoch + 1); }},
      {"state", [](auto& r) { r.set_state(v1::NODE_STATE_UNSPECIFIED); }},
      {"state", [](auto& r) { r.set_state(static_cast<v1::NodeState>(77)); }},
      {"boot_id", [](auto& r) { r.set_boot_id("boot\n"); }},
      {"certificate_sha256", [](auto& r) { r.set_certificate_sha256("abc"); }},
      {"previous_certificate_sha256", [](auto& r) { r.set_previous_certificate_sha256("abc"); }},
      {"key_sha256", [](auto& r) { r.set_key_sha256(std::string(64, 'x')); }},
      {"capabilities",
       [](auto& r) {
         for (int i = 0; i < 300; ++i) r.add_capabilities()->set_name("c");
       }},
      {"capabilities", [](auto& r) { r.add_capabilities()->set_detail(std::string(2000, 'x')); }},
      {"labels", [](auto& r) { (*r.mutable_labels())["bad key"] = "v"; }},
      {"labels", [](auto& r) { (*r.mutable_labels())["k"] = std::string(300, 'v'); }},
      {"pool", [](auto& r) { r.set_pool("a b"); }},
      {"build", [](auto& r) { r.set_build(std::string(200, 'v')); }},
  };
  for (const auto& [field, change] : cases) {
    v1::NodeRecord record = Sample();
    change(record);
    auto encoded = EncodeNodeRecord(record);
    ASSERT_FALSE(encoded.ok()) << field;
    EXPECT_EQ(encoded.error().reason(), "node.record") << field;
    EXPECT_EQ(encoded.error().field(), field);
  }
}

TEST(NodeRecord, WhatIsDamagedIsNotRead) {
  for (std::string bytes : {std::string("\xff\xff\xff"), std::string(), std::string(70'000, 'x')}) {
    auto parsed = ParseNodeRecord(bytes);
    ASSERT_FALSE(parsed.ok());
    EXPECT_EQ(parsed.error().reason(), "node.record_damaged");
  }
  v1::NodeRecord other = Sample();
  other.set_version(2);
  auto parsed = ParseNodeRecord(other.SerializeAsString());
  ASSERT_FALSE(parsed.ok());
  EXPECT_NE(parsed.error().message().find("version 2"), std::string::npos);
}

TEST(HostPort, TakesNamesAndAddresses) {
  auto name = ParseHostPort("node-1.example:7979", "address");
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->host, "node-1.example");
  EXPECT_EQ(name->port, 7979);
  auto six = ParseHostPort("[::1]:1", "address");
  ASSERT_TRUE(six.ok());
  EXPECT_EQ(six->host, "::1");
  auto bad = ParseHostPort("x", "apiserver");
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().field(), "apiserver");
}

}  // namespace
}  // namespace dsec::cluster
