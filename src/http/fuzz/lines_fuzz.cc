// SPDX-License-Identifier: Apache-2.0
// NDJSON lines and error bodies as a client reads them; the first byte says in what pieces the
// others come.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "http/error_body.h"
#include "http/line_buffer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec::http;
  if (size == 0) return 0;
  constexpr size_t kMax = 64;
  std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  (void)ErrorFromReply(500, rest);
  const std::string_view all = rest;
  const size_t step = 1 + data[0] % 37;
  LineBuffer lines(kMax);
  std::string found;
  while (!rest.empty()) {
    lines.Append(rest.substr(0, step));
    rest.remove_prefix(std::min(step, rest.size()));
    for (;;) {
      auto line = lines.Next();
      if (!line.ok()) return 0;
      if (!*line) break;
      DSEC_CHECK((*line)->size() <= kMax && (*line)->find('\n') == std::string::npos);
      found += **line + "\n";
    }
  }
  DSEC_CHECK(all.starts_with(found));
  DSEC_CHECK(all.find('\n', found.size()) == std::string_view::npos);
  return 0;
}
