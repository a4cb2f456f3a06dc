// SPDX-License-Identifier: Apache-2.0
#include "image/node_lease.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "image/fs.h"
#include "image/layer.h"
#include "image/root_calls.h"
#include "os/file.h"
#include "os/process.h"

namespace dsec::image {
namespace {

using nlohmann::json;

constexpr char kNodesName[] = "nodes";
constexpr std::string_view kLeaseEnd = ".json";
constexpr std::string_view kForgottenEnd = ".forgotten";
constexpr size_t kMaxLease = 16 << 20;
constexpr size_t kMaxEpoch = 64;
constexpr int kFormat = 1;
// What nobody has asked for in so many minutes no sandbox that was adopted has.
constexpr int kCarriedRenewals = 10;

std::string NodesFolder(const std::string& root) { return root + "/" + kNodesName; }

// Written under another name, synced and renamed.
Result<void> Replace(int dir, const std::string& name, const std::string& text) {
  const std::string fresh = name + ".new";
  ::unlinkat(dir, fresh.c_str(), 0);
  DSEC_TRY_VOID(os::CreateFile(dir, fresh.c_str(), text, 0600));
  DSEC_TRY(const auto file, os::OpenAt(dir, fresh.c_str(), O_RDONLY));
  if (::fsync(file.get()) != 0) return StoreError("fsync " + name);
  DSEC_FAULT_POINT("layer.lease.before_rename");
  if (::renameat(dir, fresh.c_str(), dir, name.c_str()) != 0) return StoreError("publish " + name);
  if (::fsync(dir) != 0) return StoreError("fsync the folder of leases");
  return Ok();
}

Result<os::UniqueFd> OpenNodes(const std::string& root) {
  auto fd = os::OpenAt(AT_FDCWD, NodesFolder(root).c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!fd.ok()) return RootError(std::move(fd).error());
  return fd;
}

// nullopt: there is none.
Result<std::optional<Lease>> ReadLease(int dir, const std::string& node) {
  const std::string name = node + std::string(kLeaseEnd);
  auto text = os::ReadFile(dir, name.c_str(), kMaxLease);
  if (!text.ok()) {
    if (text.error().sys_errno() == ENOENT) return std::optional<Lease>();
    return RootError(std::move(text).error());
  }
  auto lease = Lease::Parse(*text);
  if (!lease.ok()) return std::move(lease).error().Context("{}/{}", kNodesName, name);
  return std::optional(*std::move(lease));
}

// The last epoch of the node that does not count any more; empty: none.
Result<std::string> ForgottenEpoch(int dir, const std::string& node) {
  const std::string name = node + std::string(kForgottenEnd);
  auto text = os::ReadFile(dir, name.c_str(), kMaxEpoch);
  if (text.ok()) return text;
  if (text.error().sys_errno() == ENOENT) return std::string();
  return RootError(std::move(text).error());
}

}  // namespace

std::string Lease::Encode() const {
  json list = json::array();
  for (const LayerId& id : layers) list.push_back(id.str());
  return json{{"format", kFormat},
              {"node", node},
              {"epoch", epoch},
              {"boot_id", boot_id},
              {"renewed_unix_ms", renewed_unix_ms},
              {"layers", std::move(list)}}
      .dump();
}

Result<Lease> Lease::Parse(std::string_view text) {
  const auto bad = [](std::string_view why) {
    return Error(Code::kInternal, "layer.bad_lease", fmt::format("not a lease: {}", why));
  };
  const json value = json::parse(text, nullptr, false);
  if (!value.is_object()) return bad("no JSON object");
  const auto is = [&](const char* key, json::value_t type) {
    const auto found = value.find(key);
    return found != value.end() && found->type() == type;
  };
  if (!is("format", json::value_t::number_unsigned) || value["format"] != kFormat)
    return bad("unknown format");
  if (!is("node", json::value_t::string) || !is("epoch", json::value_t::string) ||
      !is("boot_id", json::value_t::string) ||
      !is("renewed_unix_ms", json::value_t::number_unsigned) || !is("layers", json::value_t::array))
    return bad("a member is missing or of a wrong type");
  Lease lease;
  lease.node = value["node"];
  lease.epoch = value["epoch"];
  lease.boot_id = value["boot_id"];
  lease.renewed_unix_ms = value["renewed_unix_ms"];
  for (const json& item : value["layers"]) {
    if (!item.is_string()) return bad("a layer is no text");
    DSEC_TRY(LayerId id, ParseLayerId(item.get<std::string>()));
    lease.layers.insert(std::move(id));
  }
  if (lease.Encode() != text) return bad("not in canonical form");
  return lease;
}

Result<std::vector<Lease>> ReadLeases(const std::string& root) {
  std::vector<Lease> leases;
  auto dir = OpenNodes(root);
  if (!dir.ok()) {
    if (dir.error().sys_errno() == ENOENT) return leases;
    return std::move(dir).error();
  }
  auto names = ListNames(dir->get(), UINT64_MAX);
  if (!names.ok()) return RootError(std::move(names).error());
  for (const std::string& name : *names) {
    if (!name.ends_with(kLeaseEnd)) continue;
    const std::string node = name.substr(0, name.size() - kLeaseEnd.size());
    DSEC_TRY(auto lease, ReadLease(dir->get(), node));
    DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir->get(), node));
    if (lease && lease->epoch != forgotten) leases.push_back(*std::move(lease));
  }
  return leases;
}

