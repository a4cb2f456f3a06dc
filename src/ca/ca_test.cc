// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "ca/authority.h"
#include "ca/join_token.h"
#include "ca/key_files.h"
#include "ca/openssl.h"
#include "os/file.h"
#include "runtime/shards.h"
#include "store/sqlite_store.h"

namespace dsec::ca {
namespace {

using runtime::Deadline;

Deadline Soon() { return Deadline::After(std::chrono::seconds(20)); }

std::shared_ptr<const Authority> NewAuthority() {
  auto made = MakeAuthority("prod", Clock::System().Wall());
  EXPECT_TRUE(made.ok()) << made.error().ToString();
  auto loaded = Authority::Load(*made);
  EXPECT_TRUE(loaded.ok()) << loaded.error().ToString();
  return *loaded;
}

SigningRequest RequestFor(const rpc::TlsName& name) {
  auto made = MakeRequest(name);
  EXPECT_TRUE(made.ok()) << made.error().ToString();
  auto parsed = ParseRequest(made->request);
  EXPECT_TRUE(parsed.ok()) << parsed.error().ToString();
  return *std::move(parsed);
}

TEST(Authority, IssuesWhatARequestAsksFor) {
  const auto authority = NewAuthority();
  EXPECT_EQ(authority->cluster(), "prod");
  const rpc::TlsName name{"prod", "edge", "n1"};
  const auto now = Clock::System().Wall();
  auto issued = authority->Issue(RequestFor(name), 7, now);
  ASSERT_TRUE(issued.ok()) << issued.error().ToString();
  auto view = LookAt(issued->certificate);
  ASSERT_TRUE(view.ok()) << view.error().ToString();
  EXPECT_EQ(view->name, name);
  EXPECT_EQ(view->sha256, issued->sha256);
  EXPECT_NEAR(static_cast<double>(view->ends_unix_ms - UnixMillis(now)), 24.0 * 3600 * 1000, 2000);
  EXPECT_GT(view->RenewUnixMs(), UnixMillis(now) + 15 * 3600 * 1000);
  EXPECT_LT(view->RenewUnixMs(), UnixMillis(now) + 17 * 3600 * 1000);
}

TEST(Authority, RefusesOtherNames) {
  const auto authority = NewAuthority();
  for (const rpc::TlsName& name :
       {rpc::TlsName{"other", "edge", "n1"}, rpc::TlsName{"prod", "ca", "1"}}) {
    auto issued = authority->Issue(RequestFor(name), 7, Clock::System().Wall());
    ASSERT_FALSE(issued.ok());
    EXPECT_EQ(issued.error().reason(), "ca.name");
  }
  auto late = authority->Issue(RequestFor({"prod", "edge", "n1"}), 7,
                               Clock::System().Wall() + kAuthorityLife);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().reason(), "ca.ended");
}

TEST(Authority, LoadsOnlyAPairOfACa) {
  auto one = MakeAuthority("prod", Clock::System().Wall());
  auto two = MakeAuthority("prod", Clock::System().Wall());
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(Authority::Load({one->key, two->certificate}).error().field(), "key");
  EXPECT_EQ(Authority::Load({"x", one->certificate}).error().field(), "key");
  EXPECT_EQ(Authority::Load({one->key, "x"}).error().field(), "certificate");
  // A daemon's certificate makes no CA.
  auto loaded = Authority::Load(*one);
  auto request = MakeRequest({"prod", "edge", "n1"});
  ASSERT_TRUE(loaded.ok() && request.ok());
  auto parsed = ParseRequest(request->request);
  ASSERT_TRUE(parsed.ok());
  auto issued = (*loaded)->Issue(*parsed, 1, Clock::System().Wall());
  ASSERT_TRUE(issued.ok());
  EXPECT_EQ(Authority::Load({request->key, issued->certificate}).error().field(), "certificate");
  EXPECT_EQ(MakeAuthority("Not A Name", Clock::System().Wall()).error().reason(), "ca.name");
}

TEST(SigningRequest, HostileOnesAreRefused) {
  auto made = MakeRequest({"prod", "edge", "n1"});
  ASSERT_TRUE(made.ok());
  const std::string good = made->request;
  const auto refused = [](const std::string& der) {
    auto parsed = ParseRequest(der);
    EXPECT_FALSE(parsed.ok());
    return parsed.ok() ? std::string() : std::string(parsed.error().reason());
  };
  EXPECT_EQ(refused(""), "ca.request");
  EXPECT_EQ(refused(std::string(kMaxRequestBytes + 1, '0')), "ca.request");
  EXPECT_EQ(refused(good + "x"), "ca.request");
  EXPECT_EQ(refused(good.substr(0, good.size() - 1)), "ca.request");
  std::string other_name = good;
  const size_t at = other_name.find("n1");
  ASSERT_NE(at, std::string::npos);
  other_name[at + 1] = '2';
  EXPECT_EQ(refused(other_name), "ca.request");  // its signature does not fit
  std::string other_signature = good;
  other_signature.back() = static_cast<char>(other_signature.back() ^ 1);
  EXPECT_EQ(refused(other_signature), "ca.request");
}

// A request made by hand: other keys, no name.
std::string RequestWithKey(EVP_PKEY* key) {
  X509_REQ* request = X509_REQ_new();
  X509_REQ_set_version(request, 0);
  X509_REQ_set_pubkey(request, key);
  X509_REQ_sign(request, key, EVP_sha256());
  unsigned char* der = nullptr;
  const int size = i2d_X509_REQ(request, &der);
  std::string out(reinterpret_cast<char*>(der), static_cast<size_t>(size));
  OPENSSL_free(der);
  X509_REQ_free(request);
  return out;
}

TEST(SigningRequest, OtherKeysAndNoNameAreRefused) {
  EVP_PKEY* weak = EVP_RSA_gen(1024);
  auto rsa = ParseRequest(RequestWithKey(weak));
  EVP_PKEY_free(weak);
  ASSERT_FALSE(rsa.ok());
  EXPECT_NE(rsa.error().message().find("P-256"), std::string::npos);
  EVP_PKEY* curve = EVP_EC_gen("P-256");
  auto nameless = ParseRequest(RequestWithKey(curve));
  EVP_PKEY_free(curve);
  ASSERT_FALSE(nameless.ok());
  EXPECT_NE(nameless.error().message().find("name"), std::string::npos);
}

TEST(KeyFiles, AreWholeAndPrivate) {
  auto dir = os::TempDir::Create("dsec-ca-");
  ASSERT_TRUE(dir.ok());
  const std::string folder = dir->path() + "/ca";
  ASSERT_TRUE(InitAuthority(folder, "prod", Clock::System()).ok());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    struct stat info{};
    ASSERT_EQ(stat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0600u) << entry.path();
  }
  EXPECT_EQ(InitAuthority(folder, "prod", Clock::System()).error().reason(), "ca.exists");
  ASSERT_TRUE(LoadAuthority(folder).ok());
  ASSERT_EQ(chmod((folder + "/ca.key").c_str(), 0644), 0);
  EXPECT_EQ(LoadAuthority(folder).error().reason(), "ca.file_mode");
}

