// SPDX-License-Identifier: Apache-2.0
// The referee of our ttrpc: a real containerd shim, written in Go by others. Our Channel drives its
// task service through the whole life of a container, and its ttrpc client reports events to our
// Server.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "interop/shim.pb.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "runtime/shards.h"

namespace dsec::rpc {
namespace {

using runtime::BlockOn;
using runtime::Deadline;
using runtime::Task;

constexpr char kShim[] = "/usr/bin/containerd-shim-runc-v2";
constexpr char kRunc[] = "/usr/sbin/runc";
constexpr char kTaskService[] = "containerd.task.v2.Task";
constexpr char kNamespace[] = "dsec-interop";
enum TaskStatus { kCreated = 1, kRunning = 2, kStopped = 3 };

Deadline Late() { return Deadline::After(std::chrono::seconds(30)); }

// Runs a program to its end and returns what it wrote to stdout.
std::string Output(std::vector<std::string> words, const std::vector<std::string>& environment) {
  int pipe_fds[2];
  EXPECT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (const std::string& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  envp.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), envp.data()), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_fds[1]);
  std::string output;
  char buffer[512];
  for (ssize_t got = 0; (got = read(pipe_fds[0], buffer, sizeof(buffer))) > 0;) {
    output.append(buffer, static_cast<size_t>(got));
  }
  close(pipe_fds[0]);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0) << output;
  return output;
}

// The topics that a shim has reported, in order.
class Events {
 public:
  Task<std::string> Take(std::string payload, CallContext) {
    interop::Forward forward;
    if (!forward.ParseFromString(payload)) {
      co_return Error(Code::kInvalidArgument, "rpc.request", "not a ForwardRequest");
    }
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(forward.envelope().ns(), kNamespace);
    topics_.push_back(forward.envelope().topic());
    changed_.notify_all();
    co_return std::string();
  }
  std::vector<std::string> WaitFor(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return topics_.size() >= count; });
    return topics_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> topics_;
};

class ShimInterop : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* program : {kShim, kRunc}) {
      if (access(program, X_OK) != 0) GTEST_SKIP() << program << " is not installed";
    }
    if (geteuid() != 0) GTEST_SKIP() << "needs root";
    had_containerd_ = std::filesystem::exists("/run/containerd");
    // The shim leaves its starter: this makes it our child, to be waited for.
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    std::string name = std::filesystem::temp_directory_path() / "dsec-interop-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    bundle_ = name;
    id_ = std::filesystem::path(name).filename();

    server_.Register("containerd.services.events.ttrpc.v1.Events", "Forward",
                     [this](std::string payload, CallContext context) {
                       return events_.Take(std::move(payload), std::move(context));
                     });
    const std::string events_path = bundle_ + "/events.sock";
    ASSERT_TRUE(server_.ListenUnix(events_path).ok());
    listening_ = true;

    std::ofstream(bundle_ + "/config.json") << "{}";  // read for its annotations at the start
    // What the shim logs to; it ends when nobody reads.
    ASSERT_EQ(mkfifo((bundle_ + "/log").c_str(), 0600), 0);
    log_ = open((bundle_ + "/log").c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
    ASSERT_GE(log_, 0);
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(bundle_);
    std::string address =
        Output({kShim, "-namespace", kNamespace, "-address", bundle_ + "/containerd.sock",
                "-publish-binary", "/bin/true", "-id", id_, "start"},
               {"TTRPC_ADDRESS=" + events_path, "GRPC_ADDRESS=" + bundle_ + "/containerd.sock",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin"});
    std::filesystem::current_path(before);
    ASSERT_TRUE(address.starts_with("unix://")) << address;
    socket_path_ = address.substr(7);
    auto channel =
        BlockOn(shards_.at(0), Channel::ConnectUnix(shards_.at(0), socket_path_, Late()));
    ASSERT_TRUE(channel.ok()) << channel.error().ToString();
    channel_ = std::move(*channel);
    auto connected = Call<interop::Connected>("Connect", Id());
    ASSERT_TRUE(connected.ok()) << connected.error().ToString();
    shim_pid_ = static_cast<pid_t>(connected->shim_pid());
    ASSERT_GT(shim_pid_, 1);
  }

  void TearDown() override {
    if (channel_) {
      (void)Call<interop::Nothing>("Shutdown", ShutdownNow());
      WaitForShim();
    }
    if (listening_) (void)BlockOn(shards_.at(0), Stop(server_));
    shards_.Stop();
    channel_.reset();
    if (log_ >= 0) close(log_);
    std::error_code ignored;
    if (!bundle_.empty()) std::filesystem::remove_all(bundle_, ignored);
    if (!socket_path_.empty()) std::filesystem::remove(socket_path_, ignored);
    std::filesystem::remove(std::string("/run/containerd/runc/") + kNamespace, ignored);
    if (!had_containerd_) {
      for (const char* folder : {"/run/containerd/runc", "/run/containerd/s", "/run/containerd"}) {
        std::filesystem::remove(folder, ignored);  // only while empty
      }
    }
  }

  static Task<void> Stop(Server& server) {
    co_await server.Stop(Late());
    co_return Ok();
  }

  // The shim ends by itself; one that does not is killed.
  void WaitForShim() {
    if (shim_pid_ <= 1) return;
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, shim_pid_, 0));
    pollfd wait{.fd = pidfd, .events = POLLIN, .revents = 0};
    const bool ended = pidfd >= 0 && poll(&wait, 1, 10'000) == 1;
    EXPECT_TRUE(ended) << "the shim did not end";
    if (!ended) kill(shim_pid_, SIGKILL);
    EXPECT_EQ(waitpid(shim_pid_, nullptr, 0), shim_pid_);
    if (pidfd >= 0) close(pidfd);
    shim_pid_ = -1;
  }

  // A container of a read-only root with nothing but the guest program, in a cgroup of its own.
  void WriteBundle(const std::string& argument) {
    const std::string root = bundle_ + "/rootfs";
    ASSERT_TRUE(std::filesystem::create_directories(root + "/proc"));
    ASSERT_TRUE(std::filesystem::create_directories(root + "/dev"));
    std::filesystem::copy_file(DSEC_INTEROP_GUEST, root + "/guest");
    std::ofstream(bundle_ + "/config.json") << R"({
      "ociVersion": "1.0.2",
      "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/guest", ")"
                                            << argument << R"("], "noNewPrivileges": true},
      "root": {"path": "rootfs", "readonly": true},
      "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
                 {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}],
      "linux": {"cgroupsPath": "/)" << id_ << R"(",
                "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}]}
    })";
  }

  template <typename Reply, typename Request>
  Result<Reply> Call(std::string_view method, const Request& request, Deadline deadline = Late()) {
    return BlockOn(shards_.at(0), channel_->Call<Reply>(kTaskService, method, request, deadline));
  }
  interop::TaskId Id() const {
    interop::TaskId request;
    request.set_id(id_);
    return request;
  }
  interop::Create CreateRequest() const {
    interop::Create request;
    request.set_id(id_);
    request.set_bundle(bundle_);
    return request;
  }
  interop::Shutdown ShutdownNow() const {
    interop::Shutdown request;
    request.set_id(id_);
    request.set_now(true);
    return request;
  }
  int32_t Status() {
    auto state = Call<interop::TaskState>("State", Id());
    EXPECT_TRUE(state.ok()) << state.error().ToString();
    return state.ok() ? state->status() : 0;
  }

  std::string bundle_;
  std::string id_;
  std::string socket_path_;
  pid_t shim_pid_ = -1;
  int log_ = -1;
  bool had_containerd_ = true;
  bool listening_ = false;
  Events events_;
  runtime::Shards shards_{1};
  Server server_{shards_.at(0)};
  std::shared_ptr<Channel> channel_;
};