Result<void> ForgetNode(const std::string& root, const std::string& node) {
  const Error none(Code::kNotFound, "layer.no_lease",
                   fmt::format("no lease of a node \"{}\"", Printable(node)));
  if (!ParseNodeId(node).ok()) return none;
  auto dir = OpenNodes(root);
  if (!dir.ok()) return dir.error().sys_errno() == ENOENT ? none : std::move(dir).error();
  DSEC_TRY(const auto lease, ReadLease(dir->get(), node));
  if (!lease) return none;
  return Replace(dir->get(), node + std::string(kForgottenEnd), lease->epoch);
}

Result<void> DropLease(const std::string& root, const std::string& node) {
  DSEC_TRY_VOID(ParseNodeId(node));
  const std::string path = NodesFolder(root) + "/" + node + std::string(kLeaseEnd);
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return Ok();
  return RootError(StoreError("remove " + path));
}

struct NodeLease::State {
  State(std::string path, std::string name, const Clock& time)
      : root(std::move(path)), node(std::move(name)), clock(time) {}

  const std::string root;
  const std::string node;
  const Clock& clock;

  mutable std::mutex mutex;  // of the next block; never held over a call on the store
  std::map<LayerId, size_t> pins;
  std::set<LayerId> listed;   // by the file, or by the one that is being written
  std::set<LayerId> unused;   // without a pin at the last renewal
  std::set<LayerId> carried;  // listed by an earlier daemon and not held by this one so far
  std::set<LayerId> missed;   // of `carried`: somebody wanted it and did not get it
  int renewals = 0;
  bool lost = false;

  std::mutex io;      // of the file and the next block
  std::string epoch;  // empty: the file is not ours yet
  std::string boot_id;

  void Unpin(const LayerId& id) {
    const std::lock_guard lock(mutex);
    const auto found = pins.find(id);
    if (--found->second == 0) pins.erase(found);
  }