class MovedClock final : public Clock {
 public:
  MonoTime Mono() const override { return Clock::System().Mono(); }
  WallTime Wall() const override { return Clock::System().Wall() + by; }
  std::chrono::minutes by{0};
};

TEST(KeyFiles, AuthorityChangesInTwoStepsWithADayBetween) {
  auto dir = os::TempDir::Create("dsec-ca-");
  ASSERT_TRUE(dir.ok());
  const std::string folder = dir->path() + "/ca";
  MovedClock clock;
  ASSERT_TRUE(InitAuthority(folder, "prod", clock).ok());
  const auto first = LoadAuthority(folder);
  EXPECT_EQ(SwitchAuthority(folder, clock).error().reason(), "ca.next");
  auto added = AddAuthority(folder, clock);
  ASSERT_TRUE(added.ok()) << added.error().ToString();
  // Trusted, and signs nothing.
  auto between = LoadAuthority(folder);
  ASSERT_TRUE(between.ok());
  EXPECT_EQ(between->authority.certificate, first->authority.certificate);
  EXPECT_EQ(between->authority.key, first->authority.key);
  EXPECT_NE(between->trusted, first->trusted);
  EXPECT_EQ(LookAt(between->trusted)->sha256, *added);
  EXPECT_EQ(AddAuthority(folder, clock).error().reason(), "ca.next");
  clock.by = std::chrono::minutes(kCertificateLife);
  EXPECT_EQ(SwitchAuthority(folder, clock).error().reason(), "ca.too_early");
  EXPECT_EQ(LoadAuthority(folder)->authority.key, first->authority.key);
  clock.by = std::chrono::minutes(kTrustTime) + std::chrono::minutes(1);
  // Killed between its two files: the pair does not fit, and the same command ends it.
  std::string next;
  {
    auto read = ReadSecret(folder + "/next.pem");
    ASSERT_TRUE(read.ok());
    next = *read;
  }
  ASSERT_TRUE(WriteWhole(folder + "/ca.pem", next).ok());
  EXPECT_FALSE(Authority::Load(LoadAuthority(folder)->authority).ok());
  auto switched = SwitchAuthority(folder, clock);
  ASSERT_TRUE(switched.ok()) << switched.error().ToString();
  EXPECT_EQ(*switched, *added);
  auto second = LoadAuthority(folder);
  ASSERT_TRUE(second.ok());
  auto authority = Authority::Load(second->authority);
  ASSERT_TRUE(authority.ok());
  EXPECT_EQ((*authority)->fingerprint(), *added);
  EXPECT_EQ(second->trusted, next + first->authority.certificate);
  EXPECT_EQ(SwitchAuthority(folder, clock).error().reason(), "ca.next");
}