TEST_F(ShimInterop, Container_LivesItsWholeLife) {
  WriteBundle("7");
  auto created = Call<interop::Pid>("Create", CreateRequest());
  ASSERT_TRUE(created.ok()) << created.error().ToString();
  EXPECT_GT(created->pid(), 1u);
  EXPECT_EQ(Status(), kCreated);
  auto started = Call<interop::Pid>("Start", Id());
  ASSERT_TRUE(started.ok()) << started.error().ToString();
  EXPECT_EQ(started->pid(), created->pid());
  auto ended = Call<interop::Exit>("Wait", Id());
  ASSERT_TRUE(ended.ok()) << ended.error().ToString();
  EXPECT_EQ(ended->exit_status(), 7u);
  EXPECT_EQ(Status(), kStopped);
  auto deleted = Call<interop::Deleted>("Delete", Id());
  ASSERT_TRUE(deleted.ok()) << deleted.error().ToString();
  EXPECT_EQ(deleted->exit_status(), 7u);
  EXPECT_THAT(events_.WaitFor(4), testing::ElementsAre("/tasks/create", "/tasks/start",
                                                       "/tasks/exit", "/tasks/delete"));
}

TEST_F(ShimInterop, WaitPastItsDeadline_LeavesTheConnectionUsable) {
  WriteBundle("wait");
  auto created = Call<interop::Pid>("Create", CreateRequest());
  ASSERT_TRUE(created.ok()) << created.error().ToString();
  ASSERT_TRUE(Call<interop::Pid>("Start", Id()).ok());
  auto waited = Call<interop::Exit>("Wait", Id(), Deadline::After(std::chrono::milliseconds(30)));
  EXPECT_EQ(waited.error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Status(), kRunning);
  interop::Kill signal;
  signal.set_id(id_);
  signal.set_signal(SIGKILL);
  EXPECT_TRUE(Call<interop::Nothing>("Kill", signal).ok());
  EXPECT_EQ(Call<interop::Exit>("Wait", Id())->exit_status(), 128u + SIGKILL);
  EXPECT_EQ(Call<interop::Deleted>("Delete", Id())->exit_status(), 128u + SIGKILL);
}

TEST_F(ShimInterop, Errors_AreMapped) {
  auto unknown = Call<interop::TaskState>("State", Id());
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code(), Code::kNotFound) << unknown.error().ToString();
  EXPECT_EQ(unknown.error().reason(), "rpc.remote");
  EXPECT_FALSE(unknown.error().message().empty());
  auto method = Call<interop::Nothing>("NoSuchMethod", Id());
  EXPECT_EQ(method.error().reason(), "rpc.unimplemented") << method.error().ToString();
  ASSERT_TRUE(std::filesystem::remove(bundle_ + "/config.json"));
  auto broken = Call<interop::Pid>("Create", CreateRequest());
  EXPECT_FALSE(broken.ok());
  EXPECT_EQ(broken.error().reason(), "rpc.remote");
}

TEST_F(ShimInterop, Shutdown_EndsTheConnection) {
  (void)Call<interop::Nothing>("Shutdown", ShutdownNow());
  EXPECT_TRUE(BlockOn(shards_.at(0), channel_->WaitClosed()).ok());
  auto gone = Call<interop::Connected>("Connect", Id());
  EXPECT_EQ(gone.error().reason(), "rpc.closed");
}

}  // namespace
}  // namespace dsec::rpc