  // With `io` held.
  Result<void> Own(int dir) {
    DSEC_TRY(boot_id, os::ReadBootId());
    auto before = ReadLease(dir, node);
    if (!before.ok()) {
      if (before.error().reason() != "layer.bad_lease") return std::move(before).error();
      log::Error("layer.lease_damaged", {{"node", node}, {"error", before.error()}});
    }
    DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir, node));
    const std::lock_guard lock(mutex);
    // What an earlier daemon listed, its sandboxes may have mounted still.
    if (before.ok() && *before && (*before)->boot_id == boot_id && (*before)->epoch != forgotten)
      carried = (*before)->layers;
    epoch = NewUlid(clock);
    return Ok();
  }

  // With `io` held: the file lists what is pinned, `listed` or carried, and counts. `own`: the pins
  // that the caller has.
  Result<void> Write(size_t own) {
    const std::string folder = NodesFolder(root);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
      return RootError(StoreError("make the folder of leases"));
    DSEC_TRY(const auto dir, OpenNodes(root));
    bool others = false;
    {
      const std::lock_guard lock(mutex);
      size_t all = 0;
      for (const auto& [id, count] : pins) all += count;
      others = all > own;
    }
    if (!epoch.empty()) {
      DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir.get(), node));
      if (forgotten == epoch) DSEC_TRY_VOID(Lose(others));
    }
    const bool first = epoch.empty();
    if (first) DSEC_TRY_VOID(Own(dir.get()));
    Lease lease{node, epoch, boot_id, UnixMillis(clock.Wall()), {}};
    {
      const std::lock_guard lock(mutex);
      for (const auto& [id, count] : pins) listed.insert(id);
      lease.layers = listed;
      lease.layers.insert(carried.begin(), carried.end());
    }
    auto written = Replace(dir.get(), node + std::string(kLeaseEnd), lease.Encode());
    if (!written.ok()) {
      // What the file says now is not known: whoever comes next writes again.
      const std::lock_guard lock(mutex);
      for (const auto& [id, count] : pins) listed.erase(id);
      if (first) epoch.clear();
      return RootError(std::move(written).error());
    }
    // Forgotten meanwhile: the layer may be gone before it is opened.
    DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir.get(), node));
    if (forgotten == epoch) DSEC_TRY_VOID(Lose(true));
    return Ok();
  }

  // This epoch is over; a new one begins when nothing of it is in use.
  Result<void> Lose(bool in_use) {
    const std::lock_guard lock(mutex);
    if (!lost) log::Error("layer.lease_lost", {{"node", node}, {"epoch", epoch}});
    lost = in_use;
    for (auto* set : {&listed, &unused, &carried, &missed}) set->clear();
    if (in_use) {
      return Error(Code::kUnavailable, "layer.lease_lost",
                   fmt::format("node {} was declared gone and has layers in use still", node));
    }
    epoch.clear();
    return Ok();
  }
};

NodeLease::NodeLease(std::string root, std::string node, const Clock& clock)
    : state_(std::make_shared<State>(std::move(root), std::move(node), clock)) {}

Result<NodeLease::Pin> NodeLease::Hold(const LayerId& id) {
  bool listed = false;
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->pins[id];
    listed = state_->listed.contains(id) && !state_->lost;
  }
  Pin pin(nullptr, [state = state_, id](const void*) { state->Unpin(id); });
  if (listed) {
    // By a file that is being written, perhaps.
    const std::lock_guard io(state_->io);
    const std::lock_guard lock(state_->mutex);
    listed = state_->listed.contains(id) && !state_->epoch.empty();
  }
  if (!listed) {
    const std::lock_guard io(state_->io);
    {
      // Others wait here together: the first one writes for all of them.
      const std::lock_guard lock(state_->mutex);
      listed = state_->listed.contains(id) && !state_->epoch.empty() && !state_->lost;
    }
    if (!listed) DSEC_TRY_VOID(state_->Write(1));
  }
  const std::lock_guard lock(state_->mutex);
  state_->carried.erase(id);
  state_->missed.erase(id);
  return pin;
}

void NodeLease::Missed(const LayerId& id) {
  const std::lock_guard lock(state_->mutex);
  if (state_->carried.contains(id)) state_->missed.insert(id);
}

Result<void> NodeLease::Renew() {
  const std::lock_guard io(state_->io);
  {
    const std::lock_guard lock(state_->mutex);
    std::set<LayerId> unused;
    for (const LayerId& id : state_->listed) {
      if (!state_->pins.contains(id)) unused.insert(id);
    }
    if (!state_->epoch.empty()) {
      for (const LayerId& id : state_->unused) {
        if (unused.erase(id) > 0) state_->listed.erase(id);
      }
    }
    state_->unused = std::move(unused);
    if (++state_->renewals >= kCarriedRenewals) state_->carried = state_->missed;
  }
  return state_->Write(0);
}

bool NodeLease::lost() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lost;
}

}  // namespace dsec::image
