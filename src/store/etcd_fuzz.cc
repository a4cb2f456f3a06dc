// SPDX-License-Identifier: Apache-2.0
// Answers of etcd's gateway: none may do more than fail to parse.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "store/etcd_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)dsec::store::etcd::ParsePage(text);
  (void)dsec::store::etcd::ParseCommit(text, 1);
  (void)dsec::store::etcd::ParseKeepAlive(text);
  (void)dsec::store::etcd::ParseWatchLine(text);
  (void)dsec::store::etcd::ErrorOf(500, text);
  return 0;
}
