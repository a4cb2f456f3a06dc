// SPDX-License-Identifier: Apache-2.0
// Task types: JSON, rules, the folders of a node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "fn/rules.h"
#include "fn/task_type.h"
#include "fn/type_registry.h"
#include "os/file.h"

namespace dsec::fn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

Result<v1::FnLimits> AnyLimits(v1::FnLimits limits, std::string_view prefix) {
  if (limits.wall_ms() <= 1000) return limits;
  return Error(Code::kInvalidArgument, "fn.bad_limit", "too large")
      .WithField(std::string(prefix) + ".wall_ms");
}

constexpr const char* kFull = R"({
  "name": "full", "aliases": ["f", "f++"], "description": "All there is",
  "environment": {"base": "b:1", "workspace": "w:1", "toolkits": ["t:1", "t:2"]},
  "source": "src/main.x",
  "compile": {"argv": ["/bin/cc", "{source}"], "env": {"A": "1", "B": "ä"},
    "limits": {"wall_ms": 1, "cpu_ms": 2, "memory_bytes": 3, "processes": 4, "output_bytes": 5,
      "file_bytes": 6, "disk_bytes": 7, "disk_inodes": 8}, "artifacts": ["main"]},
  "run": {"argv": ["./main", "{args}"], "env": {"C": ""}, "limits": {"wall_ms": 9}},
  "pool": {"min": 1, "max": 2, "idle_ms": 3},
  "warm": {"kind": "python", "argv": ["/usr/bin/python3", "-I"], "imports": ["json", "os.path"]}})";

TEST(TaskType, Json_ReadsAllFieldsAndBack) {
  const auto type = ParseTaskType(kFull);
  ASSERT_TRUE(type.ok()) << type.error().ToString();
  EXPECT_THAT(type->aliases(), ElementsAre("f", "f++"));
  EXPECT_EQ(type->environment().toolkits(1), "t:2");
  EXPECT_EQ(type->compile().limits().disk_inodes(), 8);
  EXPECT_EQ(type->compile().env(1).value(), "ä");
  EXPECT_EQ(type->pool().idle_ms(), 3);
  EXPECT_THAT(type->warm().imports(), ElementsAre("json", "os.path"));
  const auto checked = CheckTaskType(*type, AnyLimits);
  EXPECT_TRUE(checked.ok()) << checked.error().ToString();
  const auto again = ParseTaskType(FormatTaskType(*type));
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(again->SerializeAsString(), type->SerializeAsString());
}

TEST(TaskType, BadJson_NamesFieldAndRule) {
  struct Case {
    const char* json;
    const char* reason;
    const char* field;
  };
  for (const Case& bad : {
           Case{"", "request.malformed", ""},
           Case{"[]", "request.malformed", ""},
           Case{"{\"name\": \"\xff\"}", "request.malformed", ""},
           Case{R"({"a":[[[[[[[[[[1]]]]]]]]]]})", "request.malformed", ""},
           Case{R"({"name": "a", "name": "b"})", "request.duplicate", "name"},
           Case{R"({"run": {"argv": [], "argv": []}})", "request.duplicate", "argv"},
           Case{R"({"nam": "a"})", "request.unknown_field", "nam"},
           Case{R"({"run": {"artifacts": []}})", "request.unknown_field", "run.artifacts"},
           Case{R"({"run": {"limits": {"ms": 1}}})", "request.unknown_field", "run.limits.ms"},
           Case{R"({"name": 1})", "request.wrong_type", "name"},
           Case{R"({"run": []})", "request.wrong_type", "run"},
           Case{R"({"run": {"argv": "a"}})", "request.wrong_type", "run.argv"},
           Case{R"({"run": {"argv": [1]}})", "request.wrong_type", "run.argv"},
           Case{R"({"run": {"env": {"A": 1}}})", "request.wrong_type", "run.env"},
           Case{R"({"pool": {"min": -1}})", "request.wrong_type", "pool.min"},
           Case{R"({"pool": {"min": 4294967296}})", "request.wrong_type", "pool.min"},
           Case{R"({"pool": {"min": 1.0}})", "request.wrong_type", "pool.min"},
           Case{R"({"run": {"limits": {"wall_ms": "1"}}})", "request.wrong_type",
                "run.limits.wall_ms"},
       }) {
    const auto type = ParseTaskType(bad.json);
    ASSERT_FALSE(type.ok()) << bad.json;
    EXPECT_EQ(type.error().code(), Code::kInvalidArgument) << bad.json;
    EXPECT_EQ(type.error().reason(), bad.reason) << bad.json;
    EXPECT_EQ(type.error().field(), bad.field) << bad.json;
  }
  EXPECT_EQ(ParseTaskType(std::string(kMaxTypeBytes + 1, ' ')).error().reason(),
            "request.malformed");
}

