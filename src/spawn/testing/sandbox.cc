// SPDX-License-Identifier: Apache-2.0
#include "spawn/testing/sandbox.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>
#include <sstream>

#include "os/fd_passing.h"
#include "os/memfd.h"
#include "os/mount.h"

namespace dsec::spawn::testing {
namespace {

using os::UniqueFd;

constexpr char kGroup[] = "dsec-tspawn";
constexpr uint32_t kAgentUidBase = 1'900'000'000;
constexpr uint32_t kIdBase = 1'910'000'000;
std::atomic<uint32_t> next_slot{0};

struct Hierarchies {
  std::string v2;
  std::map<std::string, std::string> v1;  // controller -> mount point
};

const Hierarchies& FindHierarchies() {
  static const Hierarchies kFound = [] {
    Hierarchies result;
    auto text = os::ReadFile(AT_FDCWD, "/proc/self/mountinfo", 1 << 20);
    std::istringstream lines(text.ok() ? *text : "");
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string word, point, type, options;
      for (int i = 0; i < 5 && words >> word; ++i) point = word;
      while (words >> word && word != "-") {
      }
      words >> type >> word >> options;
      if (type == "cgroup2") result.v2 = point;
      if (type != "cgroup") continue;
      for (const char* controller : {"memory", "pids", "cpu", "cpuset", "freezer"}) {
        std::string padded = "," + options + ",";
        if (padded.find(fmt::format(",{},", controller)) != std::string::npos)
          result.v1[controller] = point;
      }
    }
    return result;
  }();
  return kFound;
}

Result<UniqueFd> OpenDir(const std::string& path) {
  return os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
}

Result<void> Own(const std::string& path, uint32_t id) {
  if (::chown(path.c_str(), id, id) != 0) return os::ErrnoError("test.chown", path);
  return Ok();
}

std::span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

namespace {

std::vector<int> OpenFds() {
  std::vector<int> fds;
  for (int fd = 0; fd < 512; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) fds.push_back(fd);
  }
  return fds;
}

std::set<std::string> Mounts() {
  std::set<std::string> mounts;
  auto text = os::ReadFile(AT_FDCWD, "/proc/self/mountinfo", 1 << 20);
  std::istringstream lines(text.ok() ? *text : text.error().ToString());
  for (std::string line; std::getline(lines, line);) mounts.insert(line);
  return mounts;
}

}  // namespace

void SpawnTest::SetUpTestSuite() {
  if (WhatIsMissing()) return;
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
}

void SpawnTest::SetUp() {
  if (auto missing = WhatIsMissing()) GTEST_SKIP() << *missing;
  mounts_before_ = Mounts();
  fds_before_ = OpenFds();
  auto spawner = Spawner::Start(TestSpawnerOptions());
  ASSERT_TRUE(spawner.ok()) << spawner.error().ToString();
  spawner_ = std::move(spawner).value();
}

void SpawnTest::TearDown() {
  if (IsSkipped() && spawner_ == nullptr) return;
  sandbox_.reset();
  spawner_.reset();
  // Fewer is possible: the kernel takes a mount away everywhere when somebody removes the directory
  // below it.
  for (const std::string& mount : Mounts()) EXPECT_TRUE(mounts_before_.contains(mount)) << mount;
  EXPECT_EQ(OpenFds(), fds_before_);
}

Sandbox* SpawnTest::Slot() {
  auto made = Sandbox::MakeSlot(*spawner_);
  if (!made.ok()) {
    ADD_FAILURE() << made.error().ToString();
    return nullptr;
  }
  sandbox_ = std::move(made).value();
  return sandbox_.get();
}

Sandbox* SpawnTest::Launched(const LaunchPlan& plan) {
  if (Slot() == nullptr) return nullptr;
  auto report = sandbox_->Launch(plan);
  if (!report.ok()) {
    ADD_FAILURE() << report.error().ToString();
    return nullptr;
  }
  return sandbox_.get();
}

