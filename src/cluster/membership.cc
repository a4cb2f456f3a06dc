// SPDX-License-Identifier: Apache-2.0
#include "cluster/membership.h"

#include <optional>
#include <utility>
#include <vector>

#include "base/id.h"
#include "base/log.h"
#include "cluster/call_error.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

constexpr int kAttempts = 8;  // of a transaction that others get in the way of
constexpr std::string_view kEdgeRole = "edge";
constexpr std::string_view kOperatorRole = "operator";

Error Refuse(Code code, std::string_view reason, std::string message, std::string field = {}) {
  return Error(code, reason, std::move(message)).WithField(std::move(field));
}

// What an edge says about itself; the rest is for the apiserver to know.
void CopyWord(const v1::NodeRecord& from, v1::NodeRecord& to) {
  to.set_node_id(from.node_id());
  to.set_address(from.address());
  to.set_boot_id(from.boot_id());
  *to.mutable_capabilities() = from.capabilities();
  *to.mutable_labels() = from.labels();
  to.set_pool(from.pool());
  to.set_build(from.build());
  to.set_backends(from.backends());
  to.set_capacity(from.capacity());
  to.set_memory_total_bytes(from.memory_total_bytes());
}

bool Conflict(const Error& error) { return error.reason() == "store.version"; }

Deadline Bounded(Deadline deadline) { return deadline.Sooner(Deadline::After(seconds(20))); }

}  // namespace

struct Membership::Found {
  std::optional<v1::NodeRecord> record;
  store::Revision version = 0;
};

Task<Membership::Found> Membership::Find(std::string node_id, Deadline deadline) {
  auto entry = co_await store_.Get(NodeKey(node_id), deadline);
  if (!entry.ok()) co_return std::move(entry).error();
  Found found;
  if (!entry->has_value()) co_return found;
  found.version = (*entry)->version;
  DSEC_CO_TRY(found.record, ParseNodeRecord((*entry)->value));
  co_return found;
}

Result<void> CheckCapabilitiesOf(const v1::NodeRecord& record) {
  for (const v1::Capability& row : record.capabilities()) {
    // A row that is not ok but has a mechanism in use has a replacement for what is missing.
    if (row.ok() || !row.used().empty()) continue;
    return Refuse(Code::kFailedPrecondition, "join.capability",
                  fmt::format("the node fails {}: {}", row.name(), row.detail()),
                  std::string(row.name()));
  }
  return Ok();
}

// One certificate for a call, however often its transaction is tried.
struct Membership::Certified {
  Issuer::State issuer;
  std::optional<ca::SerialUse> serial = std::nullopt;
  ca::Issued issued = {};

  v1::JoinReply Reply(v1::NodeRecord record) const {
    v1::JoinReply reply;
    reply.set_certificate(issued.certificate);
    reply.set_trusted(issuer.trusted);
    reply.set_cluster(issuer.authority->cluster());
    *reply.mutable_node() = std::move(record);
    return reply;
  }
};

Task<void> Membership::Certify(const ca::SigningRequest& wanted, std::string principal,
                               Certified& made, Deadline deadline) {
  if (made.serial) co_return Ok();
  v1::CertificateRecord certificate;
  certificate.set_name(wanted.name.Uri());
  certificate.set_principal(std::move(principal));
  certificate.set_ends_unix_ms(UnixMillis(clock_.Wall() + ca::kCertificateLife));
  auto serial = co_await ca::NewSerial(store_, std::move(certificate), clock_, deadline);
  if (!serial.ok()) co_return std::move(serial).error();
  made.serial = *std::move(serial);
  DSEC_CO_TRY(made.issued,
              made.issuer.authority->Issue(wanted, made.serial->serial, clock_.Wall()));
  co_return Ok();
}

// When the transaction has not come about; if nobody knows, nobody has the certificate either.
Task<void> Membership::TakeBack(const Certified& made) {
  if (!made.serial) co_return Ok();
  auto revoked = co_await store_.Revoke(made.serial->lease, Deadline::After(seconds(5)));
  // It ends by itself, a day later.
  if (!revoked.ok()) log::Warn("cluster.lease_left", {{"error", revoked.error()}});
  co_return Ok();
}

