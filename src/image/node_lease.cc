// SPDX-License-Identifier: Apache-2.0
#include "image/node_lease.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
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
// A lease of another machine that is younger has an owner that lives.
constexpr int64_t kTakenMillis = 3 * 60 * 1000;

// machine-id(5); empty where there is none.
std::string MachineId() {
  auto text = os::ReadFile(AT_FDCWD, "/etc/machine-id", 64);
  if (!text.ok()) return "";
  while (text->ends_with('\n')) text->pop_back();
  return *std::move(text);
}

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
  return json{{"format", kFormat},        {"node", node},
              {"epoch", epoch},           {"boot_id", boot_id},
              {"machine_id", machine_id}, {"renewed_unix_ms", renewed_unix_ms},
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
      !is("boot_id", json::value_t::string) || !is("machine_id", json::value_t::string) ||
      !is("renewed_unix_ms", json::value_t::number_unsigned) || !is("layers", json::value_t::array))
    return bad("a member is missing or of a wrong type");
  Lease lease;
  lease.node = value["node"];
  lease.epoch = value["epoch"];
  lease.boot_id = value["boot_id"];
  lease.machine_id = value["machine_id"];
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
  auto lease = ReadLease(dir->get(), node);
  if (!lease.ok() && lease.error().reason() == "layer.bad_lease") {
    const std::string name = node + std::string(kLeaseEnd);
    const std::string aside = name + ".damaged";
    if (::renameat(dir->get(), name.c_str(), dir->get(), aside.c_str()) != 0)
      return StoreError("move a damaged lease away");
    return Ok();
  }
  if (!lease.ok()) return std::move(lease).error();
  if (!*lease) return none;
  return Replace(dir->get(), node + std::string(kForgottenEnd), (*lease)->epoch);
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
  std::set<LayerId> durable;  // listed whether the write under way succeeds or not
  std::set<LayerId> unused;   // without a pin at the last renewal
  std::set<LayerId> carried;  // listed by an earlier daemon
  std::set<LayerId> missed;   // wanted by somebody who did not get it
  std::set<LayerId> revoked;  // what the forgotten epoch had
  int renewals = 0;
  bool lost = false;

  std::mutex io;      // of the file and the next block
  std::string epoch;  // empty: the file is not ours yet
  std::string boot_id;
  dev_t device = 0;  // of the folder of leases
  ino_t inode = 0;

  void Unpin(const LayerId& id) {
    const std::lock_guard lock(mutex);
    const auto found = pins.find(id);
    if (--found->second == 0) pins.erase(found);
  }
  bool IsDurable(const LayerId& id) {
    const std::lock_guard lock(mutex);
    return durable.contains(id);
  }

  // With `io` held.
  Result<os::UniqueFd> OpenFolder() {
    // A store always has its blobs; without them its file system is not mounted.
    const std::string blobs = root + "/blobs";
    if (::access(blobs.c_str(), F_OK) != 0) {
      const int error = errno;
      return error == ENOENT ? Unreachable(blobs + " is not there")
                             : Unreachable(blobs).WithErrno(error);
    }
    const std::string folder = NodesFolder(root);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
      return RootError(StoreError("make the folder of leases"));
    DSEC_TRY(auto dir, OpenNodes(root));
    struct stat status;
    if (::fstat(dir.get(), &status) != 0)
      return RootError(os::ErrnoError("layer.io", "stat the folder of leases"));
    if (status.st_dev != device || status.st_ino != inode) {
      // Another mount than before: what was written may be elsewhere.
      epoch.clear();
      const std::lock_guard lock(mutex);
      durable.clear();
      device = status.st_dev;
      inode = status.st_ino;
    }
    return dir;
  }

  // With `io` held: begins an epoch.
  Result<void> Own(int dir) {
    DSEC_TRY(boot_id, os::ReadBootId());
    DSEC_TRY(const auto before, ReadLease(dir, node));
    DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir, node));
    if (before && before->epoch != forgotten && before->boot_id != boot_id) {
      const int64_t age = UnixMillis(clock.Wall()) - before->renewed_unix_ms;
      if (before->machine_id != MachineId() && age < kTakenMillis) return Taken();
    }
    const std::lock_guard lock(mutex);
    // What an earlier daemon listed, its sandboxes may have mounted still.
    if (before && before->boot_id == boot_id && before->epoch != forgotten)
      carried.insert(before->layers.begin(), before->layers.end());
    renewals = 0;
    epoch = NewUlid(clock);
    return Ok();
  }

  Error Taken() const {
    return Error(Code::kFailedPrecondition, "layer.node_id_taken",
                 fmt::format("another machine renews the lease of node {}: each node of a store "
                             "needs a node_id of its own",
                             node));
  }

  // With `io` held: the file lists what is pinned, durable or carried, less `drop`, and counts.
  // `own`: what the caller has a pin of.
  Result<void> Write(const std::set<LayerId>& drop, const LayerId* own) {
    DSEC_TRY(const auto dir, OpenFolder());
    if (!epoch.empty()) {
      DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir.get(), node));
      if (forgotten == epoch) DSEC_TRY_VOID(Lose(own));
    }
    if (!epoch.empty()) {
      DSEC_TRY(const auto present, ReadLease(dir.get(), node));
      if (present && present->epoch != epoch) return Taken();
    }
    const bool first = epoch.empty();
    if (first) DSEC_TRY_VOID(Own(dir.get()));
    Lease lease{node, epoch, boot_id, MachineId(), UnixMillis(clock.Wall()), {}};
    {
      const std::lock_guard lock(mutex);
      for (const LayerId& id : drop) {
        if (!pins.contains(id)) durable.erase(id);
      }
      lease.layers = durable;
      lease.layers.insert(carried.begin(), carried.end());
      for (const auto& [id, count] : pins) lease.layers.insert(id);
    }
    const std::string name = node + std::string(kLeaseEnd);
    if (auto written = Replace(dir.get(), name, lease.Encode()); !written.ok()) {
      // The file may still be that of the epoch before, which must not be taken for another's.
      if (first) epoch.clear();
      return RootError(std::move(written).error());
    }
    // Forgotten meanwhile: the layer may be gone before it is opened.
    DSEC_TRY(const std::string forgotten, ForgottenEpoch(dir.get(), node));
    const std::lock_guard lock(mutex);
    durable = std::move(lease.layers);
    if (forgotten != epoch) return Ok();
    revoked = std::exchange(durable, {});
    carried.clear();
    lost = true;
    return Lost();
  }

  Error Lost() const {
    return Error(Code::kUnavailable, "layer.lease_lost",
                 fmt::format("node {} was declared gone and has layers in use still", node));
  }

  // This epoch is over; a new one begins when nothing of it is in use.
  Result<void> Lose(const LayerId* own) {
    const std::lock_guard lock(mutex);
    if (!lost) {
      log::Error("layer.lease_lost", {{"node", node}, {"epoch", epoch}});
      revoked = std::exchange(durable, {});
      carried.clear();
    }
    lost = std::ranges::any_of(revoked, [&](const LayerId& id) {
      const auto found = pins.find(id);
      return found != pins.end() && found->second > (own != nullptr && *own == id ? 1 : 0);
    });
    if (lost) return Lost();
    revoked.clear();
    epoch.clear();
    return Ok();
  }
};

