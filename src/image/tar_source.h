// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "image/byte_source.h"
#include "image/entry.h"

struct archive;
struct archive_entry;

namespace dsec::image {

// Members of an uncompressed tar stream (v7, ustar, pax, GNU with sparse files). Names are taken as
// bytes: no locale, no Unicode normalisation. One header may take at most 4 MiB of the stream
// ("layer.header_too_large"), so memory is bounded however the archive was made.
class TarSource : public EntrySource {
 public:
  // `warnings` must outlive the source.
  static Result<std::unique_ptr<TarSource>> Open(std::unique_ptr<ByteSource> bytes,
                                                 std::string name, Warnings& warnings);
  ~TarSource() override;
  TarSource(const TarSource&) = delete;
  TarSource& operator=(const TarSource&) = delete;
  // At the end of the archive it reads on to the end of the stream, so that a digest below is
  // checked.
  Result<bool> Next(Entry& entry) override;
  Result<DataRun> ReadData() override;

 private:
  friend struct TarCallbacks;
  TarSource(std::unique_ptr<ByteSource> bytes, std::string name, Warnings& warnings);
  Error Fail();
  Result<void> Convert(archive_entry* from, Entry& to);

  std::unique_ptr<ByteSource> bytes_;
  std::string name_;
  Warnings& warnings_;
  archive* archive_;
  uint64_t pulled_ = 0;  // since the present libarchive call began
  bool bounded_ = true;
  bool ended_ = false;
  std::string member_;
  std::optional<Error> error_;
};

}  // namespace dsec::image
