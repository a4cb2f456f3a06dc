// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "store/store.h"

// What every Store refuses, and how it says so.
namespace dsec::store {

inline constexpr size_t kMaxKey = 1024;
inline constexpr size_t kMaxValue = 1 << 20;
inline constexpr size_t kMaxBatch = 128;
// Keys and values of one transaction together: below etcd's --max-request-bytes of 1.5 MiB.
inline constexpr size_t kMaxCommit = kMaxValue + kMaxBatch * kMaxKey;
inline constexpr uint32_t kMaxPage = 1000;
inline constexpr std::chrono::milliseconds kMinTtl{1'000};
inline constexpr std::chrono::milliseconds kMaxTtl{86'400'000};

// kInvalidArgument "store.too_large".
Result<void> CheckKey(const std::string& key);
// kInvalidArgument "store.too_large", "store.duplicate".
Result<void> CheckCommit(const std::vector<Condition>& conditions,
                         const std::vector<Write>& writes);
// kInvalidArgument "store.too_large".
Result<void> CheckPage(uint32_t limit);
// kInvalidArgument "store.ttl".
Result<void> CheckTtl(std::chrono::milliseconds ttl);

// kNotFound "store.lease".
Error NoLease(LeaseId lease);
// kConflict "store.version".
Error WrongVersion(const std::string& key, Revision found, Revision expected);

}  // namespace dsec::store
