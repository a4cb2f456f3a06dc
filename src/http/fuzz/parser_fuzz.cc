// SPDX-License-Identifier: Apache-2.0
// Requests and replies out of arbitrary bytes. The first byte says in what pieces the others come:
// what is found must not depend on that.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "http/parser.h"

namespace {

using dsec::http::Parser;
using dsec::http::RequestHead;
using dsec::http::ResponseHead;

constexpr size_t kMaxHead = 2048;

// A text of all that was found until an error came or the bytes ran out. Which of the two is not
// told: a bad head may be known as such at once or only when its end is there.
template <typename HeadType>
std::string Describe(std::string_view bytes, size_t step) {
  Parser<HeadType> parser(kMaxHead);
  std::string found;
  std::string pending;
  while (!bytes.empty()) {
    pending += bytes.substr(0, step);
    bytes.remove_prefix(std::min(step, bytes.size()));
    for (;;) {
      std::string body;
      const bool in_head = !parser.head_done();
      const auto used = in_head ? parser.Head(pending) : parser.Body(pending, 1000, body);
      found += body;
      if (!used.ok()) return found;
      DSEC_CHECK(*used <= pending.size() && body.size() <= 1000);
      pending.erase(0, *used);
      if (in_head && parser.head_done()) {
        for (size_t i = 0; i < parser.head().fields.size(); ++i) {
          found += parser.head().fields.name(i);
          found += parser.head().fields.value(i);
        }
        found += '{';
      }
      if (parser.body_done()) {
        found += '}';
        parser.Reset();
      } else if (*used == 0 && !(in_head && parser.head_done())) {
        break;
      }
    }
  }
  return found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t step = 1 + data[0] % 61;
  DSEC_CHECK(Describe<RequestHead>(bytes, step) == Describe<RequestHead>(bytes, 1));
  DSEC_CHECK(Describe<ResponseHead>(bytes, step) == Describe<ResponseHead>(bytes, 1));
  return 0;
}
