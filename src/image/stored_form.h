// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::image {

// In the folder of a layer that has content in common with others, in place of data.blob: the form
// in which the store keeps its content, what the layer alone has, the content of other layers (hard
// links to files of theirs) and the metadata of the layer for a mount over these files.
inline constexpr char kFormName[] = "form.json";
inline constexpr char kOwnName[] = "own.blob";
inline constexpr char kSharedMetaName[] = "shared.erofs";

// How data.blob of a layer is made up of pieces of other files (format_spec.md, "Shared content").
// It is no part of the layer and of its id, and nothing proves it: whoever reads through it checks
// the content if he wants to be sure. A value.
struct StoredForm {
  static constexpr uint64_t kBlock = 4096;
  // The device table lies in the 1,024 bytes before the superblock.
  static constexpr size_t kMaxFiles = 8;
  static constexpr size_t kMaxRuns = 4096;
  static constexpr size_t kMaxText = 1 << 20;

  struct File {
    std::string name;   // kOwnName, which comes first, or SharedName
    uint64_t size = 0;  // bytes, of whole blocks; not 0
    bool operator==(const File&) const = default;
  };
  struct Run {
    uint32_t file = 0;   // index
    uint32_t block = 0;  // of the file
    uint32_t blocks = 0;
    bool operator==(const Run&) const = default;
  };
  std::vector<File> files;
  std::vector<Run> runs;  // in the order of data.blob, all of it

  // shared.1.blob and so on, as the files are numbered without kOwnName.
  static std::string SharedName(size_t number);
  bool has_own() const { return !files.empty() && files.front().name == kOwnName; }
  uint64_t blocks() const;         // of data.blob
  uint64_t shared_blocks() const;  // that lie in files of others

  // Canonical JSON: one line, sorted keys.
  std::string Encode() const;
  // Accepts exactly what Encode writes and what fits a data.blob of `blob_bytes`. kInternal
  // "layer.corrupt".
  static Result<StoredForm> Parse(std::string_view text, uint64_t blob_bytes);
  bool operator==(const StoredForm&) const = default;
};

// Where blocks of data.blob lie.
class FormMap {
 public:
  explicit FormMap(const StoredForm& form);
  struct Place {
    uint32_t file = 0;
    uint32_t block = 0;
    uint32_t blocks = 0;  // that lie together from there on; 0: behind the end
  };
  Place Find(uint64_t block) const;

 private:
  std::vector<StoredForm::Run> runs_;
  std::vector<uint64_t> starts_;  // of the runs
};

}  // namespace dsec::image
