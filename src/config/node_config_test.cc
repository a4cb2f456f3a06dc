// SPDX-License-Identifier: Apache-2.0
#include "config/node_config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace dsec::config {
namespace {

TEST(NodeConfig, Empty_IsTheDefaults) {
  auto parsed = ParseNodeConfig("", "f");
  ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
  EXPECT_EQ(parsed->capacity, NodeConfig().capacity);
}

TEST(NodeConfig, Dump_ReadsBackToTheSame) {
  auto parsed =
      ParseNodeConfig("node_id = \"n7\"\ncapacity = 12\nlisten = \"unix:/a\\\"b\"\n", "f");
  ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
  const std::string dumped = DumpNodeConfig(*parsed);
  auto again = ParseNodeConfig(dumped, "g");
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(DumpNodeConfig(*again), dumped);
  EXPECT_EQ(again->node_id, "n7");
}

struct BadCase {
  const char* text;
  const char* reason;
  const char* field;
  const char* part;  // of the message
};

TEST(NodeConfig, Bad_NamesPlaceKeyAndRule) {
  for (const BadCase& bad : {
           BadCase{"x = ", "config.syntax", "", "f:1:"},
           BadCase{"\nnope = 1", "config.unknown_key", "nope", "f:2:1"},
           BadCase{"capacity = \"5\"", "config.type", "capacity", "integer"},
           BadCase{"capacity = 1.5", "config.type", "capacity", "integer"},
           BadCase{"capacity = -5", "config.type", "capacity", "integer"},
           BadCase{"capacity = 0", "config.range", "capacity", "from 1 to"},
           BadCase{"node_id = \"A\"", "request.invalid", "node_id", "[a-z0-9]"},
           BadCase{"state_dir = \"rel\"", "config.path", "state_dir", "absolute"},
           BadCase{"id_base = 4294000000", "config.range", "id_base", "no room"},
           BadCase{"agent_uid_base = 1879048192", "config.range", "agent_uid_base", "overlap"},
           BadCase{"default_memory_bytes = 67108864\nmax_memory_bytes = 33554432", "config.range",
                   "max_memory_bytes", "below"},
           BadCase{"fn_types_dir = \"rel\"", "config.path", "fn_types_dir", "absolute"},
           BadCase{"fn_queue_max = 0", "config.range", "fn_queue_max", "from 1 to"},
           BadCase{"fn_max_memory_bytes = 33554432", "config.range", "fn_max_memory_bytes",
                   "below"},
           BadCase{"layers_verify = 1", "config.type", "layers_verify", "true or false"},
           BadCase{"layers_url = \"ftp://x\"", "config.value", "layers_url", "http"},
           BadCase{"layers_url = \"https://u:p@x\"", "config.value", "layers_url", "credentials"},
           BadCase{"layers_url = \"https://x/\"", "config.value", "layers_url", "slash"},
           BadCase{"layers_url = \"http://127.0.0.1.x\"\nlayers_url_headers_file = \"/h\"",
                   "config.value", "layers_url_headers_file", "https"},
           BadCase{"log_level = \"loud\"", "config.value", "log_level", "loud"},
       }) {
    auto parsed = ParseNodeConfig(bad.text, "f");
    ASSERT_FALSE(parsed.ok()) << bad.text;
    EXPECT_EQ(parsed.error().reason(), bad.reason) << bad.text;
    EXPECT_EQ(parsed.error().field(), bad.field) << bad.text;
    EXPECT_NE(parsed.error().message().find(bad.part), std::string::npos)
        << parsed.error().message();
  }
}

TEST(NodeConfig, MissingFile_IsNotFound) {
  EXPECT_EQ(LoadNodeConfig("/no/such/file").error().reason(), "config.unreadable");
}

TEST(NodeConfig, ReferencePage_IsFresh) {
  std::ifstream file(DSEC_SOURCE_DIR "/docs/config.md", std::ios::binary);
  const std::string committed{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(committed, NodeConfigReference()) << "run: dsec up --config-reference > docs/config.md";
}

}  // namespace
}  // namespace dsec::config
