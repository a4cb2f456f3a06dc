// SPDX-License-Identifier: Apache-2.0
#include "cluster/membership.h"

#include <gtest/gtest.h>

#include <optional>

#include "base/log.h"
#include "ca/key_files.h"
#include "cluster/member.h"
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
    membership_.emplace(*store_, *issuer_, clock_);
  }
  ~MembershipTest() override {
    if (server_) {
      (void)Run([](rpc::Server& server) -> Task<void> {
        co_await server.Stop(Deadline::After(seconds(0)));
        co_return Ok();
      }(*server_));
    }
    server_.reset();
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
  rpc::TlsPeer PeerOf(const std::string& role, const std::string& id) {
    return {{"prod", role, id}, std::string(64, 'a')};
  }
  Result<v1::AnnounceReply> Announce(const std::string& id, uint64_t epoch,
                                     const std::string& address = "127.0.0.1:7979") {
    v1::AnnounceRequest request;
    *request.mutable_node() = Word(id);
    request.mutable_node()->set_epoch(epoch);
    request.mutable_node()->set_address(address);
    return Run(membership_->Announce(request, PeerOf("edge", id), Soon()));
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
    auto request = ca::MakeRequest({"prod", "apiserver", "a1"});
    auto issued = issuer_->Get().authority->Issue(*ca::ParseRequest(request->request), 3,
                                                  Clock::System().Wall());
    holder_ = std::make_shared<rpc::TlsHolder>(*rpc::TlsContext::Create(
        {issued->certificate, request->key, material_.certificate, "prod"}));
    server_.emplace(shards_->at(0));
    membership_->Register(*server_);
    auto port = Run([](MembershipTest* self) -> Task<uint16_t> {
      rpc::TlsExpect expect{.roles = {"edge", "watcher", "operator"}, .anonymous = true};
      co_return self->server_->ListenTls("127.0.0.1", 0, self->holder_, expect);
    }(this));
    EXPECT_TRUE(port.ok());
    return *port;
  }

  TestClock clock_;
  std::optional<os::TempDir> dir_;
  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(1);
  std::unique_ptr<store::SqliteStore> store_;
  ca::KeyAndCertificate material_;
  std::optional<Issuer> issuer_;
  std::optional<Membership> membership_;
  ca::KeyAndRequest made_;
  std::shared_ptr<rpc::TlsHolder> holder_;
  std::optional<rpc::Server> server_;
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

TEST_F(MembershipTest, Join_OfADeadNodeTakesTheEpochOfItsDeath) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  auto record = Stored("n1");
  record.set_state(v1::NODE_DEAD);
  record.set_epoch(2);
  Write(record);
  auto again = Join(RequestOf(NewToken(), "n1"));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->node().epoch(), 2u);
  EXPECT_EQ(again->node().state(), v1::NODE_JOINED);
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
  EXPECT_EQ(Announce("n2", 1).error().reason(), "join.unknown_node");
  v1::AnnounceRequest forged;
  *forged.mutable_node() = Word("n1");
  EXPECT_EQ(Run(membership_->Announce(forged, PeerOf("edge", "n2"), Soon())).error().reason(),
            "join.name");
}

TEST_F(MembershipTest, Renew_IsForTheOwnNameAlone) {
  ASSERT_TRUE(Join(RequestOf(NewToken(), "n1")).ok());
  v1::CertifyRequest request;
  request.set_signing_request(ca::MakeRequest({"prod", "edge", "n1"})->request);
  auto renewed = Run(membership_->Renew(request, PeerOf("edge", "n1"), Soon()));
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
