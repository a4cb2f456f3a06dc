// SPDX-License-Identifier: Apache-2.0
// What a call costs: unary calls of our client to our server over a Unix socket, each on a thread
// of its own, beside two threads that throw the same bytes to and fro over a bare socket pair in
// the same minutes.
//
//   dsec-rpc-bench [SECONDS]      of each measurement (1); one JSON object a line on stdout

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "rpc/channel.h"
#include "rpc/server.h"
#include "runtime/gate.h"
#include "runtime/shards.h"

namespace {

using dsec::Ok;
using dsec::Result;
using dsec::rpc::Channel;
using dsec::rpc::Server;
using dsec::runtime::BlockOn;
using dsec::runtime::Deadline;
using dsec::runtime::Task;
using std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr size_t kSmall = 100;
constexpr size_t kLarge = size_t{1} << 20;
constexpr int kIdleChannels = 1000;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "dsec-rpc-bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) Die(result.error().ToString());
  return std::move(result).value();
}

void Transfer(int fd, std::string& bytes, bool send) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t moved = send ? ::write(fd, bytes.data() + done, bytes.size() - done)
                               : ::read(fd, bytes.data() + done, bytes.size() - done);
    if (moved <= 0) Die(std::string("socket pair: ") + std::strerror(errno));
    done += static_cast<size_t>(moved);
  }
}

// Round trips a second over a bare socket pair.
double PingPong(size_t size, std::chrono::duration<double> length) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) Die("socketpair");
  std::string there(size, 'x');
  std::string here(size, 'x');
  const auto end = steady_clock::now() + length;
  size_t trips = 0;
  std::thread echo([&] {
    for (;;) {
      Transfer(fds[1], there, false);
      Transfer(fds[1], there, true);
      if (there[0] == 'e') return;
    }
  });
  for (;; ++trips) {
    const bool last = steady_clock::now() >= end;
    if (last) here[0] = 'e';
    Transfer(fds[0], here, true);
    Transfer(fds[0], here, false);
    if (last) break;
  }
  echo.join();
  close(fds[0]);
  close(fds[1]);
  return static_cast<double>(trips) / length.count();
}

Task<std::string> Echo(std::string payload, dsec::rpc::CallContext) { co_return payload; }

boost::asio::awaitable<void> CallUntil(Channel& channel, size_t size, steady_clock::time_point end,
                                       size_t& calls) {
  const std::string payload(size, 'x');
  while (steady_clock::now() < end) {
    auto answer = co_await channel.CallRaw("bench", "echo", payload,
                                           Deadline::After(std::chrono::seconds(30)));
    if (!answer.ok()) Die(answer.error().ToString());
    ++calls;
  }
}

// Calls a second with so many under way on one connection.
Task<double> Calls(Channel& channel, size_t size, int under_way,
                   std::chrono::duration<double> length) {
  const auto executor = co_await boost::asio::this_coro::executor;
  const auto end = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(length);
  size_t calls = 0;
  dsec::runtime::Gate gate;
  for (int i = 0; i < under_way; ++i) {
    dsec::runtime::Spawn(gate, executor, CallUntil(channel, size, end, calls));
  }
  co_await gate.Close();
  co_return static_cast<double>(calls) / length.count();
}

Task<void> Stop(Server& server) {
  co_await server.Stop(Deadline::After(std::chrono::seconds(5)));
  co_return Ok();
}

Task<void> Release(std::vector<std::shared_ptr<Channel>>& channels) {
  channels.clear();
  co_return Ok();
}

double Median(const std::function<double()>& measure) {
  std::vector<double> values;
  for (int i = 0; i < kRounds; ++i) values.push_back(measure());
  std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
  return values[kRounds / 2];
}

void Print(const char* name, double value, const char* unit, double baseline,
           const std::string& detail) {
  std::printf(
      "{\"name\": \"%s\", \"value\": %.1f, \"unit\": \"%s\", \"baseline\": %.1f, \"ratio\": %.4f, "
      "\"detail\": {%s}}\n",
      name, value, unit, baseline, baseline > 0 ? value / baseline : 0, detail.c_str());
  std::fflush(stdout);
}

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  statm >> total >> resident;
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace

int main(int argc, char** argv) {
  int seconds = 1;
  if (argc > 1) {
    const auto [end, error] = std::from_chars(argv[1], argv[1] + std::strlen(argv[1]), seconds);
    if (error != std::errc() || *end != '\0' || seconds < 1) {
      Die("usage: dsec-rpc-bench [SECONDS]");
    }
  }
  const std::chrono::duration<double> length(seconds);

  std::string folder = std::filesystem::temp_directory_path() / "dsec-rpc-bench-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) Die("mkdtemp");
  const std::string path = folder + "/s";
  dsec::runtime::Shards shards(2);
  Server server(shards.at(0), {.max_connections = kIdleChannels + 2});
  server.Register("bench", "echo", &Echo);
  if (!server.ListenUnix(path).ok()) Die("listen");
  const auto connect = [&] {
    return Must(BlockOn(shards.at(1), Channel::ConnectUnix(shards.at(1), path, Deadline::Never())));
  };
  std::vector<std::shared_ptr<Channel>> channels = {connect()};
  Channel& channel = *channels[0];
  const auto calls = [&](size_t size, int under_way) {
    return Must(BlockOn(shards.at(1), Calls(channel, size, under_way, length)));
  };

  const double small_floor = Median([&] { return PingPong(kSmall, length); });
  Print("rpc_unary_calls", Median([&] { return calls(kSmall, 1); }), "calls/s", small_floor,
        "\"payload_bytes\": 100, \"under_way\": 1, \"baseline\": \"socket pair round trips/s\"");
  Print("rpc_unary_calls_64", Median([&] { return calls(kSmall, 64); }), "calls/s", small_floor,
        "\"payload_bytes\": 100, \"under_way\": 64, \"baseline\": \"socket pair round trips/s\"");
  const double large_floor = Median([&] { return PingPong(kLarge, length); });
  Print(
      "rpc_unary_large", Median([&] { return calls(kLarge, 1); }), "calls/s", large_floor,
      "\"payload_bytes\": 1048576, \"under_way\": 1, \"baseline\": \"socket pair round trips/s\"");

  const double before = ResidentBytes();
  for (int i = 0; i < kIdleChannels; ++i) channels.push_back(connect());
  Print("rpc_idle_connection", (ResidentBytes() - before) / kIdleChannels, "bytes", 0,
        "\"both_ends\": true, \"connections\": 1000");

  (void)BlockOn(shards.at(1), Release(channels));
  (void)BlockOn(shards.at(0), Stop(server));
  shards.Stop();
  std::filesystem::remove_all(folder);
  return 0;
}
