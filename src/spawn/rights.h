// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::spawn::rights {

// A right that weakens the isolation of a sandbox is asked for with a token of its type, so that
// whoever grants it includes this file and a reviewer sees where.

// Capabilities of the sandbox's own user namespace beyond kCodeCapabilities.
struct ExtraCapabilities {};

}  // namespace dsec::spawn::rights
