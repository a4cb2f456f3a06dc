// SPDX-License-Identifier: Apache-2.0
// What comes from an object store or another process and is read as text. The first byte picks the
// parser.
#include <string_view>

#include "base/check.h"
#include "blobfs/http_client.h"
#include "blobfs/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec::blobfs;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0: {
      const auto range = ParseContentRange(text);
      DSEC_CHECK(!range || (range->first <= range->last && range->last < range->total));
      break;
    }
    case 1: {
      const auto headers = ParseHeaders(text);
      if (!headers.ok()) break;
      for (const auto& line : *headers) DSEC_CHECK(line.find_first_of("\r\n") == line.npos);
      break;
    }
    default: {
      const auto settings = Settings::Parse(text);
      DSEC_CHECK(!settings.ok() || Settings::Parse(settings->Encode()).ok());
      break;
    }
  }
  return 0;
}