TEST(TaskType, Rules_NameTheField) {
  struct Case {
    std::function<void(v1::FnTaskType&)> change;
    const char* field;
  };
  using Type = v1::FnTaskType;
  for (const Case& bad : {
           Case{[](Type& t) { t.set_name(""); }, "name"},
           Case{[](Type& t) { t.set_name("A"); }, "name"},
           Case{[](Type& t) { t.set_name("a/../b"); }, "name"},
           Case{[](Type& t) { t.set_name(".a"); }, "name"},
           Case{[](Type& t) { t.set_name(std::string(64, 'a')); }, "name"},
           Case{[](Type& t) { t.set_aliases(1, "f"); }, "aliases[1]"},
           Case{[](Type& t) { t.set_aliases(1, "full"); }, "aliases[1]"},
           Case{[](Type& t) { t.set_description("a\nb"); }, "description"},
           Case{[](Type& t) { t.mutable_environment()->clear_base(); }, "environment.base"},
           Case{[](Type& t) { t.set_source("../a"); }, "source"},
           Case{[](Type& t) { t.clear_source(); }, "compile.argv[1]"},
           Case{[](Type& t) { t.mutable_compile()->set_argv(0, "cc"); }, "compile.argv[0]"},
           Case{[](Type& t) { t.mutable_compile()->add_argv("{args}"); }, "compile.argv[2]"},
           Case{[](Type& t) { t.mutable_compile()->set_artifacts(0, "a/"); },
                "compile.artifacts[0]"},
           Case{[](Type& t) { t.mutable_compile()->clear_argv(); }, "compile.artifacts"},
           Case{[](Type& t) { t.mutable_compile()->mutable_env(0)->set_key("A="); }, "compile.env"},
           Case{[](Type& t) { t.mutable_compile()->mutable_env(0)->set_value("\xff"); },
                "compile.env"},
           Case{[](Type& t) { t.mutable_compile()->mutable_limits()->set_wall_ms(2000); },
                "compile.limits.wall_ms"},
           Case{[](Type& t) { t.mutable_run()->clear_argv(); }, "run.argv"},
           Case{[](Type& t) { t.mutable_run()->add_argv("{args}"); }, "run.argv[2]"},
           Case{[](Type& t) { t.mutable_run()->add_argv(std::string("a\0b", 3)); }, "run.argv[2]"},
           Case{[](Type& t) { t.mutable_run()->add_artifacts("a"); }, "run.artifacts"},
           Case{[](Type& t) { t.mutable_pool()->set_min(3); }, "pool.min"},
           Case{[](Type& t) { t.mutable_pool()->set_max(5000); }, "pool.max"},
           Case{[](Type& t) { t.mutable_warm()->set_kind("ruby"); }, "warm.kind"},
           Case{[](Type& t) { t.mutable_warm()->clear_kind(); }, "warm.kind"},
           Case{[](Type& t) { t.mutable_warm()->set_argv(0, "./python"); }, "warm.argv[0]"},
           Case{[](Type& t) { t.mutable_warm()->set_imports(0, "os;x"); }, "warm.imports[0]"},
           Case{[](Type& t) { t.mutable_warm()->set_imports(0, "os."); }, "warm.imports[0]"},
           Case{[](Type& t) { t.mutable_warm()->set_imports(0, ".os"); }, "warm.imports[0]"},
       }) {
    v1::FnTaskType type = *ParseTaskType(kFull);
    bad.change(type);
    const auto checked = CheckTaskType(type, AnyLimits);
    ASSERT_FALSE(checked.ok()) << bad.field;
    EXPECT_EQ(checked.error().code(), Code::kInvalidArgument) << bad.field;
    EXPECT_EQ(checked.error().field(), bad.field) << checked.error().ToString();
  }
}

// What the project brings along must load on a node without settings.
TEST(TaskType, Shipped_AllLoad) {
  auto dir = os::TempDir::Create("dsec-fn");
  ASSERT_TRUE(dir.ok());
  auto registry = TypeRegistry::Open(
      {DSEC_SOURCE_DIR "/share/fn_types"}, dir->path() + "/put",
      [](v1::FnLimits limits, std::string_view) -> Result<v1::FnLimits> { return limits; });
  ASSERT_TRUE(registry.ok());
  EXPECT_TRUE((*registry)->Faults().empty());
  for (const char* name : {"bash", "c", "cpp", "go", "java", "javascript", "python"}) {
    EXPECT_TRUE((*registry)->Find(name).ok()) << name;
  }
}

