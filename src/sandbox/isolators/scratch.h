// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/edge.pb.h"
#include "os/unique_fd.h"

namespace dsec::sandbox {

// The overlay's two directories on one writable layer, both owned by the root of the sandbox.
struct ScratchLayer {
  os::UniqueFd upper;
  os::UniqueFd work;
};

struct ScratchUsage {
  uint64_t bytes = 0;
  uint64_t inodes = 0;  // 0: not counted by this mechanism
};

// Writable layers that are bounded in bytes and inodes, below one folder of the node. Names are
// [a-z0-9-]+. Thread-safe, blocking. What it made outlives it and is found again by the next one
// that opens the same folder.
class Scratch {
 public:
  virtual ~Scratch() = default;
  // What holds the bounds, for people.
  virtual v1::Capability capability() const = 0;
  // 0: inodes have a bound of their own. Otherwise LimitsPolicy.inode_cost_bytes.
  virtual uint64_t inode_cost_bytes() const = 0;
  // A path whose statvfs tells the free space; lives as long as this object.
  virtual std::string space_path() const = 0;

  // kAlreadyExists when there is one of that name.
  virtual Result<ScratchLayer> Create(const std::string& name, uint64_t bytes, uint64_t inodes,
                                      uint32_t owner) = 0;
  virtual Result<void> SetLimits(const std::string& name, uint64_t bytes, uint64_t inodes) = 0;
  virtual Result<ScratchUsage> Usage(const std::string& name) = 0;
  // Its space comes back in the background. Missing: ok.
  virtual Result<void> Remove(const std::string& name) = 0;
  virtual Result<std::vector<std::string>> List() = 0;

  // The upper directory of a layer, to read.
  virtual Result<os::UniqueFd> OpenUpper(const std::string& name) = 0;
  // Whether Copy works.
  virtual bool copies() const = 0;
  // A read-only layer `copy` that is `name` as it is now, in constant time. While it exists, and
  // until its space has come back, what `name` overwrites stays charged to it, at most as much as
  // it holds now. kFailedPrecondition "scratch.no_copies".
  virtual Result<void> Copy(const std::string& name, const std::string& copy) = 0;
};

struct ScratchOptions {
  std::string state_dir;
  // Size of the image, where one is used; it is sparse. 0: four fifths of what is free
  // when it is made.
  uint64_t image_bytes = 0;
};

// Picks by trying: project quota where the file system of the state folder has it on, else a btrfs
// image on a loop device. kFailedPrecondition "scratch.none" says what stands in the way of each.
Result<std::unique_ptr<Scratch>> OpenScratch(const ScratchOptions& options);

// The two of them. kFailedPrecondition when the host does not have what it takes.
Result<std::unique_ptr<Scratch>> OpenProjectQuotaScratch(const ScratchOptions& options);
Result<std::unique_ptr<Scratch>> OpenBtrfsScratch(const ScratchOptions& options);

}  // namespace dsec::sandbox
