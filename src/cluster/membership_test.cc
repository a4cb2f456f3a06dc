// SPDX-License-Identifier: Apache-2.0
#include "cluster/membership.h"

#include <gtest/gtest.h>

#include <optional>

#include "base/log.h"
#include "ca/key_files.h"
#include "cluster/call_error.h"
#include "cluster/member.h"
#include "cluster/testing/lease_count.h"
#include "os/file.h"
#include "rpc/channel.h"
#include "runtime/shards.h"
#include "store/sqlite_store.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;
using std::chrono::seconds;

Deadline Soon() { return Deadline::After(seconds(20)); }

class TestClock final : public Clock {
 public:
  MonoTime Mono() const override { return Clock::System().Mono(); }
  WallTime Wall() const override { return Clock::System().Wall() + std::chrono::milliseconds(ms); }
  std::atomic<int64_t> ms = 0;
};

// A gate without sandboxes.
class FakeGate final : public EpochGate {
 public:
  Task<void> Check(uint64_t epoch, Deadline) override {
    if (epoch < own) co_return StaleEpochError(epoch, own);
    own = epoch;
    co_return Ok();
  }
  bool Serves(uint64_t epoch) const override { return epoch == own; }
  uint64_t epoch() const override { return own; }
  uint64_t own = 0;
};

class MembershipTest : public ::testing::Test {
 public:
  MembershipTest() {
    log::Options quiet;
    quiet.level = log::Level::kError;
    log::Configure(std::move(quiet));
    dir_.emplace(*os::TempDir::Create("dsec-member-"));
    store_ = *store::SqliteStore::Open(dir_->path() + "/control.db", shards_->at(0), clock_);
    material_ = *ca::MakeAuthority("prod", clock_.Wall());
    issuer_.emplace(Issuer::State{*ca::Authority::Load(material_), material_.certificate});
    leases_.emplace(*store_);
    membership_.emplace(*leases_, *issuer_, clock_);
  }
  ~MembershipTest() override {
    if (server_) {
      (void)Run([](rpc::Server& server) -> Task<void> {
        co_await server.Stop(Deadline::After(seconds(0)));
        co_return Ok();
      }(*server_));
    }
    if (broken_) {
      (void)Run([](rpc::Server& server) -> Task<void> {
        co_await server.Stop(Deadline::After(seconds(0)));
        co_return Ok();
      }(*broken_));
    }
    server_.reset();
    broken_.reset();
    store_.reset();
    shards_.reset();
  }
  template <typename T>
  Result<T> Run(Task<T> task) {
    return runtime::BlockOn(shards_->at(0), std::move(task));
  }

