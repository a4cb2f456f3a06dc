// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::image {

// The relative form of a member's name: leading "/" and "./" go, "//" folds, a trailing "/" goes;
// the root is "". Refused (kInvalidArgument "layer.bad_path"): "..", NUL, components over 255
// bytes, more than `max_depth` components, more than 3,800 bytes (below PATH_MAX with what tools
// put in front).
Result<std::string> CleanPath(std::string_view raw, uint64_t max_depth);

// {"a/b", "c"} of "a/b/c"; {"", "c"} of "c".
struct SplitPath {
  std::string_view parent;
  std::string_view name;
};
SplitPath Split(std::string_view clean);

// What a cleaned path means under the whiteout convention of the OCI image specification.
struct Whiteout {
  enum class Kind {
    kNone,     // an ordinary member
    kRemove,   // `target` in the same folder is gone
    kOpaque,   // the folder hides what lower layers put into it
    kIgnored,  // bookkeeping of aufs, .wh..wh.*
  };
  Kind kind = Kind::kNone;
  std::string_view target;
};
// kInvalidArgument "layer.bad_whiteout" for one that names nothing, "." or "..", and for a member
// below a whiteout.
Result<Whiteout> ClassifyWhiteout(std::string_view clean);

}  // namespace dsec::image
