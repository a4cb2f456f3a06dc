// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace dsec::fn {

// SHA-256 over a list of fields. Each is preceded by its length, so that no two lists have the same
// bytes. Not thread-safe.
class FieldDigest {
 public:
  FieldDigest();
  ~FieldDigest();
  FieldDigest(const FieldDigest&) = delete;
  FieldDigest& operator=(const FieldDigest&) = delete;
  void Add(std::string_view field);
  void Add(uint64_t number);
  // 64 lower-case hex digits; the object is spent.
  std::string Finish();

 private:
  evp_md_ctx_st* const context_;
};

// "sha256:<64 hex>" of the bytes: the name of an artefact.
std::string ArtifactDigest(std::string_view bytes);
bool IsArtifactDigest(std::string_view text);

}  // namespace dsec::fn