TEST(KeyFiles, JoiningKeyIsTheSameUntilForgotten) {
  auto dir = os::TempDir::Create("dsec-ca-");
  ASSERT_TRUE(dir.ok());
  const std::string folder = dir->path() + "/tls";
  const rpc::TlsName name{"prod", "edge", "n1"};
  auto first = JoiningRequest(folder, name);
  ASSERT_TRUE(first.ok()) << first.error().ToString();
  auto again = JoiningRequest(folder, name);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(ParseRequest(first->request)->key_sha256, ParseRequest(again->request)->key_sha256);
  ASSERT_TRUE(ForgetJoining(folder).ok());
  ASSERT_TRUE(ForgetJoining(folder).ok());
  auto other = JoiningRequest(folder, name);
  ASSERT_TRUE(other.ok());
  EXPECT_NE(ParseRequest(first->request)->key_sha256, ParseRequest(other->request)->key_sha256);
}

TEST(KeyFiles, IdentityComesBack) {
  auto dir = os::TempDir::Create("dsec-ca-");
  ASSERT_TRUE(dir.ok());
  EXPECT_EQ(LoadIdentity(dir->path()).error().code(), Code::kNotFound);
  const auto authority = NewAuthority();
  auto request = MakeRequest({"prod", "edge", "n1"});
  auto parsed = ParseRequest(request->request);
  auto issued = authority->Issue(*parsed, 1, Clock::System().Wall());
  ASSERT_TRUE(issued.ok());
  Identity identity;
  identity.own = {request->key, issued->certificate};
  identity.trusted = issued->certificate;
  const std::string folder = dir->path() + "/tls";
  ASSERT_TRUE(SaveIdentity(folder, identity).ok());
  auto loaded = LoadIdentity(folder);
  ASSERT_TRUE(loaded.ok()) << loaded.error().ToString();
  EXPECT_EQ(loaded->own.key, identity.own.key);
  EXPECT_EQ(loaded->own.certificate, identity.own.certificate);
  EXPECT_EQ(loaded->view.name.id, "n1");
  EXPECT_TRUE(rpc::TlsContext::Create(loaded->Options()).ok());
  std::ofstream(folder + "/identity.pem") << "nonsense";
  EXPECT_EQ(LoadIdentity(folder).error().reason(), "ca.material");
}

