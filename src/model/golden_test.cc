// SPDX-License-Identifier: Apache-2.0
// The messages of model.proto are a wire and disk format. golden/<message>.hex holds one serialised
// example of each, every field set; a change of a field's number or type changes the bytes. A new
// field is added to the example, and its file written anew with DSEC_WRITE_GOLDEN=1, after a look
// at the difference: bytes may only be added.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "dsec/v1/model.pb.h"

namespace dsec::model {
namespace {

std::string ToHex(const std::string& bytes) {
  std::string text;
  char item[3];
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::snprintf(item, sizeof(item), "%02x", static_cast<unsigned char>(bytes[i]));
    text += item;
    if (i % 32 == 31) text += '\n';
  }
  if (text.empty() || text.back() != '\n') text += '\n';
  return text;
}

std::string FromHex(const std::string& text) {
  std::string bytes, digits;
  for (const char c : text) {
    if (c == '\n') continue;
    digits += c;
    if (digits.size() == 2) {
      bytes += static_cast<char>(std::stoi(digits, nullptr, 16));
      digits.clear();
    }
  }
  return bytes;
}

template <typename Message>
void ExpectGolden(const std::string& name, const Message& example) {
  const std::string path = std::string(DSEC_GOLDEN_DIR) + "/" + name + ".hex";
  const std::string bytes = example.SerializeAsString();
  if (std::getenv("DSEC_WRITE_GOLDEN") != nullptr) std::ofstream(path) << ToHex(bytes);
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path;
  std::stringstream content;
  content << file.rdbuf();
  EXPECT_EQ(ToHex(bytes), content.str()) << path;
  Message parsed;
  ASSERT_TRUE(parsed.ParseFromString(FromHex(content.str()))) << path;
  EXPECT_EQ(parsed.SerializeAsString(), bytes) << path;
}

v1::Limits ExampleLimits() {
  v1::Limits limits;
  limits.set_memory_bytes(1);
  limits.set_cpu_millis(2);
  limits.set_pids(3);
  limits.set_disk_bytes(4);
  limits.set_disk_inodes(5);
  limits.set_shm_bytes(6);
  limits.set_open_files(7);
  limits.set_output_bytes(8);
  return limits;
}

v1::SandboxSpec ExampleSpec() {
  v1::SandboxSpec spec;
  spec.set_backend(v1::BACKEND_CONTAINER);
  spec.set_base("base:1");
  spec.set_workspace("workspace:2");
  spec.add_toolkits("toolkit:3");
  *spec.mutable_limits() = ExampleLimits();
  spec.mutable_network()->set_mode("none");
  spec.set_ttl_ms(7);
  spec.set_idle_ms(8);
  v1::KeyValue* env = spec.add_env();
  env->set_key("KEY");
  env->set_value("\xff value");
  spec.set_workdir("/work");
  spec.set_user("1000:1000");
  spec.set_hostname("host");
  (*spec.mutable_labels())["label"] = "value";
  spec.add_entrypoint("/bin/true");
  spec.set_name("name");
  spec.set_ttl_waits_for_exec(true);
  spec.set_ttl_extension_ms(17);
  return spec;
}

v1::Termination ExampleTermination() {
  v1::Termination termination;
  termination.set_cause("entrypoint_exit");
  termination.set_fault(v1::FAULT_INFRASTRUCTURE);
  termination.set_message("message");
  termination.set_who("who");
  termination.set_at_unix_ms(5);
  termination.set_limit(6);
  termination.set_exit_code(-7);
  termination.set_reason("some.reason");
  return termination;
}

v1::PhaseTime ExamplePhase() {
  v1::PhaseTime phase;
  phase.set_phase("launch");
  phase.set_micros(2);
  return phase;
}

v1::Usage ExampleUsage() {
  v1::Usage usage;
  usage.set_cpu_usec(1);
  usage.set_throttled_usec(2);
  usage.set_memory_bytes(3);
  usage.set_memory_peak_bytes(4);
  usage.set_pids(5);
  usage.set_disk_bytes(6);
  usage.set_disk_inodes(7);
  usage.set_oom_kills(8);
  usage.set_pids_denied(9);
  usage.set_output_dropped_bytes(10);
  return usage;
}

TEST(ModelProto, Limits_BytesAreThoseOfTheGoldenFile) { ExpectGolden("limits", ExampleLimits()); }

TEST(ModelProto, NetworkPolicy_BytesAreThoseOfTheGoldenFile) {
  v1::NetworkPolicy network;
  network.set_mode("none");
  ExpectGolden("network_policy", network);
}

TEST(ModelProto, KeyValue_BytesAreThoseOfTheGoldenFile) {
  v1::KeyValue item;
  item.set_key("KEY");
  item.set_value(std::string("\0\xff", 2));
  ExpectGolden("key_value", item);
}

TEST(ModelProto, SandboxSpec_BytesAreThoseOfTheGoldenFile) {
  ExpectGolden("sandbox_spec", ExampleSpec());
}
TEST(ModelProto, Termination_BytesAreThoseOfTheGoldenFile) {
  ExpectGolden("termination", ExampleTermination());
}
TEST(ModelProto, PhaseTime_BytesAreThoseOfTheGoldenFile) {
  ExpectGolden("phase_time", ExamplePhase());
}
TEST(ModelProto, Usage_BytesAreThoseOfTheGoldenFile) { ExpectGolden("usage", ExampleUsage()); }

TEST(ModelProto, SandboxRecord_BytesAreThoseOfTheGoldenFile) {
  v1::SandboxRecord record;
  record.set_id("sb-n1-00000000000000000000000000");
  record.set_request_id("request");
  record.set_request_digest("digest");
  *record.mutable_spec() = ExampleSpec();
  record.set_state(v1::STATE_LOST);
  *record.mutable_termination() = ExampleTermination();
  record.set_created_unix_ms(7);
  record.set_expires_unix_ms(8);
  record.set_last_activity_unix_ms(9);
  *record.add_phases() = ExamplePhase();
  record.set_next_event_seq(11);
  record.set_slot(0);
  record.set_slot_generation(14);
  record.set_agent_pid(15);
  record.set_agent_start_time(16);
  record.set_scratch("scratch");
  record.set_boot_id("boot");
  record.add_layer_ids("sha256:00");
  record.set_project("project");
  record.set_ended_unix_ms(21);
  *record.mutable_final_usage() = ExampleUsage();
  record.set_stuck("stuck");
  record.set_claim_until_unix_ms(24);
  *record.mutable_stop() = ExampleTermination();
  ExpectGolden("sandbox_record", record);
}

TEST(ModelProto, Event_BytesAreThoseOfTheGoldenFile) {
  v1::Event event;
  event.set_sandbox_id("sb-n1-00000000000000000000000000");
  event.set_seq(2);
  event.set_at_unix_ms(3);
  event.set_type("ended");
  event.set_state(v1::STATE_STOPPED);
  *event.mutable_termination() = ExampleTermination();
  event.set_op_id("op");
  event.set_detail("detail");
  event.set_node_seq(9);
  ExpectGolden("event", event);
}

}  // namespace
}  // namespace dsec::model