NodeLease::NodeLease(std::string root, std::string node, const Clock& clock)
    : state_(std::make_shared<State>(std::move(root), std::move(node), clock)) {}

Result<NodeLease::Pin> NodeLease::Hold(const LayerId& id) {
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->pins[id];
  }
  Pin pin(nullptr, [state = state_, id](const void*) { state->Unpin(id); });
  if (!state_->IsDurable(id)) {
    const std::lock_guard io(state_->io);
    // Others wait here together: the first one writes for all of them.
    if (!state_->IsDurable(id)) DSEC_TRY_VOID(state_->Write({}, &id));
  }
  return pin;
}

void NodeLease::Missed(const LayerId& id) {
  const std::lock_guard lock(state_->mutex);
  state_->missed.insert(id);
}

void NodeLease::Got(const LayerId& id) {
  const std::lock_guard lock(state_->mutex);
  state_->missed.erase(id);
}

Result<void> NodeLease::Renew() {
  const std::lock_guard io(state_->io);
  std::set<LayerId> drop;
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->epoch.empty() && ++state_->renewals >= kCarriedRenewals) {
      std::erase_if(state_->carried,
                    [&](const LayerId& id) { return !state_->missed.contains(id); });
      // Of no use for others.
      std::erase_if(state_->missed,
                    [&](const LayerId& id) { return !state_->carried.contains(id); });
    }
    std::set<LayerId> unused;
    for (const LayerId& id : state_->durable) {
      if (state_->pins.contains(id) || state_->carried.contains(id)) continue;
      (state_->unused.contains(id) ? drop : unused).insert(id);
    }
    state_->unused = std::move(unused);
  }
  return state_->Write(drop, nullptr);
}

bool NodeLease::lost() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lost;
}

}  // namespace dsec::image