TEST(JoinToken, TextComesBackOrIsRefused) {
  const JoinToken token{"prod", std::string(64, 'a'), std::string(64, 'b')};
  auto parsed = ParseJoinToken(WriteJoinToken(token));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->cluster, "prod");
  EXPECT_EQ(parsed->secret, token.secret);
  for (const char* bad : {"", "dsecjoin1.", "dsecjoin1.prod.aa.bb", "dsecjoin2.x.y.z"}) {
    EXPECT_EQ(ParseJoinToken(bad).error().reason(), "join.token") << bad;
  }
}

class TokenStore : public ::testing::Test {
 protected:
  TokenStore() {
    dir_.emplace(*os::TempDir::Create("dsec-ca-"));
    store_ = *store::SqliteStore::Open(dir_->path() + "/control.db", shards_->at(0), clock_);
  }
  ~TokenStore() override {
    store_.reset();
    shards_.reset();
  }
  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    return runtime::BlockOn(shards_->at(0), std::move(task));
  }
  Result<TokenUse> Use(const std::string& secret, const std::string& key) {
    return Run(UseJoinToken(*store_, secret, key, "dsec://prod/edge/n1", clock_, Soon()));
  }

  class TestClock final : public Clock {
   public:
    MonoTime Mono() const override { return Clock::System().Mono(); }
    WallTime Wall() const override { return WallTime(std::chrono::milliseconds(ms.load())); }
    std::atomic<int64_t> ms = 1'800'000'000'000;
  };
  TestClock clock_;
  std::optional<os::TempDir> dir_;
  std::unique_ptr<runtime::Shards> shards_ = std::make_unique<runtime::Shards>(1);
  std::unique_ptr<store::SqliteStore> store_;
};

TEST_F(TokenStore, IsGoodForOneKeyAndTenMinutes) {
  v1::JoinTokenRecord record;
  record.set_role("edge");
  auto token = Run(MakeJoinToken(*store_, "prod", std::string(64, 'a'), record, clock_, Soon()));
  ASSERT_TRUE(token.ok()) << token.error().ToString();
  EXPECT_EQ(Use(std::string(64, 'c'), "k1").error().reason(), "join.token");
  // The secret itself is not in the store.
  auto all = Run(store_->Range(store::KeyRange::Prefix("join/"), 10, Soon()));
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->entries.size(), 1u);
  EXPECT_EQ(all->entries[0].key.find(token->secret), std::string::npos);

  auto first = Use(token->secret, "k1");
  auto racing = Use(token->secret, "k2");
  ASSERT_TRUE(first.ok() && racing.ok());
  EXPECT_EQ(first->record.role(), "edge");
  ASSERT_TRUE(Run(store_->Commit({first->condition}, {first->write}, Soon())).ok());
  // Of two that found it unused one alone gets it.
  EXPECT_EQ(Run(store_->Commit({racing->condition}, {racing->write}, Soon())).error().reason(),
            "store.version");
  EXPECT_EQ(Use(token->secret, "k2").error().reason(), "join.token");
  EXPECT_TRUE(Use(token->secret, "k1").ok());  // its answer was lost
  clock_.ms += 10 * 60'000;
  EXPECT_EQ(Use(token->secret, "k1").error().reason(), "join.token");
}

TEST_F(TokenStore, SerialsAreOnRecordUnderALease) {
  v1::CertificateRecord record;
  record.set_name("dsec://prod/edge/n1");
  record.set_ends_unix_ms(clock_.ms + 24 * 3600 * 1000);
  auto one = Run(NewSerial(*store_, record, clock_, Soon()));
  auto two = Run(NewSerial(*store_, record, clock_, Soon()));
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_NE(one->serial, two->serial);
  EXPECT_GT(one->serial, 0u);
  ASSERT_TRUE(Run(store_->Commit({one->condition}, {one->write}, Soon())).ok());
  EXPECT_FALSE(Run(store_->Commit({one->condition}, {one->write}, Soon())).ok());
  auto entry = Run(store_->Get(one->condition.key, Soon()));
  ASSERT_TRUE(entry.ok() && entry->has_value());
  EXPECT_NE((*entry)->lease, 0u);
}

}  // namespace
}  // namespace dsec::ca
