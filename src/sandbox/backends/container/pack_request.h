// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "dsec/v1/pack.pb.h"

namespace dsec::sandbox {

// Whether a pack can be made at all of what is asked for; kInvalidArgument with the field.
Result<void> CheckPackRequest(const v1::PackRequest& request);

}  // namespace dsec::sandbox
