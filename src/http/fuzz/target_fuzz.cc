// SPDX-License-Identifier: Apache-2.0
// Targets, queries, percent-encoding, ranges, base64 and paths of the router.
#include <string>

#include "base/check.h"
#include "http/base64.h"
#include "http/router.h"
#include "http/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec::http;
  static const Router& router = []() -> const Router& {
    auto& made = *new Router();
    made.Add("GET", "/v1/sandboxes/{id}/exec/{op}/stream", 1);
    made.Add("GET", "/v1/sandboxes:batch", 2);
    made.Add("GET", "/v1/layers/{ref}", 3);
    return made;
  }();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto target = SplitTarget(text); target.ok()) {
    DSEC_CHECK(target->path.starts_with('/'));
    const auto found = router.Find("GET", target->path);
    constexpr size_t kParams[] = {0, 2, 0, 1};
    if (found.ok()) DSEC_CHECK(found->params.size() == kParams[found->route]);
    (void)ParseQuery(target->query);
  }
  if (const auto pairs = ParseQuery(text); pairs.ok()) {
    std::string again;
    for (const auto& [key, value] : *pairs) {
      again += "&" + PercentEncode(key) + "=" + PercentEncode(value);
    }
    // An empty key with an empty value is a pair; written out it is "=".
    DSEC_CHECK(ParseQuery(again).value() == *pairs);
  }
  DSEC_CHECK(PercentDecode(PercentEncode(text)).value() == text);
  if (const auto range = ParseRange(text); range.ok()) {
    for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, UINT64_MAX}) {
      const auto slice = Resolve(*range, length);
      if (slice)
        DSEC_CHECK(slice->length > 0 && slice->offset < length &&
                   slice->length <= length - slice->offset);
    }
  }
  if (const auto bytes = DecodeBase64(text)) {
    std::string again;
    AppendBase64(*bytes, again);
    DSEC_CHECK(again == text);
  }
  return 0;
}
