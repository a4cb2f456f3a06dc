// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "image/root_calls.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {

// The worker's end of the socket: answers requests of daemons, each on a thread of its own since it
// may hang with the source, and tells them what happens. Thread-safe.
class Control {
 public:
  struct Answer {
    std::string members;  // of a JSON object, without braces; empty: none
    std::vector<os::UniqueFd> fds;
  };
  // `request`: a JSON object with the members of its kind.
  using Handler = std::function<Result<Answer>(const std::string& request)>;

  // `listen`: the socket; borrowed. Only root is heard.
  Control(int listen, Handler handler);
  // Serves until the process ends.
  void Start();
  // One JSON object to all who are connected; a peer that does not read misses it.
  void Tell(const std::string& object);

 private:
  struct Peer {
    os::UniqueFd socket;
  };
  void Accept();
  void Serve(const std::shared_ptr<Peer>& peer);
  void Handle(const std::shared_ptr<Peer>& peer, const std::string& packet);

  const int listen_;
  const Handler handler_;
  image::RootThreads threads_;
  std::mutex mutex_;
  std::list<std::shared_ptr<Peer>> peers_;
};

}  // namespace dsec::blobfs