  ca::JoinToken NewToken(const std::string& role = "edge", const std::string& id = "") {
    v1::JoinTokenRecord record;
    record.set_role(role);
    record.set_id(id);
    auto token = Run(ca::MakeJoinToken(*store_, "prod", issuer_->Get().authority->fingerprint(),
                                       record, clock_, Soon()));
    EXPECT_TRUE(token.ok());
    return *token;
  }
  static v1::NodeRecord Word(const std::string& id) {
    v1::NodeRecord record;
    record.set_node_id(id);
    record.set_address("127.0.0.1:7979");
    record.set_epoch(1);
    record.set_state(v1::NODE_JOINED);
    return record;
  }
  v1::JoinRequest RequestOf(const ca::JoinToken& token, const std::string& id,
                            const std::string& role = "edge") {
    made_ = *ca::MakeRequest({"prod", role, id});
    v1::JoinRequest request;
    request.set_token(token.secret);
    request.set_signing_request(made_.request);
    *request.mutable_node() = Word(id);
    return request;
  }
  Result<v1::JoinReply> Join(const v1::JoinRequest& request) {
    return Run(membership_->Join(request, Soon()));
  }
  static rpc::TlsPeer PeerOf(const std::string& role, const std::string& id) {
    return {{"prod", role, id}, std::string(64, 'a')};
  }
  // With the certificate of a reply.
  static rpc::TlsPeer PeerWith(const v1::JoinReply& reply) {
    const auto view = ca::LookAt(reply.certificate());
    EXPECT_TRUE(view.ok());
    return {view->name, view->sha256, view->begins_unix_ms, view->ends_unix_ms};
  }
  // With the certificate that the node was given last.
  rpc::TlsPeer MachineOf(const std::string& id) {
    return {{"prod", "edge", id}, Stored(id).certificate_sha256()};
  }
  Result<v1::AnnounceReply> Announce(const rpc::TlsPeer& peer, uint64_t epoch,
                                     const std::string& address = "127.0.0.1:7979") {
    v1::AnnounceRequest request;
    *request.mutable_node() = Word(peer.name.id);
    request.mutable_node()->set_epoch(epoch);
    request.mutable_node()->set_address(address);
    return Run(membership_->Announce(request, peer, Soon()));
  }
  Result<v1::AnnounceReply> Announce(const std::string& id, uint64_t epoch,
                                     const std::string& address = "127.0.0.1:7979") {
    return Announce(MachineOf(id), epoch, address);
  }
  Result<v1::JoinReply> Renew(const rpc::TlsPeer& peer) {
    v1::CertifyRequest request;
    request.set_signing_request(ca::MakeRequest(peer.name)->request);
    return Run(membership_->Renew(request, peer, Soon()));
  }
  void LetHalfALifePass() {
    clock_.ms += std::chrono::milliseconds(ca::kCertificateLife).count() / 2;
  }
  void Kill(const std::string& id, uint64_t epoch) {
    auto record = Stored(id);
    record.set_state(v1::NODE_DEAD);
    record.set_epoch(epoch);
    Write(record);
  }
  size_t Serials() {
    auto serials = Run(store_->Range(store::KeyRange::Prefix("ca/serial/"), 100, Soon()));
    EXPECT_TRUE(serials.ok());
    return serials->entries.size();
  }
  v1::NodeRecord Stored(const std::string& id) {
    auto entry = Run(store_->Get(NodeKey(id), Soon()));
    EXPECT_TRUE(entry.ok() && entry->has_value());
    return *ParseNodeRecord((*entry)->value);
  }
  void Write(const v1::NodeRecord& record) {
    ASSERT_TRUE(Run(store_->Put(NodeKey(record.node_id()), *EncodeNodeRecord(record), std::nullopt,
                                0, Soon()))
                    .ok());
  }
  // The door of an apiserver.
  uint16_t Serve() {
    server_.emplace(shards_->at(0));
    membership_->Register(*server_);
    return Listen(*server_);
  }
  uint16_t Listen(rpc::Server& server) {
    auto request = ca::MakeRequest({"prod", "apiserver", "a1"});
    auto issued = issuer_->Get().authority->Issue(*ca::ParseRequest(request->request), 3,
                                                  Clock::System().Wall());
    holder_ = std::make_shared<rpc::TlsHolder>(*rpc::TlsContext::Create(
        {issued->certificate, request->key, material_.certificate, "prod"}));
    auto port = Run([](MembershipTest* self, rpc::Server& on) -> Task<uint16_t> {
      rpc::TlsExpect expect{.roles = {"edge", "watcher", "operator"}, .anonymous = true};
      co_return on.ListenTls("127.0.0.1", 0, self->holder_, expect);
    }(this, server));
    EXPECT_TRUE(port.ok());
    return *port;
  }

  TestClock clock_;
  std::optional<os::TempDir> dir_;
  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(1);
  std::unique_ptr<store::SqliteStore> store_;
  std::optional<testing::LeaseCount> leases_;
  ca::KeyAndCertificate material_;
  std::optional<Issuer> issuer_;
  std::optional<Membership> membership_;
  ca::KeyAndRequest made_;
  std::shared_ptr<rpc::TlsHolder> holder_;
  std::optional<rpc::Server> server_;
  std::optional<rpc::Server> broken_;
};

TEST_F(MembershipTest, Join_WritesNodeSerialAndTokenAtOnce) {
  auto reply = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_EQ(reply->cluster(), "prod");
  EXPECT_EQ(reply->node().epoch(), 1u);
  const auto view = ca::LookAt(reply->certificate());
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->name.Uri(), "dsec://prod/edge/n1");
  const auto stored = Stored("n1");
  EXPECT_EQ(stored.certificate_sha256(), view->sha256);
  EXPECT_EQ(stored.state(), v1::NODE_JOINED);
  auto serials = Run(store_->Range(store::KeyRange::Prefix("ca/serial/"), 10, Soon()));
  ASSERT_EQ(serials->entries.size(), 1u);
}

