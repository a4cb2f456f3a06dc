// SPDX-License-Identifier: Apache-2.0
#include "iam/amounts.h"

#include <algorithm>

namespace dsec::iam {
namespace {

constexpr uint64_t kMaxSum = kMaxAmount << 9;
// What is taken ahead is at most this part of what remains.
constexpr uint64_t kAheadShare = 16;

constexpr std::array<std::string_view, kResourceCount> kNames = {"live", "creating", "cpu_millis",
                                                                 "memory_bytes", "disk_bytes"};
constexpr std::array<std::string_view, kResourceCount> kReasons = {
    "quota.live", "quota.creating", "quota.cpu_millis", "quota.memory_bytes", "quota.disk_bytes"};

template <typename F>
Amounts Each(const Amounts& a, const Amounts& b, F combine) {
  Amounts out;
  for (size_t i = 0; i < kResourceCount; ++i) out.of[i] = combine(a.of[i], b.of[i]);
  return out;
}

std::optional<uint64_t> Tighter(std::optional<uint64_t> a, std::optional<uint64_t> b) {
  if (!a.has_value()) return b;
  return b.has_value() ? std::min(*a, *b) : a;
}

// What remains under the tightest limit, and which ledger that is.
struct Room {
  uint64_t left = kMaxSum;
  size_t ledger = 0;
  uint64_t limit = 0;
  uint64_t in_use = 0;
  bool limited = false;

  void See(size_t index, const std::optional<uint64_t>& bound, uint64_t used) {
    if (!bound.has_value()) return;
    const uint64_t rest = *bound > used ? *bound - used : 0;
    if (limited && rest >= left) return;
    *this = {rest, index, *bound, used, true};
  }
  // What is missing first, then of `ahead` no more than a share of the rest.
  uint64_t Take(uint64_t missing, uint64_t ahead) const {
    const uint64_t first = std::min(missing, left);
    const uint64_t rest = left - first;
    return first + std::min(ahead, limited ? rest / kAheadShare : rest);
  }
};

}  // namespace

std::string_view ResourceName(Resource resource) { return kNames[static_cast<size_t>(resource)]; }
std::string_view QuotaReason(Resource resource) { return kReasons[static_cast<size_t>(resource)]; }

bool Amounts::zero() const {
  return std::all_of(of.begin(), of.end(), [](uint64_t value) { return value == 0; });
}

bool Amounts::Within(const Amounts& other) const {
  for (size_t i = 0; i < kResourceCount; ++i) {
    if (of[i] > other.of[i]) return false;
  }
  return true;
}

Amounts Amounts::operator+(const Amounts& other) const {
  return Each(*this, other, [](uint64_t a, uint64_t b) {
    return std::min(std::min(a, kMaxSum) + std::min(b, kMaxSum), kMaxSum);
  });
}
Amounts Amounts::operator-(const Amounts& other) const {
  return Each(*this, other, [](uint64_t a, uint64_t b) { return a > b ? a - b : 0; });
}
Amounts Amounts::Max(const Amounts& other) const {
  return Each(*this, other, [](uint64_t a, uint64_t b) { return std::max(a, b); });
}
Amounts Amounts::Min(const Amounts& other) const {
  return Each(*this, other, [](uint64_t a, uint64_t b) { return std::min(a, b); });
}

Amounts Amounts::Of(const v1::IamAmounts& message) {
  return {{message.live(), message.creating(), message.cpu_millis(), message.memory_bytes(),
           message.disk_bytes()}};
}

void Amounts::Into(v1::IamAmounts& message) const {
  message.set_live(of[0]);
  message.set_creating(of[1]);
  message.set_cpu_millis(of[2]);
  message.set_memory_bytes(of[3]);
  message.set_disk_bytes(of[4]);
}

bool Limits::none() const {
  return !starts_per_second.has_value() &&
         std::none_of(of.begin(), of.end(), [](const auto& value) { return value.has_value(); });
}

Limits Limits::Tightest(const Limits& other) const {
  Limits out;
  for (size_t i = 0; i < kResourceCount; ++i) out.of[i] = Tighter(of[i], other.of[i]);
  out.starts_per_second = Tighter(starts_per_second, other.starts_per_second);
  return out;
}

Limits Limits::Of(const v1::IamLimits& message) {
  Limits out;
  const v1::IamAmounts& amounts = message.amounts();
  if (amounts.has_live()) out.of[0] = amounts.live();
  if (amounts.has_creating()) out.of[1] = amounts.creating();
  if (amounts.has_cpu_millis()) out.of[2] = amounts.cpu_millis();
  if (amounts.has_memory_bytes()) out.of[3] = amounts.memory_bytes();
  if (amounts.has_disk_bytes()) out.of[4] = amounts.disk_bytes();
  if (message.has_starts_per_second()) out.starts_per_second = message.starts_per_second();
  return out;
}

void Limits::Into(v1::IamLimits& message) const {
  message.Clear();
  v1::IamAmounts& amounts = *message.mutable_amounts();
  if (of[0].has_value()) amounts.set_live(*of[0]);
  if (of[1].has_value()) amounts.set_creating(*of[1]);
  if (of[2].has_value()) amounts.set_cpu_millis(*of[2]);
  if (of[3].has_value()) amounts.set_memory_bytes(*of[3]);
  if (of[4].has_value()) amounts.set_disk_bytes(*of[4]);
  if (starts_per_second.has_value()) message.set_starts_per_second(*starts_per_second);
}

Result<void> CheckNarrower(const Limits& child, const Limits& parent, std::string_view prefix) {
  const auto check = [&](const std::optional<uint64_t>& own, const std::optional<uint64_t>& above,
                         std::string_view name) -> Result<void> {
    if (!own.has_value() || !above.has_value() || *own <= *above) return Ok();
    const std::string field = fmt::format("{}{}", prefix, name);
    return Error(Code::kInvalidArgument, "iam.quota_exceeds_parent",
                 fmt::format("{}: {} is above {}, the limit of a project above this one", field,
                             *own, *above))
        .WithField(field);
  };
  for (size_t i = 0; i < kResourceCount; ++i) {
    DSEC_TRY_VOID(check(child.of[i], parent.of[i], kNames[i]));
  }
  return check(child.starts_per_second, parent.starts_per_second, "starts_per_second");
}

RefillGrant Grantable(std::span<const LedgerState> chain, const RefillWish& wish) {
  RefillGrant grant;
  const auto note = [&](const Room& room, std::optional<Resource> resource, uint64_t given,
                        uint64_t missing) {
    if (given >= missing || grant.short_of.has_value()) return;
    grant.short_of = RefillGrant::Short{room.ledger, resource, room.limit, room.in_use};
  };
  for (size_t i = 0; i < kResourceCount; ++i) {
    Room room;
    for (size_t l = 0; l < chain.size(); ++l) {
      room.See(l, chain[l].limits.of[i], chain[l].granted.of[i]);
      // Without limits the sums still have to stay sums.
      if (chain[l].granted.of[i] >= kMaxSum) room.See(l, kMaxSum, kMaxSum);
    }
    grant.amounts.of[i] = room.Take(wish.missing.of[i], wish.ahead.of[i]);
    note(room, static_cast<Resource>(i), grant.amounts.of[i], wish.missing.of[i]);
  }
  Room room;
  for (size_t l = 0; l < chain.size(); ++l)
    room.See(l, chain[l].limits.starts_per_second, chain[l].starts);
  grant.starts = room.Take(wish.starts, wish.starts_ahead);
  note(room, std::nullopt, grant.starts, wish.starts);
  return grant;
}

}  // namespace dsec::iam
