// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "os/unique_fd.h"
#include "runtime/deadline.h"

namespace dsec::vmm {

// The QEMU Machine Protocol (docs/interop/qmp-spec.rst of QEMU 7.2): JSON objects, one a line. QEMU
// may have been taken over by its guest: what it says is bounded and checked.

// One line of QEMU's.
struct QmpMessage {
  enum class Kind { kGreeting, kReturn, kError, kEvent };
  Kind kind = Kind::kEvent;
  std::string id;       // of the command that is answered; empty where none was given
  std::string name;     // of the event, or the class of the error
  std::string text;     // description of the error
  nlohmann::json data;  // what is returned, or the event's data
};

// Cuts QEMU's bytes into messages.
class QmpParser {
 public:
  static constexpr size_t kMaxLine = 1 << 20;
  static constexpr int kMaxDepth = 32;
  void Feed(std::string_view bytes) { buffer_ += bytes; }
  // nullopt when more bytes are needed. kUnavailable "vm.qmp": no such message, too long, too deep;
  // the connection is of no use any more.
  Result<std::optional<QmpMessage>> Next();

 private:
  std::string buffer_;
};

// A connection to one QEMU's monitor. Blocking; one thread at a time. QEMU takes one connection at
// a time, so it is closed after use.
class QmpClient {
 public:
  // kUnavailable "vm.qmp" when there is nobody or it does not greet; kDeadlineExceeded.
  static Result<QmpClient> Connect(const std::string& path, runtime::Deadline deadline);
  // What the command returns. kInternal "vm.qmp_refused" with QEMU's class and description;
  // kUnavailable "vm.qmp"; kDeadlineExceeded "vm.qmp_timeout". `fd` >= 0 goes along with it.
  Result<nlohmann::json> Execute(std::string_view command,
                                 const nlohmann::json& arguments = nlohmann::json::object(),
                                 int fd = -1);
  void set_deadline(runtime::Deadline deadline) { deadline_ = deadline; }

 private:
  QmpClient(os::UniqueFd socket, runtime::Deadline deadline)
      : socket_(std::move(socket)), deadline_(deadline) {}
  Result<QmpMessage> Receive();

  os::UniqueFd socket_;
  runtime::Deadline deadline_;
  QmpParser parser_;
  uint64_t next_id_ = 1;
};

}  // namespace dsec::vmm
