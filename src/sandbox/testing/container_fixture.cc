// SPDX-License-Identifier: Apache-2.0
#include "sandbox/testing/container_fixture.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "base/clock.h"

namespace dsec::sandbox::testing {
namespace {

namespace fs = std::filesystem;

constexpr char kService[] = "dsec.v1.Aether";
constexpr const char* kPrograms[] = {
    "sh",    "bash", "cat",  "chmod",  "chown",    "cp",      "dd",       "df",       "echo",
    "env",   "head", "id",   "ls",     "mkdir",    "mknod",   "mv",       "nproc",    "rm",
    "sleep", "sort", "stat", "sync",   "tail",     "touch",   "true",     "uname",    "wc",
    "mount", "grep", "ln",   "mkfifo", "hostname", "getconf", "truncate", "fallocate"};

// The shared libraries of a program, as ldd names them.
std::vector<std::string> LibrariesOf(const std::string& program) {
  std::vector<std::string> paths;
  FILE* pipe = ::popen(("ldd " + program + " 2>/dev/null").c_str(), "r");
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof(line), pipe) != nullptr) {
    std::string text(line);
    const size_t start = text.find('/');
    if (start == std::string::npos) continue;
    paths.push_back(text.substr(start, text.find_first_of(" \n", start) - start));
  }
  if (pipe != nullptr) ::pclose(pipe);
  return paths;
}

void CopyInto(const std::string& tree, const std::string& path) {
  const fs::path to = tree + path;
  fs::create_directories(to.parent_path());
  fs::copy_file(fs::canonical(path), to, fs::copy_options::overwrite_existing);
}

Result<void> BuildTree(const std::string& tree) {
  for (const char* dir : {"/bin", "/etc", "/root", "/tmp", "/usr/bin", "/lib64"})
    fs::create_directories(tree + dir);
  ::chmod((tree + "/tmp").c_str(), 01777);
  for (const char* program : kPrograms) {
    std::string path;
    for (const char* dir : {"/bin/", "/usr/bin/"}) {
      if (path.empty() && fs::exists(dir + std::string(program))) path = dir + std::string(program);
    }
    if (path.empty()) continue;
    const fs::path to = tree + "/bin/" + program;
    fs::create_directories(to.parent_path());
    fs::copy_file(fs::canonical(path), to, fs::copy_options::overwrite_existing);
    for (const std::string& library : LibrariesOf(path)) CopyInto(tree, library);
  }
  fs::copy_file(DSEC_CALL_GUEST_PATH, tree + "/bin/call-guest");
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, (tree + "/etc/passwd").c_str(),
                               "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
                               0644));
  return os::CreateFile(AT_FDCWD, (tree + "/etc/group").c_str(), "root:x:0:\nuser:x:1000:\n", 0644);
}

}  // namespace

Result<TestLayers*> TestLayers::Get() {
  // Lives as long as the process: its folder is removed at exit.
  static std::unique_ptr<TestLayers> layers;
  if (layers != nullptr) return layers.get();
  auto made = std::make_unique<TestLayers>();
  DSEC_TRY(auto dir, os::TempDir::Create("dsec-tsb-layers-"));
  made->dir_.emplace(std::move(dir));
  DSEC_TRY(made->store_, image::LayerStore::Open(made->dir_->path() + "/store"));
  made->MakeMounts();
  const std::string tree = made->dir_->path() + "/tree";
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, tree.c_str(), 0755));
  DSEC_TRY_VOID(BuildTree(tree));
  image::BuildRequest request;
  request.kind = image::LayerKind::kBase;
  request.name = "test-base:1";
  request.source = image::SourceKind::kDirectory;
  request.path = tree;
  DSEC_TRY_VOID(made->store_->Build(request, nullptr));
  // What the catalogue keeps open is there before any test counts.
  DSEC_TRY_VOID(made->mounts_->catalog().Resolve(request.name, request.kind));
  DSEC_TRY_VOID(made->mounts_->catalog().DeleteRemoved());
  fs::remove_all(tree);
  layers = std::move(made);
  return layers.get();
}

void TestLayers::AfterFork() {
  static_cast<void>(mounts_.release());  // its end would wait for threads that are not there
  MakeMounts();
}

void TestLayers::MakeMounts() {
  // None is kept after its last use, so that what a test leaves mounted shows.
  mounts_ = std::make_unique<image::LayerMounts>(
      *store_,
      image::LayerMountOptions{.keep_idle = 0,
                               .cache_dir = fmt::format("{}/copies-{}", dir_->path(), ::getpid())});
}

Result<void> TestLayers::AddLayer(image::LayerKind kind, const std::string& name,
                                  const std::string& path, const std::string& content) {
  const std::string tree = dir_->path() + "/tree";
  fs::create_directories(fs::path(tree + path).parent_path());
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, (tree + path).c_str(), content, 0644));
  image::BuildRequest request;
  request.kind = kind;
  request.name = name;
  request.source = image::SourceKind::kDirectory;
  request.path = tree;
  auto built = store_->Build(request, nullptr);
  fs::remove_all(tree);
  if (!built.ok()) return std::move(built).error();
  return Ok();
}