MonoTime In(int seconds) { return Clock::System().Mono() + std::chrono::seconds(seconds); }
SpawnerOptions TestSpawnerOptions() {
  SpawnerOptions options;
  options.spawner_path = DSEC_SPAWNER_PATH;
  options.agent_path = DSEC_TEST_AGENT_PATH;
  return options;
}
std::string GuestPath() { return DSEC_GUEST_PATH; }

std::optional<std::string> WhatIsMissing() {
  if (::geteuid() != 0) return "needs root";
  if (::prctl(PR_CAPBSET_READ, CAP_SYS_ADMIN, 0, 0, 0) != 1) return "needs CAP_SYS_ADMIN";
  if (FindHierarchies().v2.empty()) return "no cgroup2 file system is mounted";
  return std::nullopt;
}

Result<std::unique_ptr<SlotCgroups>> SlotCgroups::Create(uint32_t agent_uid, uint32_t id_base) {
  auto made = std::make_unique<SlotCgroups>();
  const Hierarchies& host = FindHierarchies();
  std::string name = fmt::format("{}/{}-{}", kGroup, ::getpid(), agent_uid);
  made->v2_path = fmt::format("{}/{}", host.v2, name);
  ::mkdir(fmt::format("{}/{}", host.v2, kGroup).c_str(), 0755);
  for (const char* part : {"", "/agent", "/code", "/code/init"}) {
    DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, (made->v2_path + part).c_str(), 0755));
  }
  for (const char* part : {"", "/cgroup.procs", "/agent/cgroup.procs", "/code", "/code/init",
                           "/code/init/cgroup.procs"}) {
    DSEC_TRY_VOID(Own(made->v2_path + part, agent_uid));
  }
  DSEC_TRY_VOID(Own(made->v2_path + "/code/cgroup.procs", id_base));
  DSEC_TRY(made->slot_dir, OpenDir(made->v2_path));
  DSEC_TRY(made->agent_dir, OpenDir(made->v2_path + "/agent"));
  DSEC_TRY(made->init_dir, OpenDir(made->v2_path + "/code/init"));
  for (const auto& [controller, point] : host.v1) {
    if (controller == "cpuset") continue;  // needs cpus and mems first; the edge's business
    std::string path = fmt::format("{}/{}", point, name);
    ::mkdir(fmt::format("{}/{}", point, kGroup).c_str(), 0755);
    DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, path.c_str(), 0755));
    made->v1_paths.push_back(path);
    DSEC_TRY(auto procs, os::OpenAt(AT_FDCWD, (path + "/cgroup.procs").c_str(), O_WRONLY));
    made->v1_procs.push_back(std::move(procs));
    if (controller == "memory") {
      DSEC_TRY(made->memory_dir, OpenDir(path));
      DSEC_TRY_VOID(Own(path + "/cgroup.event_control", agent_uid));
    }
    if (controller == "pids") {
      DSEC_TRY(made->pids_dir, OpenDir(path));
    }
    if (controller == "cpu") {
      DSEC_TRY(made->cpu_dir, OpenDir(path));
    }
  }
  return made;
}

Result<std::vector<pid_t>> SlotCgroups::Processes() const {
  std::vector<pid_t> pids;
  for (const char* part : {"/agent/cgroup.procs", "/code/init/cgroup.procs"}) {
    DSEC_TRY(auto text, os::ReadFile(AT_FDCWD, (v2_path + part).c_str(), 1 << 20));
    std::istringstream lines(text);
    for (pid_t pid; lines >> pid;) pids.push_back(pid);
  }
  return pids;
}

Result<bool> SlotCgroups::WaitEmpty(MonoTime deadline) const {
  DSEC_TRY(auto events, os::OpenAt(slot_dir.get(), "cgroup.events", O_RDONLY));
  while (true) {
    char text[128] = {};
    if (::pread(events.get(), text, sizeof(text) - 1, 0) < 0)
      return os::ErrnoError("test.read", "cgroup.events");
    if (std::strstr(text, "populated 0") != nullptr) return true;
    auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::System().Mono())
            .count();
    if (left <= 0) return false;
    pollfd item = {events.get(), POLLPRI, 0};
    ::poll(&item, 1, static_cast<int>(left));
  }
}

