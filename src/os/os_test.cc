// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "os/fd_passing.h"
#include "os/file.h"
#include "os/memfd.h"
#include "os/process.h"
#include "os/syscalls.h"

namespace dsec::os {
namespace {

std::set<std::string> OpenFds() {
  std::set<std::string> fds;
  for (int fd = 0; fd < 256; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) fds.insert(std::to_string(fd));
  }
  return fds;
}

std::span<const uint8_t> AsBytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(UniqueFd, MoveToSelf_KeepsTheDescriptor) {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  UniqueFd& same = fd;
  fd = std::move(same);
  EXPECT_GE(::fcntl(fd.get(), F_GETFD), 0);
}

TEST(OpenInRoot, AbsoluteLinkAndDotDot_StayInside) {
  auto dir = TempDir::Create("os-test-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(MakeDir(dir->fd(), "etc", 0755).ok());
  ASSERT_TRUE(CreateFile(dir->fd(), "etc/passwd", "inside", 0644).ok());
  ASSERT_EQ(::symlinkat("/etc/passwd", dir->fd(), "link"), 0);
  ASSERT_EQ(::symlinkat("../../../../etc", dir->fd(), "up"), 0);
  for (const char* path : {"link", "up/passwd", "../../etc/passwd", "/etc/passwd"}) {
    auto fd = OpenInRoot(dir->fd(), path, O_RDONLY);
    ASSERT_TRUE(fd.ok()) << path << fd.error().ToString();
    EXPECT_EQ(*ReadAll(fd->get(), 100), "inside") << path;
  }
}

TEST(OpenInRoot, MagicLink_Refused) {
  auto proc = OpenAt(AT_FDCWD, "/", O_PATH | O_DIRECTORY);
  ASSERT_TRUE(proc.ok());
  auto fd = OpenInRoot(proc->get(), "proc/self/exe", O_RDONLY);
  ASSERT_FALSE(fd.ok());
  EXPECT_EQ(fd.error().sys_errno(), ELOOP);
}

TEST(OpenBeneath, AnyLinkOrDotDot_Refused) {
  auto dir = TempDir::Create("os-test-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(MakeDir(dir->fd(), "a", 0755).ok());
  ASSERT_EQ(::symlinkat("a", dir->fd(), "link"), 0);
  EXPECT_EQ(OpenBeneath(dir->fd(), "link", O_RDONLY).error().sys_errno(), ELOOP);
  EXPECT_EQ(OpenBeneath(dir->fd(), "a/../..", O_RDONLY).error().sys_errno(), EXDEV);
  EXPECT_TRUE(OpenBeneath(dir->fd(), "a", O_RDONLY).ok());
}

TEST(ReadFile, OverLimit_TypedError) {
  auto dir = TempDir::Create("os-test-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(CreateFile(dir->fd(), "f", std::string(10000, 'x'), 0644).ok());
  EXPECT_EQ(ReadFile(dir->fd(), "f", 10000)->size(), 10000u);
  EXPECT_EQ(ReadFile(dir->fd(), "f", 9999).error().reason(), "os.file_too_large");
}

TEST(RemoveTree, DeepTree_RemovedWithFewDescriptors) {
  auto dir = TempDir::Create("os-test-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(MakeDir(dir->fd(), "top", 0755).ok());
  UniqueFd at(::openat(dir->fd(), "top", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Deeper than PATH_MAX allows to name and than descriptors allow to hold.
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(::mkdirat(at.get(), "deep", 0755), 0);
    ASSERT_TRUE(CreateFile(at.get(), "file", "", 0600).ok());
    at.Reset(::openat(at.get(), "deep", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_TRUE(at.valid());
  }
  at.Reset();
  auto before = OpenFds();
  auto removed = RemoveTree(dir->fd(), "top");
  ASSERT_TRUE(removed.ok()) << removed.error().ToString();
  EXPECT_EQ(::faccessat(dir->fd(), "top", F_OK, 0), -1);
  EXPECT_EQ(OpenFds(), before);
}

TEST(RemoveTree, LinkInside_TargetKept) {
  auto dir = TempDir::Create("os-test-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(MakeDir(dir->fd(), "keep", 0755).ok());
  ASSERT_TRUE(CreateFile(dir->fd(), "keep/file", "", 0600).ok());
  ASSERT_TRUE(MakeDir(dir->fd(), "top", 0755).ok());
  ASSERT_EQ(::symlinkat("../keep", dir->fd(), "top/link"), 0);
  ASSERT_TRUE(RemoveTree(dir->fd(), "top").ok());
  EXPECT_EQ(::faccessat(dir->fd(), "keep/file", F_OK, 0), 0);
  EXPECT_TRUE(RemoveTree(dir->fd(), "top").ok());
}

TEST(PassedFds, TooManyForTheReceiver_AllClosed) {
  auto pair = PacketPair();
  ASSERT_TRUE(pair.ok());
  int fds[5];
  std::fill_n(fds, 5, 0);
  ASSERT_EQ(SendPacketRaw(pair->first.get(), "x", 1, fds, 5, 0), 0);
  auto before = OpenFds();
  char data[8];
  int got[3];
  size_t count = 3;
  EXPECT_EQ(ReceivePacketRaw(pair->second.get(), data, sizeof(data), got, &count, 0), -EMSGSIZE);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(OpenFds(), before);
}

TEST(PassedFds, PacketLargerThanBuffer_Refused) {
  auto pair = PacketPair();
  ASSERT_TRUE(pair.ok());
  ASSERT_TRUE(SendPacket(pair->first.get(), AsBytes("0123456789"), {}).ok());
  char data[4];
  size_t count = 0;
  EXPECT_EQ(ReceivePacketRaw(pair->second.get(), data, sizeof(data), nullptr, &count, 0),
            -EMSGSIZE);
}

TEST(PassedFds, RoundTrip_SameFileCloseOnExec) {
  auto pair = PacketPair();
  ASSERT_TRUE(pair.ok());
  UniqueFd file(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  int fd = file.get();
  ASSERT_TRUE(SendPacket(pair->first.get(), AsBytes("hello"), {&fd, 1}).ok());
  auto packet = ReceivePacket(pair->second.get(), 64);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(packet->data, "hello");
  ASSERT_EQ(packet->fds.size(), 1u);
  EXPECT_EQ(::fcntl(packet->fds[0].get(), F_GETFD), FD_CLOEXEC);
  pair->first.Reset();
  EXPECT_EQ(ReceivePacket(pair->second.get(), 64).error().reason(), "os.peer_closed");
  EXPECT_EQ(SendPacket(pair->second.get(), AsBytes("x"), {}).error().reason(), "os.peer_closed");
}

TEST(SealedMemfd, Write_Refused) {
  auto fd = SealedMemfd("test", AsBytes("abc"));
  ASSERT_TRUE(fd.ok());
  EXPECT_TRUE(IsSealed(fd->get()));
  EXPECT_EQ(::pwrite(fd->get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(fd->get(), 0), -1);
  UniqueFd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_FALSE(IsSealed(plain.get()));
  EXPECT_FALSE(IsSealed(0));
}

TEST(SealedCopy, OverLimit_Refused) {
  auto file = OpenAt(AT_FDCWD, "/proc/self/exe", O_RDONLY);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(SealedCopy("x", file->get(), 10).error().reason(), "os.file_too_large");
  EXPECT_TRUE(SealedCopy("x", file->get(), 1ull << 30).ok());
}

TEST(ProcStat, HostileName_Parsed) {
  auto stat = ParseProcStat(
      "42 (a) R 1 (b) S 7 42 42 0 -1 4194304 100 0 0 0 5 6 0 0 20 0 3 0 12345 1000 99 "
      "18446744073709551615 1 1\n");
  ASSERT_TRUE(stat.ok());
  EXPECT_EQ(stat->pid, 42);
  EXPECT_EQ(stat->comm, "a) R 1 (b");
  EXPECT_EQ(stat->state, 'S');
  EXPECT_EQ(stat->parent, 7);
  EXPECT_EQ(stat->user_ticks, 5u);
  EXPECT_EQ(stat->system_ticks, 6u);
  EXPECT_EQ(stat->threads, 3u);
  EXPECT_EQ(stat->start_time, 12345u);
  EXPECT_EQ(stat->rss_pages, 99u);
  for (const char* bad : {"", "42", "42 (x", "42 (x)", "42 (x) S", "x (y) S 1 2 3"})
    EXPECT_FALSE(ParseProcStat(bad).ok()) << bad;
}

TEST(PidFd, EndedChild_SeenAndNotMistaken) {
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  auto process = PidFd::Open(child);
  ASSERT_TRUE(process.ok());
  EXPECT_TRUE(PidFd::Verify(child, process->start_time()).ok());
  EXPECT_EQ(PidFd::Verify(child, process->start_time() + 1).error().code(), Code::kNotFound);
  EXPECT_FALSE(*process->WaitExit(Clock::System().Mono()));
  ASSERT_TRUE(process->Signal(SIGKILL).ok());
  EXPECT_TRUE(*process->WaitExit(Clock::System().Mono() + std::chrono::seconds(10)));
  EXPECT_EQ(PidOfPidFd(process->fd()), child) << "a zombie keeps its pid";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(process->Signal(SIGKILL).ok());
  EXPECT_EQ(PidOfPidFd(process->fd()), 0);
  EXPECT_EQ(PidFd::Open(child).error().code(), Code::kNotFound);
}

TEST(Clone3, Fork_ReturnsPidfd) {
  int pidfd = -1;
  pid_t child = Clone3(0, &pidfd, -1, SIGCHLD);
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(7);
  UniqueFd owner(pidfd);
  siginfo_t info = {};
  ASSERT_EQ(::waitid(P_PIDFD, static_cast<id_t>(pidfd), &info, WEXITED), 0);
  EXPECT_EQ(info.si_status, 7);
}

}  // namespace
}  // namespace dsec::os