namespace {

void SetCertificate(v1::NodeRecord& record, const ca::SigningRequest& wanted,
                    const ca::Issued& issued, std::string previous) {
  record.set_certificate_sha256(issued.sha256);
  record.set_certificate_ends_unix_ms(issued.ends_unix_ms);
  record.set_previous_certificate_sha256(std::move(previous));
  record.set_key_sha256(wanted.key_sha256);
}

// Whether the one with this certificate is the machine that the record is about.
Result<void> CheckMachine(const v1::NodeRecord& record, const rpc::TlsPeer& peer) {
  const std::string& shown = peer.certificate_sha256;
  if (!shown.empty() &&
      (shown == record.certificate_sha256() || shown == record.previous_certificate_sha256())) {
    return Ok();
  }
  return Refuse(Code::kPermissionDenied, "join.replaced",
                fmt::format("the certificate of {} is not the one that node {} was given last: "
                            "another machine has joined under this id since",
                            peer.name.Uri(), record.node_id()));
}

}  // namespace

Task<v1::JoinReply> Membership::Join(v1::JoinRequest request, Deadline given) {
  const Deadline deadline = Bounded(given);
  DSEC_CO_TRY(const ca::SigningRequest wanted, ca::ParseRequest(request.signing_request()));
  v1::NodeRecord& word = *request.mutable_node();
  if (wanted.name.role == kEdgeRole) {
    if (word.node_id() != wanted.name.id) {
      co_return Refuse(Code::kInvalidArgument, "join.node",
                       "node.node_id is not the name that the signing request asks for",
                       "node.node_id");
    }
    word.set_epoch(1);
    word.set_state(v1::NODE_JOINED);
    DSEC_CO_TRY_VOID(CheckNodeRecord(word));
    DSEC_CO_TRY_VOID(CheckCapabilitiesOf(word));
  }
  Certified made{.issuer = issuer_.Get()};
  auto reply = co_await JoinWith(wanted, request.token(), std::move(word), made, deadline);
  if (!reply.ok()) (void)co_await TakeBack(made);
  co_return std::move(reply);
}

Task<v1::JoinReply> Membership::JoinWith(const ca::SigningRequest& wanted, std::string secret,
                                         v1::NodeRecord word, Certified& made, Deadline deadline) {
  const bool edge = wanted.name.role == kEdgeRole;
  for (int attempt = 0;; ++attempt) {
    auto used = co_await ca::UseJoinToken(store_, secret, wanted.key_sha256, wanted.name.Uri(),
                                          clock_, deadline);
    if (!used.ok()) co_return std::move(used).error();
    const v1::JoinTokenRecord& token = used->record;
    if (wanted.name.cluster != made.issuer.authority->cluster() ||
        wanted.name.role != token.role() || (!token.id().empty() && token.id() != wanted.name.id)) {
      co_return Refuse(Code::kPermissionDenied, "join.name",
                       fmt::format("the token is not for {}", wanted.name.Uri()));
    }
    v1::NodeRecord record;
    store::Revision version = 0;
    std::string previous;
    if (edge) {
      auto found = co_await Find(word.node_id(), deadline);
      if (!found.ok()) co_return std::move(found).error();
      version = found->version;
      record = word;
      record.set_joined_unix_ms(NowMs());
      if (found->record) {
        const v1::NodeRecord& old = *found->record;
        const bool same = old.key_sha256() == wanted.key_sha256;
        if (!same && old.state() != v1::NODE_DEAD && old.certificate_ends_unix_ms() > NowMs()) {
          co_return Refuse(
              Code::kAlreadyExists, "join.node_taken",
              fmt::format("node {} has joined already, from {}; its certificate ends at {} ms. A "
                          "node that will not come back is removed by `dsec cluster forget {}`",
                          old.node_id(), old.address(), old.certificate_ends_unix_ms(),
                          old.node_id()),
              "node.node_id");
        }
        record.set_epoch(old.epoch() + (same ? 0 : 1));
        record.set_joined_unix_ms(old.joined_unix_ms());
        // Dead until it announces this epoch: only then has it ended what it had.
        record.set_state(old.state());
        if (same) previous = old.certificate_sha256();
      }
    }
    auto certified = co_await Certify(wanted, token.made_by(), made, deadline);
    if (!certified.ok()) co_return std::move(certified).error();
    std::vector<store::Condition> conditions = {used->condition, made.serial->condition};
    std::vector<store::Write> writes = {used->write, made.serial->write};
    if (edge) {
      SetCertificate(record, wanted, made.issued, std::move(previous));
      record.set_changed_unix_ms(NowMs());
      DSEC_CO_TRY(std::string bytes, EncodeNodeRecord(record));
      conditions.push_back({NodeKey(record.node_id()), version});
      writes.push_back({NodeKey(record.node_id()), std::move(bytes), 0});
    }
    auto done = co_await store_.Commit(std::move(conditions), std::move(writes), deadline);
    if (!done.ok() && Conflict(done.error()) && attempt + 1 < kAttempts) continue;
    if (!done.ok()) co_return std::move(done).error();
    log::Info("cluster.joined", {{"name", wanted.name.Uri()},
                                 {"epoch", record.epoch()},
                                 {"certificate", made.issued.sha256}});
    co_return made.Reply(std::move(record));
  }
}

