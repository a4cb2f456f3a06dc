// SPDX-License-Identifier: Apache-2.0
// Hostile bytes on a connection: frames, requests and responses.
#include <cstdint>
#include <cstdlib>

#include "rpc/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  dsec::rpc::FrameParser parser(1 << 16);
  size_t step = size == 0 ? 1 : 1 + data[0] % 17;
  for (size_t at = 0; at < size; at += step) {
    parser.Feed(bytes.substr(at, step));
    for (;;) {
      auto frame = parser.Next();
      if (!frame.ok()) return 0;
      if (!frame->has_value()) break;
      if ((*frame)->payload.size() > (1 << 16)) std::abort();
      auto request = dsec::rpc::ParseRequest((*frame)->payload);
      auto response = dsec::rpc::ParseResponse((*frame)->payload);
      if (request.ok() && !dsec::rpc::ParseRequest(dsec::rpc::SerializeRequest(*request)).ok()) {
        std::abort();
      }
    }
  }
  return 0;
}