TEST_F(MembershipTest, Join_RepeatsForALostAnswerAlone) {
  const auto token = NewToken();
  const auto request = RequestOf(token, "n1");
  auto first = Join(request);
  ASSERT_TRUE(first.ok());
  auto again = Join(request);  // the answer was lost
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(again->node().epoch(), 1u);
  EXPECT_EQ(Stored("n1").certificate_sha256(), ca::LookAt(again->certificate())->sha256);
  auto stolen = Join(RequestOf(token, "n1"));  // another key
  ASSERT_FALSE(stolen.ok());
  EXPECT_EQ(stolen.error().reason(), "join.token");
}

TEST_F(MembershipTest, Join_RefusesWhatTheTokenIsNotFor) {
  EXPECT_EQ(Join(RequestOf(NewToken("edge", "n1"), "n2")).error().reason(), "join.name");
  EXPECT_EQ(Join(RequestOf(NewToken("watcher"), "n2")).error().reason(), "join.name");
  auto other = RequestOf(NewToken(), "n1");
  other.mutable_node()->set_node_id("n2");
  EXPECT_EQ(Join(other).error().reason(), "join.node");
  auto bad = RequestOf(NewToken(), "n1");
  bad.mutable_node()->set_address("nowhere");
  EXPECT_EQ(Join(bad).error().field(), "address");
  bad = RequestOf(NewToken(), "n1");
  bad.set_signing_request("x");
  EXPECT_EQ(Join(bad).error().reason(), "ca.request");
  // None of that has used a token up or left a node.
  auto nodes = Run(store_->Range(store::KeyRange::Prefix("node/"), 10, Soon()));
  EXPECT_TRUE(nodes->entries.empty());
  EXPECT_TRUE(Join(RequestOf(NewToken("watcher"), "w1", "watcher")).ok());
}

TEST_F(MembershipTest, Join_NamesTheRowThatTheNodeFails) {
  auto request = RequestOf(NewToken(), "n1");
  auto* row = request.mutable_node()->add_capabilities();
  row->set_name("overlayfs");
  row->set_detail("the kernel has no overlayfs");
  auto refused = Join(request);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason(), "join.capability");
  EXPECT_NE(refused.error().message().find("overlayfs"), std::string::npos);
  row->set_used("fuse");  // missing, but replaced
  EXPECT_TRUE(Join(request).ok());
}

TEST_F(MembershipTest, Join_TakenIdIsRefusedUntilItsCertificateEnds) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  auto taken = Join(RequestOf(NewToken(), "n1"));
  ASSERT_FALSE(taken.ok());
  EXPECT_EQ(taken.error().reason(), "join.node_taken");
  clock_.ms += std::chrono::milliseconds(std::chrono::hours(25)).count();
  auto later = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(later.ok()) << later.error().ToString();
  EXPECT_EQ(later->node().epoch(), 2u);  // what the id had before has ended
}

TEST_F(MembershipTest, Join_OfADeadNodeIsDeadUntilItAnnounces) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  Kill("n1", 2);
  auto again = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->node().epoch(), 3u);  // another key: the machine before may be told 2
  EXPECT_EQ(again->node().state(), v1::NODE_DEAD);
  ASSERT_TRUE(Announce("n1", 2).ok());
  EXPECT_EQ(Stored("n1").state(), v1::NODE_DEAD);
  ASSERT_TRUE(Announce("n1", 3).ok());
  EXPECT_EQ(Stored("n1").state(), v1::NODE_JOINED);
}

TEST_F(MembershipTest, ReplacedMachine_HasNoPartInTheNodeAnyMore) {
  auto token = NewToken();
  const auto request = RequestOf(token, "n1");
  const auto first = Join(request);
  ASSERT_TRUE(first.ok());
  Kill("n1", 2);
  const auto second = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE(Announce(PeerWith(*second), 3, "10.0.0.2:1").ok());
  // The first one wakes up.
  for (const uint64_t epoch : {1u, 2u, 3u, 4u}) {
    auto announced = Announce(PeerWith(*first), epoch, "10.0.0.1:1");
    ASSERT_FALSE(announced.ok());
    EXPECT_EQ(announced.error().reason(), "join.replaced");
  }
  LetHalfALifePass();
  EXPECT_EQ(Renew(PeerWith(*first)).error().reason(), "join.replaced");
  EXPECT_EQ(Stored("n1").address(), "10.0.0.2:1");
  EXPECT_EQ(Stored("n1").epoch(), 3u);
  EXPECT_TRUE(Renew(PeerWith(*second)).ok());
}