class TypeRegistryTest : public ::testing::Test {
 protected:
  TypeRegistryTest() {
    std::filesystem::create_directories(dir_.path() + "/node");
    Write("node/a.json", Json("a", R"("aliases": ["first"],)"));
  }
  static std::string Json(const std::string& name, const std::string& more = "") {
    return "{\"name\": \"" + name + "\", " + more +
           R"("environment": {"base": "b:1"}, "run": {"argv": ["/bin/run"]}})";
  }
  static v1::FnTaskType Type(const std::string& name, const std::string& more = "") {
    return *ParseTaskType(Json(name, more));
  }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(dir_.path() + "/" + path) << text;
  }
  void Open() {
    auto opened = TypeRegistry::Open({dir_.path() + "/node"}, dir_.path() + "/put", AnyLimits);
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    registry_ = std::move(*opened);
  }

  os::TempDir dir_ = std::move(os::TempDir::Create("dsec-fn")).value();
  std::unique_ptr<TypeRegistry> registry_;
};

TEST_F(TypeRegistryTest, Find_ByNameOrAlias) {
  Open();
  EXPECT_EQ((*registry_->Find("first"))->name(), "a");
  EXPECT_EQ(registry_->Find("b").error().reason(), "fn.type_not_found");
  EXPECT_EQ(registry_->Find("a b").error().code(), Code::kInvalidArgument);
}

TEST_F(TypeRegistryTest, BadFile_IsAFaultAndTheOthersLoad) {
  Write("node/b.json", "{");
  Write("node/c.json", Json("other"));
  Write("node/d.json", Json("d", R"("aliases": ["first"],)"));
  Write("node/.hidden.json", "{");
  Write("node/notes.txt", "{");
  Open();
  EXPECT_THAT(registry_->List(), SizeIs(1));
  const auto faults = registry_->Faults();
  ASSERT_THAT(faults, SizeIs(3));
  EXPECT_THAT(faults[0].file, HasSubstr("b.json"));
  EXPECT_THAT(faults[1].error, HasSubstr("name of the file"));
  EXPECT_THAT(faults[2].error, HasSubstr("aliases[0]"));
}

TEST_F(TypeRegistryTest, MissingFolder_IsAFault) {
  auto opened = TypeRegistry::Open({dir_.path() + "/none"}, dir_.path() + "/put", AnyLimits);
  ASSERT_TRUE(opened.ok());
  EXPECT_THAT((*opened)->Faults(), SizeIs(1));
}

TEST_F(TypeRegistryTest, Put_StandsBeforeTheNodesAndSurvives) {
  Open();
  ASSERT_TRUE(registry_->Put(Type("a", R"("description": "mine",)")).ok());
  ASSERT_TRUE(registry_->Put(Type("b", R"("aliases": ["second"],)")).ok());
  EXPECT_EQ(registry_->Find("first").error().reason(), "fn.type_not_found");
  Open();
  EXPECT_EQ((*registry_->Find("a"))->description(), "mine");
  EXPECT_EQ((*registry_->Find("second"))->name(), "b");
  ASSERT_TRUE(registry_->Remove("a").ok());
  EXPECT_EQ((*registry_->Find("first"))->name(), "a") << "that of the node is there again";
  EXPECT_EQ(registry_->Remove("a").error().reason(), "fn.type_of_node");
  EXPECT_EQ(registry_->Remove("none").error().reason(), "fn.type_not_found");
  Open();
  EXPECT_EQ((*registry_->Find("a"))->description(), "");
}

TEST_F(TypeRegistryTest, Put_RefusesNamesOfOthers) {
  Open();
  const auto taken = registry_->Put(Type("b", R"("aliases": ["a"],)"));
  ASSERT_FALSE(taken.ok());
  EXPECT_EQ(taken.error().code(), Code::kAlreadyExists);
  EXPECT_EQ(taken.error().field(), "aliases[0]");
  EXPECT_EQ(registry_->Put(Type("first")).error().field(), "name");
}

TEST_F(TypeRegistryTest, HalfWrittenFile_IsNotSeen) {
  std::filesystem::create_directories(dir_.path() + "/put");
  Write("put/.b.json.new", "{");
  Open();
  EXPECT_TRUE(registry_->Faults().empty());
  ASSERT_TRUE(registry_->Put(Type("b")).ok());
  EXPECT_TRUE(registry_->Find("b").ok());
}

}  // namespace
}  // namespace dsec::fn
