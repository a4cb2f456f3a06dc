// SPDX-License-Identifier: Apache-2.0
// A signing request of a machine that nobody knows yet.
#include <cstdlib>

#include "ca/authority.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto request = dsec::ca::ParseRequest({reinterpret_cast<const char*>(data), size});
  // What is taken has a whole name and a key.
  if (request.ok() && (request->name.Uri().empty() || request->key == nullptr)) std::abort();
  return 0;
}