TEST_F(MembershipTest, UsedToken_DoesNotTakeTheNodeBack) {
  const auto request = RequestOf(NewToken(), "n1");
  ASSERT_TRUE(Join(request).ok());
  Kill("n1", 2);
  const auto second = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE(Announce(PeerWith(*second), 3).ok());
  auto back = Join(request);  // its ten minutes are not over
  ASSERT_FALSE(back.ok());
  EXPECT_EQ(back.error().reason(), "join.node_taken");
  EXPECT_EQ(Stored("n1").certificate_sha256(), PeerWith(*second).certificate_sha256);
}

TEST_F(MembershipTest, Join_WithTheSameKeyIsTheSameMachine) {
  const auto request = RequestOf(NewToken(), "n1");
  ASSERT_TRUE(Join(request).ok());
  Kill("n1", 2);
  auto again = Join(request);  // the answer was lost, and death came between
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_EQ(again->node().epoch(), 2u);
  EXPECT_EQ(again->node().state(), v1::NODE_DEAD);
}

TEST_F(MembershipTest, Renew_GoesOnWhenItsAnswerWasLost) {
  const auto joined = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(joined.ok());
  LetHalfALifePass();
  const auto peer = PeerWith(*joined);
  ASSERT_TRUE(Renew(peer).ok());
  EXPECT_TRUE(Announce(peer, 1).ok());
  const auto again = Renew(peer);
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_TRUE(Announce(peer, 1).ok());
  EXPECT_TRUE(Announce(PeerWith(*again), 1).ok());
  EXPECT_EQ(Stored("n1").epoch(), 1u);
}

TEST_F(MembershipTest, Renew_IsRefusedBeforeHalfOfTheLife) {
  const auto joined = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(joined.ok());
  const int before = leases_->granted;
  auto early = Renew(PeerWith(*joined));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().reason(), "join.renew_early");
  EXPECT_EQ(leases_->granted, before);
  LetHalfALifePass();
  EXPECT_TRUE(Renew(PeerWith(*joined)).ok());
}

TEST_F(MembershipTest, Certificates_TakeOneLeaseACallAndNoneWithoutOne) {
  const auto joined = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(joined.ok());
  LetHalfALifePass();
  leases_->granted = 0;
  leases_->conflicts = 3;
  ASSERT_TRUE(Renew(PeerWith(*joined)).ok());
  EXPECT_EQ(leases_->granted, 1);
  EXPECT_EQ(leases_->revoked, 0);
  leases_->granted = 0;
  leases_->conflicts = 100;
  EXPECT_FALSE(Renew(PeerWith(*joined)).ok());
  EXPECT_EQ(leases_->granted, 1);
  EXPECT_EQ(leases_->revoked, 1);
  leases_->conflicts = 0;
  const auto stranger = PeerOf("edge", "n9");
  EXPECT_EQ(Renew(stranger).error().reason(), "join.unknown_node");
  const auto token = NewToken();
  leases_->granted = 0;
  EXPECT_EQ(Join(RequestOf(token, "n1")).error().reason(), "join.node_taken");
  EXPECT_EQ(leases_->granted, 0);
  EXPECT_EQ(Serials(), 2u);
}

TEST_F(MembershipTest, Announce_IsBelievedAFewEpochsAhead) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  ASSERT_TRUE(Announce("n1", 1 + kMaxEpochStep).ok());
  EXPECT_EQ(Stored("n1").epoch(), 1 + kMaxEpochStep);
  for (const uint64_t epoch : {2 + 2 * kMaxEpochStep, kMaxEpoch, UINT64_MAX}) {
    auto refused = Announce("n1", epoch);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().reason(), "join.epoch");
  }
  EXPECT_EQ(Stored("n1").epoch(), 1 + kMaxEpochStep);
}

TEST_F(MembershipTest, Announce_FollowsTheEpoch) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  auto moved = Announce("n1", 1, "10.0.0.9:1");
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(Stored("n1").address(), "10.0.0.9:1");
  auto record = Stored("n1");
  record.set_state(v1::NODE_CORDONED);
  Write(record);
  ASSERT_TRUE(Announce("n1", 1).ok());
  EXPECT_EQ(Stored("n1").state(), v1::NODE_CORDONED);  // an operator's word stays
  record = Stored("n1");
  record.set_state(v1::NODE_DEAD);
  record.set_epoch(2);
  Write(record);
  auto old = Announce("n1", 1);
  ASSERT_TRUE(old.ok());
  EXPECT_EQ(old->node().epoch(), 2u);
  EXPECT_EQ(Stored("n1").state(), v1::NODE_DEAD);  // it has not ended what it had
  ASSERT_TRUE(Announce("n1", 2).ok());
  EXPECT_EQ(Stored("n1").state(), v1::NODE_JOINED);
  EXPECT_EQ(Announce(PeerOf("edge", "n2"), 1).error().reason(), "join.unknown_node");
  v1::AnnounceRequest forged;
  *forged.mutable_node() = Word("n1");
  EXPECT_EQ(Run(membership_->Announce(forged, PeerOf("edge", "n2"), Soon())).error().reason(),
            "join.name");
}