Result<void> TestLayers::AddPython() {
  if (has_python_) return Ok();
  const std::string tree = dir_->path() + "/tree";
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, tree.c_str(), 0755));
  DSEC_TRY_VOID(BuildTree(tree));
  const fs::path program = fs::canonical("/usr/bin/python3");
  const fs::path library = "/usr/lib/" + program.filename().string();
  CopyInto(tree, program);
  for (const std::string& needed : LibrariesOf(program)) CopyInto(tree, needed);
  for (const auto& entry : fs::directory_iterator(library / "lib-dynload")) {
    if (!entry.path().filename().string().starts_with("_ctypes.")) continue;
    for (const std::string& needed : LibrariesOf(entry.path())) CopyInto(tree, needed);
  }
  fs::create_symlink(program.filename(), tree + "/usr/bin/python3");
  fs::create_directories(tree + library.string());
  for (const auto& entry : fs::directory_iterator(library)) {
    const std::string name = entry.path().filename();
    if (name == "test" || name == "idlelib" || name.starts_with("config-")) continue;
    fs::copy(entry.path(), tree + entry.path().string(),
             fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  }
  image::BuildRequest request;
  request.kind = image::LayerKind::kBase;
  request.name = "test-python:1";
  request.source = image::SourceKind::kDirectory;
  request.path = tree;
  auto built = store_->Build(request, nullptr);
  fs::remove_all(tree);
  if (!built.ok()) return std::move(built).error();
  has_python_ = true;
  return Ok();
}

void ContainerTest::SetUp() {
  if (const std::string missing = WhatIsMissing(); !missing.empty()) GTEST_SKIP() << missing;
  auto layers = TestLayers::Get();
  ASSERT_TRUE(layers.ok()) << layers.error().ToString();
  layers_ = *layers;
  before_ = HostState::Take(kAgentUidBase, kAgentUidBase + kSlots);
  dir_.emplace(os::TempDir::Create("dsec-tsb-").value());
  ASSERT_TRUE(os::MakeDir(dir_->fd(), "state", 0700).ok());
  shards_ = std::make_unique<runtime::Shards>(2);
  Open();
}

void ContainerTest::TearDown() {
  if (!dir_.has_value()) return;
  backend_.reset();
  shards_.reset();
  // Whatever the test left behind is its failure, but must not become that of the next.
  const auto purged =
      ContainerBackend::Purge(Options(), Clock::System().Mono() + std::chrono::seconds(20));
  EXPECT_TRUE(purged.ok()) << purged.error().ToString();
  if (purged.ok()) EXPECT_THAT(*purged, ::testing::IsEmpty());
  dir_.reset();
  EXPECT_THAT(Leaks(before_, HostState::Take(kAgentUidBase, kAgentUidBase + kSlots)),
              ::testing::IsEmpty());
}

ContainerOptions ContainerTest::Options() const {
  ContainerOptions options;
  options.node_id = NodeId("tsbox");
  options.state_dir = dir_->path() + "/state";
  options.run_dir = dir_->path() + "/run";
  options.spawner_path = DSEC_SPAWNER_PATH;
  options.agent_path = DSEC_AETHER_PATH;
  options.ids = {kIdBase, kAgentUidBase, kSlots};
  options.scratch_bytes = 4ull << 30;
  return options;
}

void ContainerTest::Open(uint32_t slot_pool_size) {
  backend_.reset();
  ContainerOptions options = Options();
  options.slot_pool_size = slot_pool_size;
  auto opened = ContainerBackend::Open(options, layers_->store(), layers_->mounts());
  ASSERT_TRUE(opened.ok()) << opened.error().ToString();
  backend_ = std::move(*opened);
}

v1::SandboxRecord ContainerTest::NewRecord() const {
  v1::SandboxRecord record;
  record.set_id(NewSandboxId(NodeId("tsbox"), Clock::System()).str());
  record.mutable_spec()->set_base("test-base:1");
  record.mutable_spec()->mutable_limits()->set_memory_bytes(128 << 20);
  record.mutable_spec()->mutable_limits()->set_disk_bytes(64 << 20);
  const auto normal = backend_->Normalize(*record.mutable_spec());
  EXPECT_TRUE(normal.ok()) << normal.error().ToString();
  record.set_state(v1::STATE_STARTING);
  return record;
}

Result<std::shared_ptr<Instance>> ContainerTest::Create(v1::SandboxRecord& record) {
  auto journal = [this](const v1::SandboxRecord& saved) -> Result<void> {
    journal_.push_back(saved);
    return Ok();
  };
  return On(backend_->Create(record, journal, runtime::Deadline::After(std::chrono::seconds(30))));
}