Task<v1::JoinReply> Membership::Renew(v1::CertifyRequest request, rpc::TlsPeer peer,
                                      Deadline given) {
  const Deadline deadline = Bounded(given);
  DSEC_CO_TRY(const ca::SigningRequest wanted, ca::ParseRequest(request.signing_request()));
  if (wanted.name != peer.name) {
    co_return Refuse(
        Code::kPermissionDenied, "join.name",
        fmt::format("{} asks for a certificate of {}", peer.name.Uri(), wanted.name.Uri()));
  }
  const int64_t from = peer.begins_unix_ms + (peer.ends_unix_ms - peer.begins_unix_ms) / 2;
  if (NowMs() < from) {
    co_return Refuse(Code::kFailedPrecondition, "join.renew_early",
                     fmt::format("the certificate of {} may be renewed from {} ms on, at half of "
                                 "its life",
                                 peer.name.Uri(), from));
  }
  Certified made{.issuer = issuer_.Get()};
  auto reply = co_await RenewWith(wanted, peer, made, deadline);
  if (!reply.ok()) (void)co_await TakeBack(made);
  co_return std::move(reply);
}

Task<v1::JoinReply> Membership::RenewWith(const ca::SigningRequest& wanted,
                                          const rpc::TlsPeer& peer, Certified& made,
                                          Deadline deadline) {
  const bool edge = wanted.name.role == kEdgeRole;
  for (int attempt = 0;; ++attempt) {
    v1::NodeRecord record;
    store::Revision version = 0;
    if (edge) {
      auto found = co_await Find(wanted.name.id, deadline);
      if (!found.ok()) co_return std::move(found).error();
      if (!found->record) {
        co_return Refuse(Code::kFailedPrecondition, "join.unknown_node",
                         fmt::format("node {} is not of this cluster any more", wanted.name.id));
      }
      version = found->version;
      record = *std::move(found->record);
      DSEC_CO_TRY_VOID(CheckMachine(record, peer));
    }
    auto certified = co_await Certify(wanted, wanted.name.Uri(), made, deadline);
    if (!certified.ok()) co_return std::move(certified).error();
    std::vector<store::Condition> conditions = {made.serial->condition};
    std::vector<store::Write> writes = {made.serial->write};
    if (edge) {
      // What the machine has if this answer is lost, too.
      SetCertificate(record, wanted, made.issued, peer.certificate_sha256);
      record.set_changed_unix_ms(NowMs());
      DSEC_CO_TRY(std::string bytes, EncodeNodeRecord(record));
      conditions.push_back({NodeKey(record.node_id()), version});
      writes.push_back({NodeKey(record.node_id()), std::move(bytes), 0});
    }
    auto done = co_await store_.Commit(std::move(conditions), std::move(writes), deadline);
    if (!done.ok() && Conflict(done.error()) && attempt + 1 < kAttempts) continue;
    if (!done.ok()) co_return std::move(done).error();
    co_return made.Reply(std::move(record));
  }
}