Result<void> SlotCgroups::Kill() const {
  return os::WriteExisting(slot_dir.get(), "cgroup.kill", "1");
}

SlotCgroups::~SlotCgroups() {
  if (slot_dir.valid()) {
    auto killed = Kill();
    auto empty = WaitEmpty(In(10));
    if (!killed.ok() || !empty.ok() || !*empty)
      std::fprintf(stderr, "%s is not empty\n", v2_path.c_str());
  }
  v1_procs.clear();
  for (const std::string& path : v1_paths) ::rmdir(path.c_str());
  // Directories of execs first.
  auto code = OpenDir(v2_path + "/code");
  if (code.ok()) {
    for (int i = 0; i < 64; ++i)
      ::unlinkat(code->get(), fmt::format("x{}", i).c_str(), AT_REMOVEDIR);
  }
  for (const char* part : {"/code/init", "/code", "/agent", ""}) ::rmdir((v2_path + part).c_str());
  const Hierarchies& host = FindHierarchies();
  ::rmdir(fmt::format("{}/{}", host.v2, kGroup).c_str());
  for (const auto& [controller, point] : host.v1)
    ::rmdir(fmt::format("{}/{}", point, kGroup).c_str());
}

bool ExecResult::Exited(int code) const {
  return !failure.has_value() && WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == code;
}

Result<std::unique_ptr<Sandbox>> Sandbox::MakeSlot(Spawner& spawner) {
  std::unique_ptr<Sandbox> sandbox(new Sandbox());
  uint32_t n = next_slot++;
  sandbox->agent_uid = kAgentUidBase + n;
  sandbox->id_base = kIdBase + n * wire::kIdCount;
  DSEC_TRY(sandbox->cgroups, SlotCgroups::Create(sandbox->agent_uid, sandbox->id_base));
  DSEC_TRY(auto dir, os::TempDir::Create("dsec-spawn-"));
  sandbox->dir_ = std::make_unique<os::TempDir>(std::move(dir));

  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s/sock",
                sandbox->dir_->path().c_str());
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener.get(), 4) != 0) {
    return os::ErrnoError("test.listen", address.sun_path);
  }
  sandbox->token = std::string(abi::kTokenBytes, static_cast<char>('A' + n % 26));
  DSEC_TRY(auto token_fd, os::SealedMemfd("token", BytesOf(sandbox->token)));

  SlotPlan plan;
  plan.agent_uid = sandbox->agent_uid;
  plan.id_base = sandbox->id_base;
  plan.listen_fd = listener.get();
  plan.token_fd = token_fd.get();
  plan.slot_dir_fd = sandbox->cgroups->slot_dir.get();
  plan.agent_dir_fd = sandbox->cgroups->agent_dir.get();
  plan.init_dir_fd = sandbox->cgroups->init_dir.get();
  plan.memory_dir_fd = sandbox->cgroups->memory_dir.get();
  plan.pids_dir_fd = sandbox->cgroups->pids_dir.get();
  plan.cpu_dir_fd = sandbox->cgroups->cpu_dir.get();
  for (const UniqueFd& fd : sandbox->cgroups->v1_procs) plan.v1_procs_fds.push_back(fd.get());
  MonoTime begin = Clock::System().Mono();
  DSEC_TRY(sandbox->process,
           spawner.MakeSlot(plan, runtime::Deadline::After(std::chrono::seconds(20))));
  sandbox->make_usec =
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::System().Mono() - begin).count();
  return sandbox;
}

Sandbox::~Sandbox() = default;

LaunchPlan Sandbox::DefaultPlan() {
  LaunchPlan plan;
  plan.hostname = "sandbox-1";
  plan.hosts = "127.0.0.1 localhost sandbox-1\n";
  plan.resolv_conf = "nameserver 127.0.0.1\n";
  return plan;
}

