// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/result.h"
#include "dsec/v1/iam.pb.h"

namespace dsec::iam {

enum class Resource : uint8_t { kLive, kCreating, kCpu, kMemory, kDisk };
inline constexpr size_t kResourceCount = 5;
// The name in the API: live, creating, cpu_millis, memory_bytes, disk_bytes.
std::string_view ResourceName(Resource resource);
// "quota.live" and so on: the reason of a refusal.
std::string_view QuotaReason(Resource resource);

// Sums of amounts stay below this: no value of the API is larger, and sums cannot overflow.
inline constexpr uint64_t kMaxAmount = uint64_t{1} << 53;

// How much of each resource; a value. Sums are cut at kMaxAmount * 512, differences at 0.
struct Amounts {
  std::array<uint64_t, kResourceCount> of{};

  uint64_t& operator[](Resource resource) { return of[static_cast<size_t>(resource)]; }
  uint64_t operator[](Resource resource) const { return of[static_cast<size_t>(resource)]; }
  bool zero() const;
  // No resource is more than in `other`.
  bool Within(const Amounts& other) const;
  Amounts operator+(const Amounts& other) const;
  Amounts operator-(const Amounts& other) const;
  // The larger and the smaller of each.
  Amounts Max(const Amounts& other) const;
  Amounts Min(const Amounts& other) const;
  bool operator==(const Amounts&) const = default;

  static Amounts Of(const v1::IamAmounts& message);
  void Into(v1::IamAmounts& message) const;
};

// Limits of one project; nullopt: none of its own.
struct Limits {
  std::array<std::optional<uint64_t>, kResourceCount> of{};
  std::optional<uint64_t> starts_per_second;

  std::optional<uint64_t>& operator[](Resource r) { return of[static_cast<size_t>(r)]; }
  const std::optional<uint64_t>& operator[](Resource r) const { return of[static_cast<size_t>(r)]; }
  bool none() const;
  // The tighter of each.
  Limits Tightest(const Limits& other) const;
  bool operator==(const Limits&) const = default;

  static Limits Of(const v1::IamLimits& message);
  void Into(v1::IamLimits& message) const;
};

// kInvalidArgument iam.quota_exceeds_parent when a limit of a child is above that of `parent` (the
// tightest of all above it), which names the field as `prefix`NAME, both values and the rule.
Result<void> CheckNarrower(const Limits& child, const Limits& parent, std::string_view prefix);

// One ledger as a refill sees it.
struct LedgerState {
  Limits limits;
  Amounts granted;
  uint64_t starts = 0;  // of the present second
};

struct RefillWish {
  Amounts missing;      // without it a create cannot begin
  Amounts ahead;        // welcome beyond that
  uint64_t starts = 0;  // the same two of starts
  uint64_t starts_ahead = 0;
};

struct RefillGrant {
  Amounts amounts;
  uint64_t starts = 0;
  // The first limit that kept it below what is missing.
  struct Short {
    size_t ledger = 0;                 // index
    std::optional<Resource> resource;  // nullopt: starts
    uint64_t limit = 0;
    uint64_t in_use = 0;
  };
  std::optional<Short> short_of;
};

// How much the ledgers of a path, from the project up to the root, can grant: of each resource what
// is missing as far as every limit allows, then of `ahead` at most a sixteenth of what remains
// under the tightest one. Never more than any ledger has left; a ledger that is above its limit has
// nothing.
RefillGrant Grantable(std::span<const LedgerState> chain, const RefillWish& wish);

}  // namespace dsec::iam