Task<v1::AnnounceReply> Membership::Announce(v1::AnnounceRequest request, rpc::TlsPeer peer,
                                             Deadline given) {
  const Deadline deadline = Bounded(given);
  v1::NodeRecord& word = *request.mutable_node();
  if (peer.name.role != kEdgeRole || peer.name.id != word.node_id()) {
    co_return Refuse(Code::kPermissionDenied, "join.name",
                     fmt::format("{} announces node {}", peer.name.Uri(),
                                 ParseNodeId(word.node_id()).ok() ? word.node_id() : "?"));
  }
  const uint64_t epoch = word.epoch();
  for (int attempt = 0;; ++attempt) {
    auto found = co_await Find(peer.name.id, deadline);
    if (!found.ok()) co_return std::move(found).error();
    if (!found->record) {
      co_return Refuse(Code::kFailedPrecondition, "join.unknown_node",
                       fmt::format("node {} is not of this cluster any more", peer.name.id));
    }
    v1::AnnounceReply reply;
    const v1::NodeRecord& old = *found->record;
    DSEC_CO_TRY_VOID(CheckMachine(old, peer));
    if (epoch < old.epoch()) {
      // It has to end what it had first.
      *reply.mutable_node() = old;
      co_return reply;
    }
    v1::NodeRecord record = old;
    CopyWord(word, record);
    if (record.state() == v1::NODE_DEAD) record.set_state(v1::NODE_JOINED);
    if (epoch > old.epoch() + kMaxEpochStep) {
      co_return Refuse(Code::kFailedPrecondition, "join.epoch",
                       fmt::format("node {} has epoch {}, its record {}: they may differ by {}",
                                   old.node_id(), epoch, old.epoch(), kMaxEpochStep),
                       "node.epoch");
    }
    if (epoch > old.epoch()) {
      // The store has come from an older copy: the node has ended all up to its own epoch.
      log::Warn("cluster.epoch_ahead",
                {{"node", record.node_id()}, {"node_epoch", epoch}, {"stored", old.epoch()}});
      record.set_epoch(epoch);
    }
    DSEC_CO_TRY(std::string same, EncodeNodeRecord(record));
    DSEC_CO_TRY(const std::string before, EncodeNodeRecord(old));
    if (same != before) {
      record.set_changed_unix_ms(NowMs());
      DSEC_CO_TRY(std::string bytes, EncodeNodeRecord(record));
      auto done = co_await store_.Put(NodeKey(record.node_id()), std::move(bytes), found->version,
                                      0, deadline);
      if (!done.ok() && Conflict(done.error()) && attempt + 1 < kAttempts) continue;
      if (!done.ok()) co_return std::move(done).error();
      log::Info(
          "cluster.announced",
          {{"node", record.node_id()}, {"address", record.address()}, {"epoch", record.epoch()}});
    }
    *reply.mutable_node() = std::move(record);
    co_return reply;
  }
}

namespace {

Result<void> CheckOperator(const rpc::TlsPeer& peer) {
  if (peer.name.role == kOperatorRole) return Ok();
  return Refuse(Code::kPermissionDenied, "join.operator",
                fmt::format("{} is no operator", peer.name.Uri()));
}

}  // namespace

Task<v1::MakeTokenReply> Membership::MakeToken(v1::MakeTokenRequest request, rpc::TlsPeer peer,
                                               Deadline given) {
  DSEC_CO_TRY_VOID(CheckOperator(peer));
  const Issuer::State issuer = issuer_.Get();
  const rpc::TlsName name{issuer.authority->cluster(), request.role(),
                          request.id().empty() ? "any" : request.id()};
  if ((request.role() != kEdgeRole && request.role() != "watcher") ||
      !rpc::ParseTlsName(name.Uri()).ok()) {
    co_return Refuse(Code::kInvalidArgument, "join.name",
                     "a token is for the role edge or watcher, and an id of [a-z0-9-]", "role");
  }
  v1::JoinTokenRecord record;
  record.set_role(request.role());
  record.set_id(request.id());
  record.set_made_by(peer.name.Uri());
  auto token = co_await ca::MakeJoinToken(store_, issuer.authority->cluster(),
                                          issuer.authority->fingerprint(), std::move(record),
                                          clock_, Bounded(given));
  if (!token.ok()) co_return std::move(token).error();
  log::Info("cluster.token_made", {{"role", request.role()}, {"by", peer.name.Uri()}});
  v1::MakeTokenReply reply;
  reply.set_token(ca::WriteJoinToken(*token));
  reply.set_ends_unix_ms(UnixMillis(clock_.Wall() + ca::kTokenLife));
  co_return reply;
}

Task<v1::NodesReply> Membership::Nodes(v1::Empty, rpc::TlsPeer peer, Deadline given) {
  DSEC_CO_TRY_VOID(CheckOperator(peer));
  const Deadline deadline = Bounded(given);
  v1::NodesReply reply;
  store::KeyRange range = store::KeyRange::Prefix(std::string(kNodePrefix));
  for (bool more = true; more;) {
    auto page = co_await store_.Range(range, 1000, deadline);
    if (!page.ok()) co_return std::move(page).error();
    for (const store::Entry& entry : page->entries) {
      DSEC_CO_TRY(auto record, ParseNodeRecord(entry.value));
      record.clear_capabilities();  // thousands of nodes fit a frame so
      *reply.add_nodes() = std::move(record);
    }
    more = page->more && !page->entries.empty();
    if (more) range.begin = page->entries.back().key + '\0';
  }
  co_return reply;
}

