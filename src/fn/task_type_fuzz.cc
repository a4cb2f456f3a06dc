// SPDX-License-Identifier: Apache-2.0
// Any bytes as a task type: refused with a field or a rule, or read, checked, written and read back
// to the same.
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "fn/rules.h"
#include "fn/task_type.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dsec;  // NOLINT(google-build-using-namespace)
  const auto type = fn::ParseTaskType({reinterpret_cast<const char*>(data), size});
  if (!type.ok()) {
    DSEC_CHECK(type.error().code() == Code::kInvalidArgument);
    return 0;
  }
  const auto checked = fn::CheckTaskType(
      *type, [](v1::FnLimits limits, std::string_view) -> Result<v1::FnLimits> { return limits; });
  if (!checked.ok()) {
    DSEC_CHECK(!checked.error().field().empty());
    return 0;
  }
  const std::string text = fn::FormatTaskType(*type);
  const auto again = fn::ParseTaskType(text);
  DSEC_CHECK(again.ok());
  DSEC_CHECK(fn::FormatTaskType(*again) == text);
  return 0;
}