Result<UniqueFd> Sandbox::NewRoot() {
  DSEC_TRY(auto context, os::FsContext::Open("tmpfs"));
  DSEC_TRY_VOID(context.SetString("mode", "0755"));
  DSEC_TRY_VOID(context.SetString("uid", fmt::format("{}", id_base).c_str()));
  DSEC_TRY_VOID(context.SetString("gid", fmt::format("{}", id_base).c_str()));
  DSEC_TRY(auto mount, std::move(context).Mount(0));
  DSEC_TRY_VOID(os::MakeDir(mount.get(), "bin", 0755));
  DSEC_TRY(auto source, os::OpenAt(AT_FDCWD, GuestPath().c_str(), O_RDONLY));
  DSEC_TRY(auto content, os::ReadAll(source.get(), 64 << 20));
  DSEC_TRY_VOID(os::CreateFile(mount.get(), "bin/guest", content, 0755));
  for (const char* path : {"bin", "bin/guest"}) {
    if (::fchownat(mount.get(), path, id_base, id_base, 0) != 0)
      return os::ErrnoError("test.chown", path);
  }
  return mount;
}

Result<UniqueFd> Sandbox::NewHostImageRoot() {
  DSEC_TRY(auto lower, os::CloneMount(AT_FDCWD, "/", false));
  auto mapped = os::SetMountAttributes(lower.get(), MOUNT_ATTR_RDONLY, 0, process.user_ns.get());
  if (!mapped.ok()) {
    return Error(Code::kFailedPrecondition, "test.idmap",
                 "no id-mapped mounts of the host's root: " + mapped.error().ToString());
  }
  DSEC_TRY(auto scratch_context, os::FsContext::Open("tmpfs"));
  DSEC_TRY(auto scratch, std::move(scratch_context).Mount(0));
  for (const char* name : {"upper", "work"}) {
    DSEC_TRY_VOID(os::MakeDir(scratch.get(), name, 0755));
    if (::fchownat(scratch.get(), name, id_base, id_base, 0) != 0)
      return os::ErrnoError("test.chown", name);
  }
  DSEC_TRY(auto upper, os::OpenAt(scratch.get(), "upper", O_PATH | O_DIRECTORY));
  DSEC_TRY(auto work, os::OpenAt(scratch.get(), "work", O_PATH | O_DIRECTORY));
  DSEC_TRY(auto overlay, os::FsContext::Open("overlay"));
  DSEC_TRY_VOID(overlay.SetFd("lowerdir+", lower.get()));
  DSEC_TRY_VOID(overlay.SetFd("upperdir", upper.get()));
  DSEC_TRY_VOID(overlay.SetFd("workdir", work.get()));
  DSEC_TRY_VOID(overlay.SetFlag("volatile"));
  return std::move(overlay).Mount(0);
}

Result<LaunchReport> Sandbox::Launch(const LaunchPlan& plan, UniqueFd new_root,
                                     const std::vector<UniqueFd>& views) {
  if (!new_root.valid()) {
    DSEC_TRY(new_root, NewRoot());
  }
  std::vector<int> fds = {new_root.get()};
  for (const UniqueFd& view : views) fds.push_back(view.get());
  DSEC_TRY(auto report, spawn::Launch(process.launch_socket.get(), plan, fds,
                                      runtime::Deadline::After(std::chrono::seconds(20))));
  DSEC_TRY_VOID(Connect());
  return report;
}

Result<void> Sandbox::Connect() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s/sock", dir_->path().c_str());
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return os::ErrnoError("test.connect", address.sun_path);
  }
  connection = std::move(socket);
  // The agent takes the root from init's channel and the request from this one in either order.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::vector<UniqueFd> fds;
    DSEC_TRY_VOID(Ask("h", &fds));
    if (fds.size() != 4) continue;
    channel = std::move(fds[0]);
    root = std::move(fds[1]);
    init_pidfd = std::move(fds[2]);
    return Ok();
  }
  return Error(Code::kInternal, "test.agent", "the agent never got the root");
}

