// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"

namespace dsec::image {

// Folder in the work folder that FetchImage leaves: an OCI image layout whose blobs are elsewhere.
inline constexpr char kFetchedLayout[] = "oci";

struct FetchRequest {
  std::string ref;          // HOST[:PORT]/NAME[:TAG|@DIGEST], as of docker
  bool plain_http = false;  // without TLS
  int work = -1;            // folder for the layout; locked, and skopeo inherits its lock
  std::string cache;        // folder of the blobs, as seen from `work`
};

// Downloads an image by skopeo, with the credentials and proxies that the environment gives it.
// Blobs that the cache has are not fetched again, so a second try goes on at the first blob that
// the one before did not finish. `proceed` (may be empty) is asked several times a second with the
// bytes that this call has added; false ends skopeo: kCancelled "layer.cancelled". No skopeo:
// kFailedPrecondition "layer.no_skopeo"; what it fails of: kUnavailable "layer.registry".
Result<void> FetchImage(const FetchRequest& request, const std::function<bool(uint64_t)>& proceed);

// Removes blobs of the cache that do not have the digest in their name: a host that lost power may
// leave some.
Result<void> DropDamagedBlobs(int cache);
// Removes blobs that no import has used for a week.
Result<void> DropUnusedBlobs(int cache);

}  // namespace dsec::image
