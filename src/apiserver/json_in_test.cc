// SPDX-License-Identifier: Apache-2.0
#include "apiserver/json_in.h"

#include <gtest/gtest.h>

namespace dsec::apiserver {
namespace {

template <typename T>
Result<void> Status(Result<T> result) {
  if (!result.ok()) return std::move(result).error();
  return {};
}

Result<void> Read(std::string_view kind, std::string_view body) {
  if (kind == "create") return Status(ReadCreate(body));
  if (kind == "batch") return Status(ReadBatch(body));
  if (kind == "delete") return Status(ReadDeleteMany(body));
  if (kind == "exec") return Status(ReadExec(body));
  if (kind == "renew") return Status(ReadRenew(body));
  if (kind == "signal") return Status(ReadSignal(body));
  if (kind == "resize") return Status(ReadTerminalSize(body));
  if (kind == "cancel") return Status(ReadCancel(body));
  if (kind == "mkdir") return Status(ReadMkdir(body));
  if (kind == "move") return Status(ReadMove(body));
  if (kind == "chmod") return Status(ReadChmod(body));
  return ReadEmpty(body);
}

constexpr std::string_view kKinds[] = {"create", "batch",  "delete", "exec", "renew", "signal",
                                       "resize", "cancel", "mkdir",  "move", "chmod", "empty"};

void ExpectRefused(std::string_view kind, const std::string& body, const std::string& reason,
                   const std::string& field) {
  const auto result = Read(kind, body);
  const std::string where = fmt::format("{} {}", kind, body.substr(0, 200));
  ASSERT_FALSE(result.ok()) << where;
  EXPECT_EQ(result.error().code(), Code::kInvalidArgument) << where;
  EXPECT_EQ(result.error().reason(), "request." + reason) << where;
  EXPECT_EQ(result.error().field(), field) << where;
}

std::string Nested(size_t depth) {
  return R"({"x":)" + std::string(depth - 1, '[') + std::string(depth - 1, ']') + "}";
}

TEST(JsonIn, TextThatIsNoObject_IsMalformed) {
  const std::string texts[] = {"{",
                               "[]",
                               "null",
                               "5",
                               "\"\"",
                               " ",
                               "{}{}",
                               "{'a':1}",
                               R"({"a":1,})",
                               R"({"a":NaN})",
                               R"({"a":01})",
                               R"({"a":+1})",
                               "{\"a\":\"\xff\"}",
                               "{\"\xc0\xaf\":1}",
                               R"({"a":"\ud800"})",
                               "{\"a\":\"\n\"}",
                               std::string("\0", 1),
                               Nested(33),
                               Nested(2000),
                               std::string(1 << 20, '['),
                               std::string(1 << 20, '{')};
  for (const std::string_view kind : kKinds) {
    for (const std::string& text : texts) ExpectRefused(kind, text, "malformed", "");
  }
}

TEST(JsonIn, Nesting_IsCountedOutsideStrings) {
  ExpectRefused("empty", Nested(32), "unknown_field", "x");
  const std::string braces(100, '{');
  ExpectRefused("empty", R"({"y":"\")" + braces + R"("})", "unknown_field", "y");
}

TEST(JsonIn, EmptyBody_IsAnEmptyObject) {
  for (const std::string body : {"", "{}", " {\n} "}) {
    EXPECT_TRUE(Read("cancel", body).ok()) << body;
    EXPECT_TRUE(Read("empty", body).ok()) << body;
    ExpectRefused("create", body, "missing", "request_id");
    ExpectRefused("exec", body, "missing", "argv");
  }
}

struct BadBody {
  const char* kind;  // "c": create that has request_id and base already
  const char* members;
  const char* reason;
  const char* field;
};

const BadBody kBadBodies[] = {
    {"c", R"("bases":1)", "unknown_field", "bases"},
    {"c", R"("limits":{"nope":1})", "unknown_field", "limits.nope"},
    {"c", R"("network":{"mode":"none","x":null})", "unknown_field", "network.x"},
    {"c", R"("ttl_policy":{"":1})", "unknown_field", "ttl_policy."},
    {"c", R"("ttl_ms":"5")", "wrong_type", "ttl_ms"},
    {"c", R"("ttl_ms":1.5)", "wrong_type", "ttl_ms"},
    {"c", R"("ttl_ms":1e3)", "wrong_type", "ttl_ms"},
    {"c", R"("ttl_ms":true)", "wrong_type", "ttl_ms"},
    {"c", R"("ttl_ms":-1)", "out_of_range", "ttl_ms"},
    {"c", R"("ttl_ms":9007199254740992)", "out_of_range", "ttl_ms"},
    {"c", R"("ttl_ms":18446744073709551616)", "out_of_range", "ttl_ms"},
    {"c", R"("ttl_ms":-9223372036854775809)", "out_of_range", "ttl_ms"},
    {"c", R"("ttl_ms":1e300)", "out_of_range", "ttl_ms"},
    {"c", R"("timeout_ms":0)", "out_of_range", "timeout_ms"},
    {"c", R"("timeout_ms":600001)", "out_of_range", "timeout_ms"},
    {"c", R"("capacity_wait_ms":600001)", "out_of_range", "capacity_wait_ms"},
    {"c", R"("limits":[])", "wrong_type", "limits"},
    {"c", R"("limits":{"pids":"many"})", "wrong_type", "limits.pids"},
    {"c", R"("limits":{"pids":1,"pids":2})", "duplicate", "limits.pids"},
    {"c", R"("ttl_ms":1,"ttl_ms":null)", "duplicate", "ttl_ms"},
    {"c", R"("env":{"A":"1","A":"1"})", "duplicate", "env.A"},
    {"c", R"("env":{"A":"1"},"env_b64":{"A":"MQ=="})", "contradiction", "env_b64.A"},
    {"c", R"("env":{"A":1})", "wrong_type", "env.A"},
    {"c", R"("env":["A=1"])", "wrong_type", "env"},
    {"c", R"("labels":{"a":null})", "wrong_type", "labels.a"},
    {"c", R"("toolkits":"a:1")", "wrong_type", "toolkits"},
    {"c", R"("toolkits":["a:1",2])", "wrong_type", "toolkits[1]"},
    {"c", R"("toolkits_b64":["YQ=="])", "unknown_field", "toolkits_b64"},
    {"c", R"("entrypoint":["a"],"entrypoint_b64":["YQ=="])", "contradiction", "entrypoint_b64"},
    {"c", R"("entrypoint_b64":["YQ==","YQ"])", "invalid", "entrypoint_b64[1]"},
    {"c", R"("backend":"Container")", "invalid", "backend"},
    {"c", R"("network":{})", "missing", "network.mode"},
    {"c", R"("ttl_policy":{"wait_for_exec":1})", "wrong_type", "ttl_policy.wait_for_exec"},
    {"create", "", "missing", "request_id"},
    {"create", R"("request_id":"r","base":null)", "missing", "base"},
    {"create", R"("request_id":7,"base":"b")", "wrong_type", "request_id"},
    {"create", R"("request_id":"","base":"b")", "invalid", "request_id"},
    {"create", R"("request_id":"a b","base":"b")", "invalid", "request_id"},
    {"batch", R"("request_id":"r","sandbox":{"base":"b"})", "missing", "count"},
    {"batch", R"("request_id":"r","count":1)", "missing", "sandbox"},
    {"batch", R"("request_id":"r","count":0,"sandbox":{"base":"b"})", "out_of_range", "count"},
    {"batch", R"("request_id":"r","count":4097,"sandbox":{"base":"b"})", "out_of_range", "count"},
    {"batch", R"("request_id":"r","count":1,"sandbox":{"base":"b","request_id":"q"})",
     "unknown_field", "sandbox.request_id"},
    {"batch", R"("request_id":"r","count":1,"sandbox":{"base":"b","limits":{"x":1}})",
     "unknown_field", "sandbox.limits.x"},
    {"delete", "", "missing", "ids"},
    {"delete", R"("ids":["a"],"labels":{"a":"b"})", "contradiction", "labels"},
    {"delete", R"("ids":[])", "invalid", "ids"},
    {"delete", R"("labels":{})", "invalid", "labels"},
    {"delete", R"("ids":["a"],"grace_ms":300001)", "out_of_range", "grace_ms"},
    {"renew", "", "missing", "ttl_ms"},
    {"renew", R"("ttl_ms":{})", "wrong_type", "ttl_ms"},
    {"exec", "", "missing", "argv"},
    {"exec", R"("argv":["a"],"script":"b")", "contradiction", "script"},
    {"exec", R"("argv":["a"],"argv_b64":["YQ=="])", "contradiction", "argv_b64"},
    {"exec", R"("argv":[])", "invalid", "argv"},
    {"exec", R"("argv":"ls -l")", "wrong_type", "argv"},
    {"exec", R"("argv":["a",["b"]])", "wrong_type", "argv[1]"},
    {"exec", R"("script_b64":"YQ")", "invalid", "script_b64"},
    {"exec", R"("script":"a","stdin":"b","stdin_b64":"Yg==")", "contradiction", "stdin_b64"},
    {"exec", R"("script":"a","op_id":"a/b")", "invalid", "op_id"},
    {"exec", R"("script":"a","tty":{"rows":24})", "missing", "tty.cols"},
    {"exec", R"("script":"a","tty":{"rows":24,"cols":65536})", "out_of_range", "tty.cols"},
    {"exec", R"("script":"a","stream":"yes")", "wrong_type", "stream"},
    {"exec", R"("script":"a","on_disconnect":"maybe")", "invalid", "on_disconnect"},
    {"exec", R"("script":"a","timeout_ms":0.5)", "wrong_type", "timeout_ms"},
    {"exec", R"("script":"a","wait_ms":1)", "unknown_field", "wait_ms"},
    {"signal", "", "missing", "signal"},
    {"signal", R"("signal":"BOOM")", "invalid", "signal"},
    {"signal", R"("signal":0)", "invalid", "signal"},
    {"signal", R"("signal":65)", "invalid", "signal"},
    {"signal", R"("signal":-9)", "wrong_type", "signal"},
    {"signal", R"("signal":9,"killed_by":"x")", "unknown_field", "killed_by"},
    {"resize", R"("cols":1)", "missing", "rows"},
    {"resize", R"("rows":0,"cols":1)", "out_of_range", "rows"},
    {"cancel", R"("grace_ms":300001)", "out_of_range", "grace_ms"},
    {"empty", R"("x":1)", "unknown_field", "x"},
    {"mkdir", "", "missing", "path"},
    {"mkdir", R"("path":"/a","mode":"755")", "invalid", "mode"},
    {"mkdir", R"("path":"/a","mode":493)", "wrong_type", "mode"},
    {"mkdir", R"("path":"/a","path_b64":"L2E=")", "contradiction", "path_b64"},
    {"move", R"("from":"/a")", "missing", "to"},
    {"chmod", R"("path":"/a")", "missing", "mode"},
    {"chmod", R"("path":"/a","mode":"0888")", "invalid", "mode"},
};

TEST(JsonIn, BadMember_IsNamedWithItsRule) {
  for (const BadBody& bad : kBadBodies) {
    const bool create = std::string_view(bad.kind) == "c";
    ExpectRefused(
        create ? "create" : bad.kind,
        fmt::format("{{{}{}}}", create ? R"("request_id":"r","base":"b",)" : "", bad.members),
        bad.reason, bad.field);
  }
  const std::string long_id(129, 'x');
  ExpectRefused("create", fmt::format(R"({{"request_id":"{}","base":"b"}})", long_id), "invalid",
                "request_id");
  ExpectRefused("batch", fmt::format(R"({{"request_id":"{}"}})", long_id.substr(8)), "out_of_range",
                "request_id");
  std::string ids = R"({"ids":["a")";
  for (int i = 0; i < 10'000; ++i) ids += ",\"a\"";
  ExpectRefused("delete", ids + "]}", "out_of_range", "ids");
}

TEST(JsonIn, Create_KeepsEveryFieldAndTakesNullAsMissing) {
  const auto body = ReadCreate(
      R"({"request_id":"r","base":"b:1","workspace":"w:1","toolkits":["t:1","t:2"],"backend":"microvm",
          "limits":{"memory_bytes":1,"cpu_millis":2,"pids":3,"disk_bytes":4,"disk_inodes":5,"shm_bytes":6,
                    "open_files":7,"output_bytes":9007199254740991},
          "network":{"mode":"none"},"ttl_ms":8,"idle_ms":9,"env":{"A":"a"},"env_b64":{"B":"gA=="},
          "ttl_policy":{"wait_for_exec":true,"max_extension_ms":10},"workdir":"/w","user":"u","hostname":"h",
          "labels":{"k":"v"},"name":"n","entrypoint_b64":["YQ==","gA=="],"timeout_ms":1000,
          "capacity_wait_ms":5000})");
  ASSERT_TRUE(body.ok()) << body.error().ToString();
  v1::CreateRequest expected;
  expected.set_request_id("r");
  expected.set_capacity_wait_ms(1000);  // never past timeout_ms
  v1::SandboxSpec& spec = *expected.mutable_spec();
  spec.set_base("b:1");
  spec.set_workspace("w:1");
  spec.add_toolkits("t:1");
  spec.add_toolkits("t:2");
  spec.set_backend(v1::BACKEND_MICROVM);
  v1::Limits& limits = *spec.mutable_limits();
  limits.set_memory_bytes(1);
  limits.set_cpu_millis(2);
  limits.set_pids(3);
  limits.set_disk_bytes(4);
  limits.set_disk_inodes(5);
  limits.set_shm_bytes(6);
  limits.set_open_files(7);
  limits.set_output_bytes((1ull << 53) - 1);
  spec.mutable_network()->set_mode("none");
  spec.set_ttl_ms(8);
  spec.set_idle_ms(9);
  for (const auto& [key, value] : {std::pair{"A", "a"}, {"B", "\x80"}}) {
    v1::KeyValue* pair = spec.add_env();
    pair->set_key(key);
    pair->set_value(value);
  }
  spec.set_ttl_waits_for_exec(true);
  spec.set_ttl_extension_ms(10);
  spec.set_workdir("/w");
  spec.set_user("u");
  spec.set_hostname("h");
  (*spec.mutable_labels())["k"] = "v";
  spec.set_name("n");
  spec.add_entrypoint("a");
  spec.add_entrypoint("\x80");
  EXPECT_EQ(body->request.SerializeAsString(), expected.SerializeAsString());
  EXPECT_EQ(body->timeout_ms, 1000u);

  const auto nulls = ReadCreate(
      R"({"request_id":"r","base":"b","workspace":null,"toolkits":null,"limits":null,"env":null,"labels":null,
          "ttl_policy":null,"network":null,"timeout_ms":null,"capacity_wait_ms":null,"entrypoint":null})");
  const auto plain = ReadCreate(R"({"base":"b","request_id":"r"})");
  ASSERT_TRUE(nulls.ok() && plain.ok());
  EXPECT_EQ(nulls->request.SerializeAsString(), plain->request.SerializeAsString());
  EXPECT_EQ(nulls->timeout_ms, 60'000u);
}

TEST(JsonIn, BatchItems_WaitForRoomUnlessToldOtherwise) {
  const char* pattern =
      R"({{"request_id":"r","count":2,"sandbox":{{"base":"b","timeout_ms":7000{}}}}})";
  EXPECT_EQ(ReadBatch(fmt::format(fmt::runtime(pattern), ""))->item.request.capacity_wait_ms(),
            7000u);
  EXPECT_EQ(ReadBatch(fmt::format(fmt::runtime(pattern), R"(,"capacity_wait_ms":0)"))
                ->item.request.capacity_wait_ms(),
            0u);
}

TEST(JsonIn, Signals_AreNamesOrNumbers) {
  for (const char* text : {R"("TERM")", R"("SIGTERM")", R"("15")", "15"})
    EXPECT_EQ(ReadSignal(fmt::format(R"({{"signal":{}}})", text))->signal(), 15) << text;
  EXPECT_EQ(ReadSignal(R"({"signal":64,"tree":true})")->tree(), true);
}

}  // namespace
}  // namespace dsec::apiserver