std::shared_ptr<Instance> ContainerTest::MustCreate(v1::SandboxRecord& record) {
  auto made = Create(record);
  EXPECT_TRUE(made.ok()) << made.error().ToString();
  return made.ok() ? std::move(*made) : nullptr;
}

Result<std::shared_ptr<Instance>> ContainerTest::Adopt(const v1::SandboxRecord& record) {
  return On(backend_->Adopt(record, runtime::Deadline::After(std::chrono::seconds(10))));
}

Result<void> ContainerTest::Destroy(const v1::SandboxRecord& record, int seconds) {
  return On(backend_->Destroy(record, runtime::Deadline::After(std::chrono::seconds(seconds))));
}

Result<std::vector<std::string>> ContainerTest::Sweep(const std::vector<v1::SandboxRecord>& live) {
  return On(backend_->Sweep(live, runtime::Deadline::After(std::chrono::seconds(20))));
}

v1::Usage ContainerTest::Usage(Instance& instance) {
  auto usage = On(instance.ReadUsage());
  EXPECT_TRUE(usage.ok()) << usage.error().ToString();
  return usage.ok() ? *usage : v1::Usage();
}

Result<v1::ExecReply> ContainerTest::Call(Instance& instance, const v1::ExecRequest& request) {
  auto task = [](Instance& at, v1::ExecRequest body) -> runtime::Task<v1::ExecReply> {
    const auto channel = at.agent();
    if (channel == nullptr)
      co_return Error(Code::kUnavailable, "test.closed", "the channel has closed");
    co_return co_await channel->Call<v1::ExecReply>(
        kService, "Exec", body, runtime::Deadline::After(std::chrono::seconds(70)));
  };
  return On(task(instance, request));
}

Result<v1::ExecReply> ContainerTest::Poll(Instance& instance, const v1::PollRequest& request) {
  auto task = [](Instance& at, v1::PollRequest body) -> runtime::Task<v1::ExecReply> {
    const auto channel = at.agent();
    if (channel == nullptr)
      co_return Error(Code::kUnavailable, "test.closed", "the channel has closed");
    co_return co_await channel->Call<v1::ExecReply>(
        kService, "Poll", body, runtime::Deadline::After(std::chrono::seconds(70)));
  };
  return On(task(instance, request));
}

Result<ContainerTest::Ran> ContainerTest::Run(Instance& instance, const std::string& script,
                                              uint64_t timeout_ms) {
  v1::ExecRequest request;
  request.set_op_id("op-" + NewUlid(Clock::System()));
  request.set_script(script);
  request.set_timeout_ms(timeout_ms);
  request.set_wait_ms(1000);
  request.set_max_bytes(1 << 20);
  Ran ran;
  DSEC_TRY(auto reply, Call(instance, request));
  while (true) {
    for (const auto& chunk : reply.stdout_chunks()) ran.out += chunk.data();
    for (const auto& chunk : reply.stderr_chunks()) ran.err += chunk.data();
    if (reply.drained()) break;
    v1::PollRequest poll;
    poll.set_op_id(request.op_id());
    poll.set_stdout_offset(reply.stdout_next());
    poll.set_stderr_offset(reply.stderr_next());
    poll.set_wait_ms(1000);
    poll.set_max_bytes(1 << 20);
    DSEC_TRY(reply, Poll(instance, poll));
  }
  ran.result = reply.result();
  return ran;
}

Result<void> ContainerTest::Start(Instance& instance, const std::string& op_id,
                                  const std::string& script, const std::string& first) {
  v1::ExecRequest request;
  request.set_op_id(op_id);
  request.set_script(script);
  request.set_detached(true);
  request.set_max_bytes(1 << 16);
  DSEC_TRY(auto reply, Call(instance, request));
  std::string out;
  const MonoTime end = Clock::System().Mono() + std::chrono::seconds(20);
  while (Clock::System().Mono() < end) {
    for (const auto& chunk : reply.stdout_chunks()) out += chunk.data();
    if (out.find(first) != std::string::npos) return Ok();
    v1::PollRequest poll;
    poll.set_op_id(op_id);
    poll.set_stdout_offset(reply.stdout_next());
    poll.set_wait_ms(1000);
    poll.set_max_bytes(1 << 16);
    DSEC_TRY(reply, Poll(instance, poll));
  }
  return Error(Code::kDeadlineExceeded, "test.start", "never wrote " + first);
}

std::string ContainerTest::CgroupPath(const std::string& hierarchy,
                                      const v1::SandboxRecord& record) const {
  return fmt::format("/sys/fs/cgroup/{}/dsec-tsbox/s{}-{}", hierarchy, record.slot(),
                     record.slot_generation());
}

std::string ContainerTest::UpperPath(const v1::SandboxRecord& record,
                                     const std::string& path) const {
  return fmt::format("{}/{}/upper{}", backend_->ScratchPath(), record.scratch(), path);
}

}  // namespace dsec::sandbox::testing