TEST_F(MembershipTest, Renew_IsForTheOwnNameAlone) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  v1::CertifyRequest request;
  request.set_signing_request(ca::MakeRequest({"prod", "edge", "n1"})->request);
  auto renewed = Run(membership_->Renew(request, MachineOf("n1"), Soon()));
  ASSERT_TRUE(renewed.ok());
  EXPECT_EQ(Stored("n1").certificate_sha256(), ca::LookAt(renewed->certificate())->sha256);
  auto other = Run(membership_->Renew(request, PeerOf("edge", "n2"), Soon()));
  EXPECT_EQ(other.error().reason(), "join.name");
}

TEST_F(MembershipTest, Tokens_AreForOperators) {
  v1::MakeTokenRequest request;
  request.set_role("edge");
  auto made = Run(membership_->MakeToken(request, PeerOf("operator", "cli"), Soon()));
  ASSERT_TRUE(made.ok());
  EXPECT_TRUE(ca::ParseJoinToken(made->token()).ok());
  EXPECT_EQ(Run(membership_->MakeToken(request, PeerOf("edge", "n1"), Soon())).error().reason(),
            "join.operator");
  request.set_role("apiserver");
  EXPECT_EQ(Run(membership_->MakeToken(request, PeerOf("operator", "cli"), Soon())).error().field(),
            "role");
}

TEST_F(MembershipTest, Member_JoinsAnnouncesAndRenewsOverTls) {
  MemberOptions options;
  options.folder = dir_->path() + "/tls";
  options.role = "edge";
  options.id = "n1";
  options.apiservers = {"127.0.0.1:1", fmt::format("127.0.0.1:{}", Serve())};
  const auto word = []() -> Task<v1::NodeRecord> { co_return Word("n1"); };
  auto none = Run(Member::Open(shards_->at(0), options, word, Soon()));
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().reason(), "member.no_identity");
  // A token of another cluster's CA: nothing is told to whoever answers.
  auto foreign = NewToken();
  foreign.ca_sha256 = std::string(64, '0');
  options.join_token = ca::WriteJoinToken(foreign);
  auto refused = Run(Member::Open(shards_->at(0), options, word, Soon()));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find("rpc.tls_untrusted"), std::string::npos);

  options.join_token = ca::WriteJoinToken(NewToken());
  auto member = Run(Member::Open(shards_->at(0), options, word, Soon()));
  ASSERT_TRUE(member.ok()) << member.error().ToString();
  EXPECT_EQ((*member)->name().Uri(), "dsec://prod/edge/n1");
  const auto before = ca::LoadIdentity(options.folder);
  ASSERT_TRUE(before.ok());

  auto record = Stored("n1");
  record.set_state(v1::NODE_DEAD);
  record.set_epoch(5);
  Write(record);
  FakeGate gate;
  (*member)->Start(&gate);
  auto announced = Run((*member)->Announce(Soon()));
  ASSERT_TRUE(announced.ok()) << announced.error().ToString();
  EXPECT_EQ(gate.epoch(), 5u);
  EXPECT_EQ(Stored("n1").state(), v1::NODE_JOINED);

  LetHalfALifePass();
  auto renewed = Run((*member)->Renew(Soon()));
  ASSERT_TRUE(renewed.ok()) << renewed.error().ToString();
  const auto after = ca::LoadIdentity(options.folder);
  ASSERT_TRUE(after.ok());
  EXPECT_NE(after->own.key, before->own.key);
  EXPECT_EQ(Stored("n1").certificate_sha256(), after->view.sha256);
  (void)Run([](Member& of) -> Task<void> {
    co_await of.Stop();
    co_return Ok();
  }(**member));

  // The next start needs no token; another name's files are not taken.
  options.join_token.clear();
  EXPECT_TRUE(Run(Member::Open(shards_->at(0), options, word, Soon())).ok());
  options.id = "n2";
  EXPECT_EQ(Run(Member::Open(shards_->at(0), options, word, Soon())).error().reason(),
            "member.other_name");
}

