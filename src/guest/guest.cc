// SPDX-License-Identifier: Apache-2.0
#include "guest/guest.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "guest/boot.h"
#include "guest/relay.h"
#include "os/file.h"

namespace dsec::guest {
namespace {

enum Source : uint32_t { kPort, kAgent, kAgentEnd, kChildren };

Result<void> Watch(int epoll, int fd, uint32_t events, Source source) {
  epoll_event event = {};
  event.events = events;
  event.data.u32 = source;
  if (::epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event) == 0) return Ok();
  if (errno == ENOENT && ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0) return Ok();
  return os::ErrnoError("guest.epoll", "watch");
}

Result<os::UniqueFd> ConnectAgent(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  os::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid() ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return os::ErrnoError("guest.connect", path);
  }
  return socket;
}

// Until the agent has ended.
Result<void> Serve(const vmm::BootConfig& config, const Standing& standing, int children) {
  DSEC_TRY(const auto port, OpenPort(vmm::kPortName));
  Relay relay(port.get(), config.port_secret,
              [&standing] { return ConnectAgent(standing.socket_path); });
  const os::UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return os::ErrnoError("guest.epoll", "create");
  // While the host is not there the port says EPOLLHUP all the time: only changes are of interest.
  DSEC_TRY_VOID(Watch(epoll.get(), port.get(), EPOLLIN | EPOLLOUT | EPOLLET, kPort));
  DSEC_TRY_VOID(Watch(epoll.get(), standing.agent.fd(), EPOLLIN, kAgentEnd));
  DSEC_TRY_VOID(Watch(epoll.get(), children, EPOLLIN, kChildren));
  Say("ready");
  while (true) {
    DSEC_TRY_VOID(relay.Pump());
    if (relay.agent() >= 0) {
      const short events = relay.AgentEvents();
      DSEC_TRY_VOID(
          Watch(epoll.get(), relay.agent(),
                ((events & POLLIN) != 0 ? EPOLLIN : 0u) | ((events & POLLOUT) != 0 ? EPOLLOUT : 0u),
                kAgent));
    }
    std::array<epoll_event, 8> ready;
    const int count = ::epoll_wait(epoll.get(), ready.data(), ready.size(), -1);
    if (count < 0 && errno != EINTR) return os::ErrnoError("guest.epoll", "wait");
    for (int i = 0; i < count; ++i) {
      if (ready[static_cast<size_t>(i)].data.u32 == kAgentEnd) return Ok();
      if (ready[static_cast<size_t>(i)].data.u32 != kChildren) continue;
      signalfd_siginfo info;
      while (::read(children, &info, sizeof(info)) == sizeof(info)) {
      }
      while (::waitpid(-1, nullptr, WNOHANG) > 0) {
      }
    }
  }
}

Result<std::string> Run(int children) {
  DSEC_TRY_VOID(PrepareRoot());
  DSEC_TRY_VOID(LoadModules());
  Say("modules");
  DSEC_TRY(const auto config, ReadBootConfig());
  DSEC_TRY(const auto standing, Launch(config));
  Say("launched");
  DSEC_TRY_VOID(Serve(config, standing, children));
  return std::string(standing.OomKilled() ? "oom" : "agent");
}

}  // namespace

int Main() {
  if (::getpid() != 1) {
    std::fputs("dsec-guest is the first process of a virtual machine\n", stderr);
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &wanted, nullptr);
  const os::UniqueFd children(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  Say("begun");
  const auto ended = Run(children.get());
  Say(ended.ok() ? "end: " + *ended : "end: failed: " + ended.error().ToString());
  ::tcdrain(STDERR_FILENO);
  ::reboot(RB_POWER_OFF);
  return 1;
}

}  // namespace dsec::guest