Task<v1::Empty> Membership::Forget(v1::ForgetNodeRequest request, rpc::TlsPeer peer,
                                   Deadline given) {
  DSEC_CO_TRY_VOID(CheckOperator(peer));
  DSEC_CO_TRY_VOID(ParseNodeId(request.node_id()));
  auto found = co_await Find(request.node_id(), Bounded(given));
  if (!found.ok()) co_return std::move(found).error();
  if (!found->record) {
    co_return Refuse(Code::kNotFound, "node.not_found",
                     fmt::format("there is no node {}", request.node_id()));
  }
  const std::string key = NodeKey(request.node_id());
  std::vector<store::Condition> conditions = {{key, found->version}};
  std::vector<store::Write> writes = {{key, std::nullopt, 0}};
  auto done = co_await store_.Commit(std::move(conditions), std::move(writes), Bounded(given));
  if (!done.ok()) co_return std::move(done).error();
  log::Warn("cluster.node_forgotten", {{"node", request.node_id()}, {"by", peer.name.Uri()}});
  co_return v1::Empty();
}

namespace {

// Errors travel as those of an edge do, so that their reasons arrive.
template <typename Reply>
std::string AnswerOf(const Result<Reply>& reply) {
  v1::EdgeAnswer answer;
  if (reply.ok()) {
    answer.set_body(reply->SerializeAsString());
  } else {
    *answer.mutable_error() = ToWire(reply.error());
  }
  return answer.SerializeAsString();
}

template <typename Request>
Result<Request> Read(const std::string& payload) {
  Request request;
  if (payload.size() > kMaxNodeRecordBytes + 2 * ca::kMaxRequestBytes ||
      !request.ParseFromString(payload)) {
    return Error(Code::kInvalidArgument, "request.invalid", "the request does not parse");
  }
  return request;
}

Error NoCertificate() {
  return Error(Code::kUnauthenticated, "join.certificate", "this call needs a certificate");
}

}  // namespace

template <typename Request, typename Reply>
void Membership::Serve(rpc::Server& server, const char* method,
                       Task<Reply> (Membership::*call)(Request, rpc::TlsPeer, Deadline)) {
  server.Register(std::string(kClusterService), method,
                  [this, call](std::string payload, rpc::CallContext context) -> Task<std::string> {
                    return [](Membership* self, auto then, std::string bytes,
                              rpc::CallContext with) -> Task<std::string> {
                      auto request = Read<Request>(bytes);
                      if (!request.ok()) co_return AnswerOf(Result<Reply>(request.error()));
                      if (!with.peer->tls) co_return AnswerOf(Result<Reply>(NoCertificate()));
                      auto reply = co_await (self->*then)(*std::move(request), *with.peer->tls,
                                                          with.deadline);
                      co_return AnswerOf(reply);
                    }(this, call, std::move(payload), std::move(context));
                  });
}

void Membership::Register(rpc::Server& server) {
  const std::string service(kClusterService);
  server.Register(
      service, "Join", [this](std::string payload, rpc::CallContext context) -> Task<std::string> {
        return [](Membership* self, std::string bytes, rpc::CallContext with) -> Task<std::string> {
          auto request = Read<v1::JoinRequest>(bytes);
          if (!request.ok()) {
            co_return AnswerOf(Result<v1::JoinReply>(request.error()));
          }
          auto reply = co_await self->Join(*std::move(request), with.deadline);
          if (!reply.ok()) {
            log::Warn("cluster.join_refused",
                      {{"peer", with.peer->address}, {"error", reply.error()}});
          }
          co_return AnswerOf(reply);
        }(this, std::move(payload), std::move(context));
      });
  Serve(server, "Renew", &Membership::Renew);
  Serve(server, "Announce", &Membership::Announce);
  Serve(server, "MakeToken", &Membership::MakeToken);
  Serve(server, "Nodes", &Membership::Nodes);
  Serve(server, "Forget", &Membership::Forget);
}

}  // namespace dsec::cluster