Result<std::string> Sandbox::Ask(const std::string& request, std::vector<UniqueFd>* fds) {
  if (::send(connection.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0)
    return os::ErrnoError("test.ask", request);
  DSEC_TRY(bool ready, os::WaitReadable(connection.get(), In(10)));
  if (!ready) return Error(Code::kDeadlineExceeded, "test.ask", request);
  DSEC_TRY(auto packet, os::ReceivePacket(connection.get(), 65536));
  if (fds != nullptr) *fds = std::move(packet.fds);
  return std::move(packet.data);
}

Result<RunningExec> Sandbox::Start(const ExecSpec& spec) {
  abi::ExecPayload payload;
  std::string strings;
  auto add = [&strings](const std::string& text) { strings.append(text.c_str(), text.size() + 1); };
  std::vector<std::string> argv = spec.argv;
  UniqueFd script;
  if (spec.script.has_value()) {
    argv = {"sh", "/proc/self/fd/3"};
    DSEC_TRY(auto sealed, os::SealedMemfd("script", BytesOf("exec 3<&-;" + *spec.script)));
    DSEC_TRY(script,
             os::OpenAt(AT_FDCWD, fmt::format("/proc/self/fd/{}", sealed.get()).c_str(), O_RDONLY));
  }
  for (const std::string& text : argv) add(text);
  for (const std::string& text : spec.env) add(text);
  add(spec.cwd);
  payload.strings_bytes = static_cast<uint32_t>(strings.size());
  payload.argc = static_cast<uint32_t>(argv.size());
  payload.envc = static_cast<uint32_t>(spec.env.size());
  payload.uid = spec.uid;
  payload.gid = spec.gid;
  payload.flags = spec.tty >= 0 ? abi::kControllingTty : 0;
  payload.group_count = static_cast<uint32_t>(spec.groups.size());
  std::copy(spec.groups.begin(), spec.groups.end(), payload.groups);
  payload.rlimit_count = static_cast<uint32_t>(spec.rlimits.size());
  std::copy(spec.rlimits.begin(), spec.rlimits.end(), payload.rlimits);
  std::string blob(reinterpret_cast<const char*>(&payload), sizeof(payload));
  DSEC_TRY(auto memfd, os::SealedMemfd("exec", BytesOf(blob + strings)));

  int in[2], out[2], err[2], status[2];
  for (int* ends : {in, out, err, status}) {
    if (::pipe2(ends, O_CLOEXEC) != 0) return os::ErrnoError("test.pipe", "pipe");
  }
  UniqueFd in_read(in[0]), in_write(in[1]), out_write(out[1]), err_write(err[1]),
      status_write(status[1]);
  RunningExec run;
  run.id = next_id_++;
  run.out.Reset(out[0]);
  run.err.Reset(err[0]);
  run.status.Reset(status[0]);
  if (!spec.input.empty()) DSEC_TRY_VOID(os::WriteAll(in_write.get(), spec.input));
  in_write.Reset();

  abi::ExecRequest request;
  request.id = run.id;
  std::vector<int> fds = {memfd.get(), status_write.get()};
  if (spec.tty >= 0) {
    fds.insert(fds.end(), {spec.tty, spec.tty, spec.tty});
  } else {
    fds.insert(fds.end(), {in_read.get(), out_write.get(), err_write.get()});
  }
  if (spec.cgroup >= 0) {
    request.flags |= abi::kHasCgroup;
    fds.push_back(spec.cgroup);
  }
  if (spec.program >= 0) {
    request.flags |= abi::kHasProgram;
    fds.push_back(spec.program);
  }
  if (script.valid()) {
    request.extra_fds = 1;
    fds.push_back(script.get());
  }
  DSEC_TRY_VOID(os::SendPacket(channel.get(),
                               {reinterpret_cast<const uint8_t*>(&request), sizeof(request)}, fds));
  return run;
}

Result<void> Sandbox::TakeMessage(MonoTime deadline) {
  DSEC_TRY(bool ready, os::WaitReadable(channel.get(), deadline));
  if (!ready) return Error(Code::kDeadlineExceeded, "test.init", "no message from init");
  DSEC_TRY(auto packet, os::ReceivePacket(channel.get(), 256));
  uint32_t type = 0;
  std::memcpy(&type, packet.data.data(), sizeof(type));
  if (type == abi::kStarted) {
    abi::InitStarted message;
    std::memcpy(&message, packet.data.data(), sizeof(message));
    if (packet.fds.size() != 1)
      return Error(Code::kInternal, "test.init", "InitStarted without a pidfd");
    started[message.id] = message;
  } else if (type == abi::kEnded) {
    abi::InitEnded message;
    std::memcpy(&message, packet.data.data(), sizeof(message));
    if (!started.contains(message.id))
      return Error(Code::kInternal, "test.init", "InitEnded before InitStarted");
    ended[message.id] = message;
  } else if (type == abi::kFs) {
    abi::InitFs message;
    std::memcpy(&message, packet.data.data(), sizeof(message));
    fs_errno = message.sys_errno;
    if (!packet.fds.empty()) fs = std::move(packet.fds[0]);
  } else {
    return Error(Code::kInternal, "test.init", fmt::format("message type {}", type));
  }
  return Ok();
}

Result<ExecResult> Sandbox::Finish(RunningExec& run) {
  MonoTime deadline = In(20);
  ExecResult result;
  DSEC_TRY(bool ready, os::WaitReadable(run.status.get(), deadline));
  if (!ready) return Error(Code::kDeadlineExceeded, "test.exec", "the status pipe stays silent");
  DSEC_TRY(auto report, os::ReadAll(run.status.get(), 64));
  if (!report.empty()) {
    if (report.size() != sizeof(abi::ExecFailure))
      return Error(Code::kInternal, "test.exec", "odd failure record");
    result.failure.emplace();
    std::memcpy(&*result.failure, report.data(), sizeof(abi::ExecFailure));
    if (result.failure->step <= abi::ExecStep::kClone &&
        result.failure->step != abi::ExecStep::kRequest)
      return result;
  }
  for (auto [fd, text] : {std::pair(&run.out, &result.out), std::pair(&run.err, &result.err)}) {
    while (true) {
      DSEC_TRY(bool more, os::WaitReadable(fd->get(), deadline));
      if (!more) return Error(Code::kDeadlineExceeded, "test.exec", "output stays open");
      char data[65536];
      ssize_t n = ::read(fd->get(), data, sizeof(data));
      if (n <= 0) break;
      text->append(data, static_cast<size_t>(n));
    }
  }
  while (!ended.contains(run.id)) DSEC_TRY_VOID(TakeMessage(deadline));
  result.wait_status = ended[run.id].wait_status;
  result.max_rss_bytes = ended[run.id].max_rss_bytes;
  result.pid = started[run.id].pid;
  return result;
}

Result<ExecResult> Sandbox::Exec(const ExecSpec& spec) {
  DSEC_TRY(auto run, Start(spec));
  return Finish(run);
}

Result<ExecResult> Sandbox::Guest(std::vector<std::string> arguments) {
  ExecSpec spec;
  spec.argv = {"/bin/guest"};
  spec.argv.insert(spec.argv.end(), arguments.begin(), arguments.end());
  return Exec(spec);
}

Result<std::string> Sandbox::ReadLine(RunningExec& run) {
  std::string line;
  while (true) {
    DSEC_TRY(bool ready, os::WaitReadable(run.out.get(), In(10)));
    char c = 0;
    if (!ready || ::read(run.out.get(), &c, 1) != 1)
      return Error(Code::kDeadlineExceeded, "test.exec", "no line: " + line);
    if (c == '\n') return line;
    line += c;
  }
}

Result<void> Sandbox::SignalAll(int signal) {
  abi::SignalAllRequest request;
  request.signal = signal;
  return os::SendPacket(channel.get(),
                        {reinterpret_cast<const uint8_t*>(&request), sizeof(request)}, {});
}

Result<void> Sandbox::MakeFs(uint64_t max_bytes, uint32_t max_inodes) {
  abi::MakeFsRequest request;
  request.max_bytes = max_bytes;
  request.max_inodes = max_inodes;
  return os::SendPacket(channel.get(),
                        {reinterpret_cast<const uint8_t*>(&request), sizeof(request)}, {});
}

}  // namespace dsec::spawn::testing
