// SPDX-License-Identifier: Apache-2.0
#include "disk/disk.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/fault.h"
#include "base/log.h"
#include "disk/layer_writer.h"
#include "image/fs.h"
#include "os/file.h"
#include "os/process.h"

namespace dsec::disk {
namespace {

constexpr size_t kMaxRecord = 1 << 20;
constexpr size_t kMaxFiles = 1 << 16;
constexpr char kNewSuffix[] = ".new";

uint64_t FirstSector(uint64_t offset) { return offset / kSectorBytes; }
uint64_t EndSector(uint64_t end) { return (end + kSectorBytes - 1) / kSectorBytes; }

Result<void> WriteRecord(int folder, const DiskRecord& record) {
  const std::string fresh = std::string(kRecordName) + kNewSuffix;
  if (::unlinkat(folder, fresh.c_str(), 0) != 0 && errno != ENOENT)
    return DiskError("replace disk.json");
  {
    DSEC_TRY(auto file,
             os::OpenAt(folder, fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
    DSEC_TRY_VOID(os::WriteAll(file.get(), record.Encode()));
    if (::fsync(file.get()) != 0) return DiskError("sync disk.json");
  }
  DSEC_FAULT_POINT("disk.record.before_rename");
  if (::renameat(folder, fresh.c_str(), folder, kRecordName) != 0)
    return DiskError("replace disk.json");
  DSEC_FAULT_POINT("disk.record.after_rename");
  if (::fsync(folder) != 0) return DiskError("sync a disk's folder");
  return Ok();
}

Result<std::shared_ptr<const Layer>> OpenLower(int folder, const LowerName& name,
                                               const DiskOptions& options) {
  if (name.published.empty()) return OpenLayerAt(folder, name.file);
  if (options.find_published) return options.find_published(name.published);
  return Error(Code::kFailedPrecondition, "disk.no_store",
               fmt::format("layer {} is a published one, and no store is known", name.published));
}

Result<std::string> BootId(const UpperOptions& options) {
  if (!options.boot_id.empty()) return options.boot_id;
  return os::ReadBootId();
}

}  // namespace

std::shared_ptr<const Disk::State> Disk::state() const {
  const std::lock_guard lock(state_mutex_);
  return state_;
}

void Disk::SetState(std::shared_ptr<const State> state) {
  const std::lock_guard lock(state_mutex_);
  state_.swap(state);
}

Result<void> Disk::Create(const std::string& dir, uint64_t bytes,
                          const std::vector<LowerName>& lowers, const DiskOptions& options) {
  DSEC_TRY_VOID(CheckDiskBytes(bytes));
  UpperOptions upper = options.upper;
  DSEC_TRY(upper.boot_id, BootId(upper));
  if (::mkdir(dir.c_str(), 0700) != 0) {
    if (errno != EEXIST) return DiskError("make " + dir);
    return Error(Code::kAlreadyExists, "disk.exists", dir + " is there already").WithField("dir");
  }
  const auto make = [&]() -> Result<void> {
    DSEC_TRY(const auto folder, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
    DiskRecord record;
    record.bytes = bytes;
    std::vector<std::shared_ptr<const Layer>> layers;
    for (LowerName name : lowers) {
      if (name.published.empty()) {
        const std::string own = fmt::format("{}.lsmt", NewUuid());
        if (::linkat(AT_FDCWD, name.file.c_str(), folder.get(), own.c_str(), 0) == 0) {
          name.file = own;
        } else if (name.file.empty() || name.file[0] != '/') {
          return Error(Code::kInvalidArgument, "disk.bad_chain",
                       fmt::format("\"{}\" is no absolute path, and cannot be linked to {}",
                                   name.file, dir))
              .WithField("layers");
        }
      }
      DSEC_TRY(auto layer, OpenLower(folder.get(), name, options));
      layers.push_back(std::move(layer));
      record.lowers.push_back(std::move(name));
    }
    DSEC_TRY_VOID(CheckChain(layers));
    LayerInfo info;
    info.uuid = record.upper = NewUuid();
    info.virtual_bytes = bytes;
    if (!layers.empty()) {
      info.parent_uuid = layers.back()->info.uuid;
      if (layers.back()->info.virtual_bytes > bytes) {
        return Error(Code::kInvalidArgument, "disk.size",
                     fmt::format("{} bytes are less than the {} of its layers", bytes,
                                 layers.back()->info.virtual_bytes))
            .WithField("size");
      }
    }
    DSEC_TRY_VOID(Upper::Create(folder.get(), info, upper));
    DSEC_TRY_VOID(os::CreateFile(folder.get(), kLockName, "", 0600));
    return WriteRecord(folder.get(), record);
  };
  auto made = make();
  if (!made.ok()) static_cast<void>(os::RemoveTree(AT_FDCWD, dir.c_str()));
  return made;
}

Result<std::unique_ptr<Disk>> Disk::Open(const std::string& dir, DiskOptions options) {
  DSEC_TRY(options.upper.boot_id, BootId(options.upper));
  std::unique_ptr<Disk> disk(new Disk(dir, std::move(options)));
  DSEC_TRY(disk->folder_, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  const int folder = disk->folder_.get();
  DSEC_TRY(disk->lock_, os::OpenAt(folder, kLockName, O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
  if (::flock(disk->lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return DiskError("lock " + dir);
    return Error(Code::kConflict, "disk.in_use", dir + " is open in another process");
  }
  DSEC_TRY(const std::string text, os::ReadFile(folder, kRecordName, kMaxRecord));
  DSEC_TRY(const auto record, DiskRecord::Parse(text));
  auto state = std::make_shared<State>();
  state->names = record.lowers;
  for (const LowerName& name : record.lowers) {
    DSEC_TRY(auto layer, OpenLower(folder, name, disk->options_));
    state->layers.push_back(std::move(layer));
  }
  DSEC_TRY(state->merged, MergeChain(state->layers));
  DSEC_TRY(auto upper, Upper::Open(folder, record.upper, disk->options_.upper));
  const std::string below = state->layers.empty() ? "" : state->layers.back()->info.uuid;
  if (upper->info().virtual_bytes != record.bytes || upper->info().parent_uuid != below) {
    return Error(Code::kInternal, "disk.corrupt",
                 fmt::format("{}: the upper {} of {} bytes over \"{}\" does not fit {} bytes over "
                             "\"{}\"",
                             dir, record.upper, upper->info().virtual_bytes,
                             upper->info().parent_uuid, record.bytes, below));
  }
  state->upper = std::move(upper);
  disk->bytes_ = record.bytes;
  disk->SetState(std::move(state));
  disk->RemoveUnnamed();
  return disk;
}

// Files of the folder that disk.json does not lead to. What cannot be removed stays.
void Disk::RemoveUnnamed() const {
  const auto now = state();
  std::set<std::string> named = {kRecordName, kLockName, DataName(now->upper->info().uuid),
                                 now->upper->info().uuid + ".journal"};
  for (const LowerName& name : now->names) named.insert(name.file);
  const auto names = image::ListNames(folder_.get(), kMaxFiles);
  if (!names.ok()) return log::Warn("disk.not_swept", {{"dir", dir_}, {"error", names.error()}});
  for (const std::string& name : *names) {
    const bool ours =
        name.ends_with(".lsmt") || name.ends_with(".journal") || name.ends_with(kNewSuffix);
    if (!ours || named.contains(name)) continue;
    if (::unlinkat(folder_.get(), name.c_str(), 0) == 0)
      log::Info("disk.removed", {{"dir", dir_}, {"file", name}});
  }
}

Result<void> Disk::CheckRange(uint64_t offset, uint64_t size) const {
  if (offset <= bytes_ && size <= bytes_ - offset) return Ok();
  return Error(Code::kInvalidArgument, "disk.out_of_range",
               fmt::format("{} bytes at {} of a disk of {}", size, offset, bytes_));
}

// One read: what is elsewhere is counted, and the last to come answers.
struct Disk::Reading {
  std::shared_ptr<const State> state;
  Done done;
  std::atomic<size_t> left = 1;
  std::mutex mutex;
  Result<void> result;
  void Finish(Result<void> part) {
    if (!part.ok()) {
      const std::lock_guard lock(mutex);
      if (result.ok()) result = std::move(part);
    }
    if (left.fetch_sub(1) == 1) done(std::move(result));
  }
};

void Disk::Read(uint64_t offset, std::span<uint8_t> out, Done done) {
  if (auto range = CheckRange(offset, out.size()); !range.ok()) return done(std::move(range));
  ReadFrom(state(), offset, out, std::move(done));
}

void Disk::ReadFrom(const std::shared_ptr<const State>& state, uint64_t offset,
                    std::span<uint8_t> out, Done done) {
  const auto reading = std::make_shared<Reading>();
  reading->state = state;
  reading->done = std::move(done);
  const uint64_t end = offset + out.size();
  // The bytes of a part that were asked for: where they lie in its file, and where they go to.
  const auto bytes_of = [&](const Extent& part) {
    const uint64_t from = std::max(part.first * kSectorBytes, offset);
    const uint64_t to = std::min(part.end() * kSectorBytes, end);
    return std::pair(part.place * kSectorBytes + (from - part.first * kSectorBytes),
                     out.subspan(from - offset, to - from));
  };
  const auto zero = [&](uint64_t first, uint64_t last) {
    Extent part;
    part.first = first;
    part.count = static_cast<uint32_t>(last - first);  // of one read
    std::ranges::fill(bytes_of(part).second, uint8_t{0});
  };
  const auto below = [&](uint64_t first, uint64_t last) {
    Walk(
        state->merged, first, last,
        [&](const Extent& part) {
          const auto [place, bytes] = bytes_of(part);
          ++reading->left;
          state->layers[part.layer]->file->Read(
              place, bytes, [reading](Result<void> result) { reading->Finish(std::move(result)); });
        },
        zero);
  };
  Result<void> local;
  {
    const auto plan = state->upper->Find(FirstSector(offset), EndSector(end));
    Walk(
        plan.parts, FirstSector(offset), EndSector(end),
        [&](const Extent& part) {
          const auto [place, bytes] = bytes_of(part);
          if (part.zero) {
            std::ranges::fill(bytes, uint8_t{0});
          } else if (local.ok()) {
            local = state->upper->ReadData(place, bytes);
          }
        },
        below);
  }
  reading->Finish(std::move(local));
}

Result<void> Disk::ReadNow(uint64_t offset, std::span<uint8_t> out) {
  return WaitFor([&](Done done) { Read(offset, out, std::move(done)); });
}

Result<void> Disk::Write(uint64_t offset, std::span<const uint8_t> data) {
  DSEC_TRY_VOID(CheckRange(offset, data.size()));
  if (data.empty()) return Ok();
  while (true) {
    DSEC_TRY(const bool written, TryWrite(offset, data));
    if (written) return Ok();
  }
}

// False: sectors that are filled in part were written meanwhile.
Result<bool> Disk::TryWrite(uint64_t offset, std::span<const uint8_t> data) {
  if (!ReadsFirst(offset, data.size())) {
    const std::shared_lock gate(gate_);
    return state()->upper->Write(FirstSector(offset), data, {});
  }
  const uint64_t end = offset + data.size();
  const uint64_t first = FirstSector(offset);
  const uint64_t last = EndSector(end);
  std::vector<uint8_t> whole((last - first) * kSectorBytes);
  const auto before = state();
  Upper::Expected expected;
  // Nothing is locked while the rest of the first and of the last sector is read.
  const auto fill = [&](uint64_t sector) -> Result<void> {
    expected.push_back({{sector, sector + 1}, before->upper->Find(sector, sector + 1).parts});
    const std::span<uint8_t> out(whole.data() + (sector - first) * kSectorBytes, kSectorBytes);
    return WaitFor(
        [&](Done done) { ReadFrom(before, sector * kSectorBytes, out, std::move(done)); });
  };
  if (offset % kSectorBytes != 0) DSEC_TRY_VOID(fill(first));
  if (end % kSectorBytes != 0 && (last - 1 != first || expected.empty()))
    DSEC_TRY_VOID(fill(last - 1));
  std::ranges::copy(data, whole.begin() + static_cast<ptrdiff_t>(offset - first * kSectorBytes));
  DSEC_FAULT_POINT("disk.write.after_fill");
  const std::shared_lock gate(gate_);
  const auto now = state();
  if (now->upper != before->upper) return false;
  return now->upper->Write(first, whole, expected);
}

Result<void> Disk::Zero(uint64_t offset, uint64_t size) {
  DSEC_TRY_VOID(CheckRange(offset, size));
  const uint64_t end = offset + size;
  const uint64_t first = EndSector(offset);
  const uint64_t last = FirstSector(end);
  const std::vector<uint8_t> zeros(kSectorBytes);
  const auto part = [&](uint64_t from, uint64_t to) -> Result<void> {
    if (from >= to) return Ok();
    return Write(from, std::span(zeros).first(to - from));
  };
  if (first >= last) {  // within one sector, or over the border of two
    const uint64_t border = std::min(end, first * kSectorBytes);
    DSEC_TRY_VOID(part(offset, border));
    return part(border, end);
  }
  DSEC_TRY_VOID(part(offset, first * kSectorBytes));
  DSEC_TRY_VOID(part(last * kSectorBytes, end));
  const std::shared_lock gate(gate_);
  return state()->upper->Zero(first, last - first);
}

Result<void> Disk::Flush() {
  const std::shared_lock gate(gate_);
  return state()->upper->Flush();
}

Result<void> Disk::Publish(const std::vector<LowerName>& names, const std::string& upper) const {
  DiskRecord record;
  record.bytes = bytes_;
  record.lowers = names;
  record.upper = upper;
  return WriteRecord(folder_.get(), record);
}

Result<Disk::Sealed> Disk::Seal() {
  const std::lock_guard chain(chain_mutex_);
  // Most of what has to reach the disk does so before anybody waits.
  DSEC_TRY_VOID(Flush());
  const std::unique_lock gate(gate_);
  const auto before = state();
  if (before->layers.size() >= kMaxLayers) {
    return Error(Code::kResourceExhausted, "disk.too_many_layers",
                 fmt::format("{} layers; collapse some", before->layers.size()));
  }
  const LayerInfo& info = before->upper->info();
  auto after = std::make_shared<State>(*before);
  DSEC_TRY_VOID(before->upper->Seal());
  DSEC_FAULT_POINT("disk.seal.sealed");
  LowerName name;
  name.file = DataName(info.uuid);
  DSEC_TRY(auto layer, OpenLayerAt(folder_.get(), name.file));
  DSEC_TRY(auto index, layer->ReadIndex());
  for (Extent& extent : index) extent.layer = static_cast<uint16_t>(after->layers.size());
  after->merged = WithoutZeros(Overlay(index, after->merged));
  LayerInfo fresh;
  fresh.uuid = NewUuid();
  fresh.parent_uuid = info.uuid;
  fresh.virtual_bytes = bytes_;
  DSEC_TRY(after->upper, Upper::Create(folder_.get(), fresh, options_.upper));
  after->names.push_back(name);
  after->layers.push_back(layer);
  auto published = Publish(after->names, fresh.uuid);
  if (!published.ok()) {
    // Which of the two it is is known only to the disk; ours is still whole, so say so again.
    if (auto again = Publish(before->names, info.uuid); !again.ok())
      log::Error("disk.record_unknown", {{"dir", dir_}, {"error", again.error()}});
    return std::move(published).error();
  }
  SetState(after);
  static_cast<void>(::unlinkat(folder_.get(), (info.uuid + ".journal").c_str(), 0));
  Sealed sealed;
  sealed.path = dir_ + "/" + name.file;
  sealed.uuid = info.uuid;
  sealed.extents = index.size();
  sealed.data_bytes = before->upper->usage().live_bytes;
  return sealed;
}

Result<Disk::Sealed> Disk::Collapse(size_t first, size_t count) {
  const std::unique_lock chain(chain_mutex_, std::try_to_lock);
  if (!chain.owns_lock())
    return Error(Code::kConflict, "disk.collapsing", "the chain is being changed");
  const auto before = state();
  if (count < 1 || first >= before->layers.size() || count > before->layers.size() - first) {
    return Error(Code::kInvalidArgument, "disk.out_of_range",
                 fmt::format("layers {} to {} of {}", first, first + count, before->layers.size()))
        .WithField("layers");
  }
  const auto parts = std::span(before->layers).subspan(first, count);
  LowerName name;
  name.file = fmt::format("{}.lsmt", NewUuid());
  const std::string fresh = name.file + kNewSuffix;
  const auto write = [&]() -> Result<LayerInfo> {
    DSEC_TRY(auto file, os::OpenAt(folder_.get(), fresh.c_str(),
                                   O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
    DSEC_TRY(auto info, CollapseTo(file.get(), parts, first == 0, {}));
    if (::renameat(folder_.get(), fresh.c_str(), folder_.get(), name.file.c_str()) != 0)
      return DiskError("name a layer");
    DSEC_FAULT_POINT("disk.collapse.after_rename");
    return info;
  };
  auto written = write();
  if (!written.ok()) {
    static_cast<void>(::unlinkat(folder_.get(), fresh.c_str(), 0));
    static_cast<void>(::unlinkat(folder_.get(), name.file.c_str(), 0));
    return std::move(written).error();
  }
  auto after = std::make_shared<State>(*before);
  const auto at = static_cast<ptrdiff_t>(first);
  const auto end = static_cast<ptrdiff_t>(first + count);
  after->names.erase(after->names.begin() + at, after->names.begin() + end);
  after->names.insert(after->names.begin() + at, name);
  after->layers.erase(after->layers.begin() + at, after->layers.begin() + end);
  DSEC_TRY(auto layer, OpenLayerAt(folder_.get(), name.file));
  after->layers.insert(after->layers.begin() + at, layer);
  DSEC_TRY(after->merged, MergeChain(after->layers));
  {
    // The upper is the same; nobody changes the chain but us.
    const std::unique_lock gate(gate_);
    auto published = Publish(after->names, after->upper->info().uuid);
    if (!published.ok()) {
      if (auto again = Publish(before->names, before->upper->info().uuid); !again.ok())
        log::Error("disk.record_unknown", {{"dir", dir_}, {"error", again.error()}});
      return std::move(published).error();
    }
    SetState(after);
  }
  RemoveUnnamed();
  Sealed sealed;
  sealed.path = dir_ + "/" + name.file;
  sealed.uuid = written->uuid;
  sealed.extents = written->index_entries;
  sealed.data_bytes = written->index_offset - kHeaderBytes;
  return sealed;
}

Disk::Info Disk::info() const {
  const auto now = state();
  Info info;
  info.bytes = bytes_;
  info.lowers = now->names;
  for (const auto& layer : now->layers) info.layers.push_back(layer->info);
  info.upper_uuid = now->upper->info().uuid;
  info.extents = now->merged.size();
  info.upper = now->upper->usage();
  return info;
}

}  // namespace dsec::disk
