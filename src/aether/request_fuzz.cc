// SPDX-License-Identifier: Apache-2.0
// Requests from the edge's side of the channel, and account files from the sandbox's: parsed and
// checked as the agent does.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "aether/exec_request.h"
#include "aether/files.h"
#include "aether/identity.h"
#include "base/check.h"
#include "rpc/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace dsec;
  using namespace dsec::aether;
  std::string_view input(reinterpret_cast<const char*>(bytes), size);
  rpc::FrameParser frames;
  frames.Feed(input);
  while (true) {
    auto frame = frames.Next();
    if (!frame.ok() || !frame->has_value()) break;
    auto call = rpc::ParseRequest((*frame)->payload);
    if (!call.ok()) continue;
    v1::ExecRequest exec;
    if (!exec.ParseFromString(call->payload) || !CheckExecRequest(exec, {}).ok()) continue;
    size_t total = 0;
    for (const std::string& text : BuildEnvironment(exec, {}, Identity())) {
      DSEC_CHECK(text.find('\0') == std::string::npos && text.find('=') != 0 &&
                 text.size() <= kMaxArgBytes);
      total += text.size();
    }
    DSEC_CHECK(total <= kMaxArgsTotal + 4096);
  }
  v1::HelloRequest hello;
  if (hello.ParseFromArray(bytes, static_cast<int>(size)) && DefaultsFrom(hello).ok()) {
    DSEC_CHECK(hello.workdir().empty() || hello.workdir().front() == '/');
  }
  size_t third = size / 3;
  auto identity = ResolveIdentity(input.substr(0, third % 40), input.substr(third, third),
                                  input.substr(2 * third));
  if (identity.ok())
    DSEC_CHECK(identity->uid <= kMaxId && identity->gid <= kMaxId && identity->groups.size() <= 64);
  if (CheckFilePath(input, "path").ok())
    DSEC_CHECK(input.front() == '/' && input.find('\0') == std::string_view::npos);
  return 0;
}