TEST_F(MembershipTest, Member_KilledBeforeItsAnswerJoinsAsTheSameMachine) {
  MemberOptions options;
  options.folder = dir_->path() + "/tls";
  options.role = "edge";
  options.id = "n1";
  options.apiservers = {"127.0.0.1:1"};
  const auto token = NewToken();
  options.join_token = ca::WriteJoinToken(token);
  const auto word = []() -> Task<v1::NodeRecord> { co_return Word("n1"); };
  // Its request went out, or so it believes: nobody answers.
  EXPECT_EQ(Run(Member::Open(shards_->at(0), options, word, Soon())).error().reason(),
            "member.no_apiserver");
  // The request that it had made arrives, and its answer does not.
  const auto made = ca::JoiningRequest(options.folder, {"prod", "edge", "n1"});
  ASSERT_TRUE(made.ok());
  v1::JoinRequest request;
  request.set_token(token.secret);
  request.set_signing_request(made->request);
  *request.mutable_node() = Word("n1");
  ASSERT_TRUE(Join(request).ok());
  options.apiservers = {fmt::format("127.0.0.1:{}", Serve())};
  auto member = Run(Member::Open(shards_->at(0), options, word, Soon()));
  ASSERT_TRUE(member.ok()) << member.error().ToString();
  EXPECT_EQ(Stored("n1").epoch(), 1u);
  EXPECT_EQ(ca::LoadIdentity(options.folder)->own.key, made->key);
  // The key of the next join is another one.
  EXPECT_NE(ca::JoiningRequest(options.folder, {"prod", "edge", "n1"})->key, made->key);
}

TEST_F(MembershipTest, Member_GoesOnToTheNextApiserver) {
  broken_.emplace(shards_->at(0));
  std::atomic<int> asked = 0;
  v1::EdgeAnswer answer;
  broken_->Register(std::string(kClusterService), "Join",
                    [&](std::string, rpc::CallContext) -> Task<std::string> {
                      ++asked;
                      co_return answer.SerializeAsString();
                    });
  const uint16_t broken = Listen(*broken_);
  const uint16_t good = Serve();
  const auto word = []() -> Task<v1::NodeRecord> { co_return Word("n1"); };
  int folder = 0;
  const auto open = [&](Code code) {
    answer.Clear();
    *answer.mutable_error() = ToWire(Error(code, "store.away", "no store"));
    if (auto entry = Run(store_->Get(NodeKey("n1"), Soon())); entry.ok() && entry->has_value()) {
      Kill("n1", 1);
    }
    MemberOptions options;
    options.folder = fmt::format("{}/tls{}", dir_->path(), folder++);
    options.role = "edge";
    options.id = "n1";
    options.apiservers = {fmt::format("127.0.0.1:{}", broken), fmt::format("127.0.0.1:{}", good)};
    options.join_token = ca::WriteJoinToken(NewToken());
    auto member = Run(Member::Open(shards_->at(0), options, word, Soon()));
    return member.ok() ? std::string() : std::string(member.error().reason());
  };
  EXPECT_EQ(open(Code::kUnavailable), "");
  EXPECT_EQ(open(Code::kInternal), "");
  EXPECT_EQ(open(Code::kDeadlineExceeded), "");
  EXPECT_EQ(asked, 3);
  // A refusal is the answer.
  EXPECT_EQ(open(Code::kPermissionDenied), "store.away");
  EXPECT_EQ(asked, 4);
}

TEST_F(MembershipTest, WithoutACertificate_OnlyJoinIsServed) {
  const uint16_t port = Serve();
  auto answer = Run([](MembershipTest* self, uint16_t at) -> Task<std::string> {
    auto channel = co_await rpc::Channel::ConnectTls(
        self->shards_->at(0), "127.0.0.1", at, *rpc::TlsContext::Create({}),
        {.roles = {"apiserver"}, .pin = self->issuer_->Get().authority->fingerprint()}, Soon());
    if (!channel.ok()) co_return std::move(channel).error();
    auto got = co_await (*channel)->CallRaw(kClusterService, "Nodes", "", Soon());
    co_return std::move(got);
  }(this, port));
  ASSERT_TRUE(answer.ok()) << answer.error().ToString();
  v1::EdgeAnswer parsed;
  ASSERT_TRUE(parsed.ParseFromString(*answer));
  EXPECT_EQ(parsed.error().reason(), "join.certificate");
}

}  // namespace
}  // namespace dsec::cluster
