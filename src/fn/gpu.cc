// SPDX-License-Identifier: Apache-2.0
#include "fn/gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "fn/rules.h"
#include "model/spec.h"
#include "os/file.h"

namespace dsec::fn {
namespace {

namespace stdfs = std::filesystem;

constexpr size_t kMaxProcFile = 4096;

std::optional<uint32_t> Number(std::string_view text) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The N of entries "<prefix>N" of a folder, ascending; empty when there is no such folder.
std::vector<uint32_t> Numbered(const std::string& dir, std::string_view prefix) {
  std::vector<uint32_t> found;
  std::error_code error;
  for (stdfs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    if (const auto number = Number(std::string_view(name).substr(prefix.size()))) {
      found.push_back(*number);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

bool Exists(const std::string& path) {
  std::error_code error;
  return stdfs::exists(path, error);
}

// The device file that one "access" file of the driver names.
Result<std::string> CapabilityFile(const std::string& root, const std::string& access) {
  DSEC_TRY(const std::string text, os::ReadFile(AT_FDCWD, access.c_str(), kMaxProcFile));
  constexpr std::string_view kKey = "DeviceFileMinor:";
  const size_t at = text.find(kKey);
  std::optional<uint32_t> minor;
  if (at != std::string::npos) {
    std::string_view value = std::string_view(text).substr(at + kKey.size());
    value = value.substr(0, value.find('\n'));
    while (!value.empty() && value.front() == ' ') value.remove_prefix(1);
    minor = Number(value);
  }
  if (!minor) {
    return Error(Code::kFailedPrecondition, "fn.gpu_unreadable",
                 fmt::format("{}: has no DeviceFileMinor", access));
  }
  std::string file = fmt::format("{}/dev/nvidia-caps/nvidia-cap{}", root, *minor);
  if (!Exists(file)) {
    return Error(Code::kFailedPrecondition, "fn.gpu_unreadable",
                 fmt::format("{}, which {} names, does not exist", file, access));
  }
  return file;
}

bool Digits(std::string_view& text) {
  size_t count = 0;
  while (count < text.size() && text[count] >= '0' && text[count] <= '9') ++count;
  text.remove_prefix(count);
  return count > 0 && count <= 4;
}

bool Literal(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

std::string KindOf(const v1::FnGpuRequest& request) {
  return request.kind().empty() ? std::string(kWholeGpu) : request.kind();
}

}  // namespace

bool IsGpuKind(std::string_view text) {
  if (text == kWholeGpu || text == kUnnamedMig) return true;
  std::string_view rest = text;
  if (!Digits(rest)) return false;
  if (Literal(rest, "c.") && !Digits(rest)) return false;
  if (!Literal(rest, "g.") || !Digits(rest) || !Literal(rest, "gb")) return false;
  if (rest.empty()) return true;
  return Literal(rest, "+") && !rest.empty() && rest.size() <= 16 &&
         std::all_of(rest.begin(), rest.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '+';
         });
}

Result<std::map<std::string, std::string>> ParseMigProfiles(std::string_view text) {
  std::map<std::string, std::string> profiles;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t equals = item.find('=');
    std::string_view instance = item.substr(0, equals);
    std::string_view check = instance;
    const bool named = Literal(check, "gpu") && Digits(check) && Literal(check, "/gi") &&
                       Digits(check) && check.empty();
    const std::string_view profile =
        equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    if (!named || !IsGpuKind(profile) || profile == kWholeGpu ||
        !profiles.emplace(instance, profile).second) {
      return Invalid("fn_mig_profiles", "{} is not one gpu<N>/gi<M>=<profile>, each instance once",
                     model::Quoted(item));
    }
  }
  return profiles;
}

GpuInventory ReadGpus(const std::string& root, const std::map<std::string, std::string>& profiles) {
  GpuInventory found;
  std::vector<std::string> common;
  for (const char* name : {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}) {
    std::string file = fmt::format("{}/dev/{}", root, name);
    if (Exists(file)) common.push_back(std::move(file));
  }
  for (const uint32_t gpu : Numbered(root + "/dev", "nvidia")) {
    const std::string name = fmt::format("gpu{}", gpu);
    std::vector<std::string> files = {fmt::format("{}/dev/nvidia{}", root, gpu)};
    files.insert(files.end(), common.begin(), common.end());
    const std::string mig = fmt::format("{}/proc/driver/nvidia/capabilities/gpu{}/mig", root, gpu);
    const std::vector<uint32_t> instances = Numbered(mig, "gi");
    if (instances.empty()) {
      found.devices.push_back({name, std::string(kWholeGpu), std::move(files)});
      continue;
    }
    for (const uint32_t gi : instances) {
      const std::string instance = fmt::format("{}/gi{}", name, gi);
      const std::string dir = fmt::format("{}/gi{}", mig, gi);
      const auto profile = profiles.find(instance);
      for (const uint32_t ci : Numbered(dir, "ci")) {
        GpuDevice device{fmt::format("{}/ci{}", instance, ci),
                         profile == profiles.end() ? std::string(kUnnamedMig) : profile->second,
                         files};
        auto of_gi = CapabilityFile(root, dir + "/access");
        auto of_ci = CapabilityFile(root, fmt::format("{}/ci{}/access", dir, ci));
        if (!of_gi.ok() || !of_ci.ok()) {
          found.problems.push_back(fmt::format(
              "{}: {}", device.name, (of_gi.ok() ? of_ci.error() : of_gi.error()).message()));
          continue;
        }
        device.files.push_back(std::move(of_gi).value());
        device.files.push_back(std::move(of_ci).value());
        found.devices.push_back(std::move(device));
      }
    }
  }
  return found;
}

// Lives in the frame of Acquire, in the list until it is served.
struct GpuAllocator::Waiter {
  explicit Waiter(v1::FnGpuRequest wanted) : request(std::move(wanted)) {}
  const v1::FnGpuRequest request;
  std::vector<size_t> taken;
  runtime::AsyncEvent served;
};

GpuAllocator::GpuAllocator(GpuInventory inventory, uint32_t shared_max)
    : inventory_(std::move(inventory)), shared_max_(shared_max), uses_(inventory_.devices.size()) {}

std::vector<std::string> GpuAllocator::Grant::Files() const {
  std::set<std::string> files;
  for (const size_t index : held_) {
    const auto& of_device = owner_->inventory_.devices[index].files;
    files.insert(of_device.begin(), of_device.end());
  }
  return {files.begin(), files.end()};
}

Result<void> GpuAllocator::CheckPossible(const v1::FnGpuRequest& request) const {
  const std::string kind = KindOf(request);
  const auto count = static_cast<uint64_t>(
      std::count_if(inventory_.devices.begin(), inventory_.devices.end(),
                    [&](const GpuDevice& device) { return device.kind == kind; }));
  if (count >= request.count()) return Ok();
  const std::string_view field = count == 0 ? "gpu.kind" : "gpu.count";
  return Error(Code::kFailedPrecondition, "fn.gpu_missing",
               fmt::format("{}: {} of {} wanted, the node has {}", field, request.count(), kind,
                           count))
      .WithField(std::string(field));
}

bool GpuAllocator::TryTake(const v1::FnGpuRequest& request, std::vector<size_t>* taken) {
  const std::string kind = KindOf(request);
  // Shared calls fill the devices that are shared already, so that exclusive ones stay free.
  std::vector<size_t> usable;
  std::vector<size_t> unused;
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (inventory_.devices[i].kind != kind) continue;
    const Use& use = uses_[i];
    if (use.holders == 0) {
      unused.push_back(i);
    } else if (request.shared() && use.shared && use.holders < shared_max_) {
      usable.push_back(i);
    }
  }
  usable.insert(usable.end(), unused.begin(), unused.end());
  if (usable.size() < request.count()) return false;
  usable.resize(request.count());
  for (const size_t i : usable) {
    ++uses_[i].holders;
    uses_[i].shared = request.shared();
  }
  *taken = std::move(usable);
  return true;
}

void GpuAllocator::Return(const std::vector<size_t>& held) {
  for (const size_t i : held) --uses_[i].holders;
  if (!closed_) Serve();
}

void GpuAllocator::Serve() {
  std::set<std::string> blocked;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Waiter& waiter = **it;
    if (blocked.contains(KindOf(waiter.request)) || !TryTake(waiter.request, &waiter.taken)) {
      blocked.insert(KindOf(waiter.request));
      ++it;
      continue;
    }
    it = waiting_.erase(it);
    waiter.served.Set();
  }
}

runtime::Task<GpuAllocator::Grant> GpuAllocator::Acquire(v1::FnGpuRequest request,
                                                         runtime::Deadline deadline) {
  Waiter waiter(std::move(request));
  // Also taken back when the coroutine is dropped while it waits.
  struct InLine {
    ~InLine() {
      std::erase(owner.waiting_, &entry);
      if (!owner.closed_) owner.Serve();
    }
    GpuAllocator& owner;
    Waiter& entry;
  };
  waiting_.push_back(&waiter);
  Serve();
  Result<void> woken;
  {
    const InLine place{*this, waiter};
    woken = co_await waiter.served.Wait(deadline);
  }
  Grant grant;
  if (!waiter.taken.empty()) grant = Grant(this, std::move(waiter.taken));
  if (!woken.ok()) co_return std::move(woken).error();
  co_return grant;
}

std::map<std::string, GpuAllocator::Count> GpuAllocator::Counts() const {
  std::map<std::string, Count> counts;
  for (size_t i = 0; i < uses_.size(); ++i) {
    Count& count = counts[inventory_.devices[i].kind];
    ++count.total;
    if (uses_[i].holders == 0) ++count.free;
  }
  return counts;
}

}  // namespace dsec::fn
