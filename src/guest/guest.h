// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::guest {

// pid 1 of a microVM: brings the sandbox up, then passes bytes between the host's port and the
// agent until the sandbox has ended, and powers the machine off. Returns only when it is not pid 1.
int Main();

}  // namespace dsec::guest
