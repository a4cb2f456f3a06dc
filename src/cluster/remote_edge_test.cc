// SPDX-License-Identifier: Apache-2.0
// EdgeApi over TLS on the loopback: the real Edge on a host in memory at the far end.
#include "cluster/remote_edge.h"

#include <algorithm>

#include "base/fault.h"
#include "ca/authority.h"
#include "cluster/call_error.h"
#include "cluster/edge_server.h"
#include "cluster/epoch_gate.h"
#include "edge/testing/edge_fixture.h"
#include "model/lifecycle.h"

namespace dsec::cluster {
namespace {

using edge::Attachment;
using edge::Created;
using edge::OnDisconnect;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

class RemoteEdgeTest : public edge::testing::EdgeFixture {
 public:
  RemoteEdgeTest() {
    auto material = ca::MakeAuthority("prod", Clock::System().Wall());
    material_ = *material;
    authority_ = *ca::Authority::Load(material_);
  }
  ~RemoteEdgeTest() override { CloseAll(); }

  std::shared_ptr<rpc::TlsHolder> HolderOf(const std::string& role, const std::string& id) {
    auto request = ca::MakeRequest({"prod", role, id});
    auto parsed = ca::ParseRequest(request->request);
    auto issued = authority_->Issue(*parsed, 9, Clock::System().Wall());
    auto context =
        rpc::TlsContext::Create({issued->certificate, request->key, material_.certificate, "prod"});
    EXPECT_TRUE(context.ok()) << context.error().ToString();
    return std::make_shared<rpc::TlsHolder>(*context);
  }

  // The edge, its server, and another process's view of it.
  void StartAll() {
    Start();
    Serve();
    RemoteEdgeOptions options;
    options.address = fmt::format("127.0.0.1:{}", port_);
    options.node_id = "n1";
    options.tls = HolderOf("apiserver", "a1");
    options.epoch = [this] { return epoch_.load(); };
    options.connect_pause = milliseconds(1);
    remote_ = *RemoteEdge::Make(*shards_, options);
  }
  void Serve() {
    auto fence = [this](std::string message, Deadline deadline) {
      return edge_->Fence(std::move(message), deadline);
    };
    if (gate_ == nullptr) {
      gate_ = *FencingGate::Open(dir_ + "/epoch", shards_->at(0), fence);
    }
    served_ = std::make_unique<EdgeServer>(*edge_, *gate_);
    rpc_ = std::make_unique<rpc::Server>(shards_->at(0), EdgeServerOptions());
    served_->Register(*rpc_);
    auto port = Run([](RemoteEdgeTest* self) -> Task<uint16_t> {
      co_return self->rpc_->ListenTls("127.0.0.1", self->port_, self->HolderOf("edge", "n1"),
                                      {.roles = {"apiserver", "watcher"}});
    }(this));
    ASSERT_TRUE(port.ok()) << port.error().ToString();
    port_ = *port;
  }
  // The server goes, with its connections; the edge stays.
  void StopServing() {
    if (rpc_ == nullptr) return;
    (void)Run([](RemoteEdgeTest* self) -> Task<void> {
      co_await self->rpc_->Stop(Deadline::After(milliseconds(0)));
      co_await self->served_->Stop();
      co_return Ok();
    }(this));
    rpc_.reset();
    served_.reset();
  }
  void CloseAll() {
    if (shards_ == nullptr) return;
    StopServing();
    remote_.reset();
    if (gate_ != nullptr) {
      (void)Run([](RemoteEdgeTest* self) -> Task<void> {
        co_await self->gate_->Stop();
        co_return Ok();
      }(this));
    }
    (void)Run(edge_->Stop(Soon()));
    Crash();
    gate_.reset();
  }

  Result<Created> CreateRemote(const std::string& request_id) {
    return Run(remote_->Create(CreateRequestOf(request_id), Soon()));
  }
  std::string CreateDelivered(const std::string& request_id) {
    auto created = CreateRemote(request_id);
    if (!created.ok()) {
      ADD_FAILURE() << created.error().ToString();
      return "";
    }
    EXPECT_NE(created->claim, nullptr);
    if (created->claim) created->claim->Delivered();
    return created->view.record().id();
  }
  std::unique_ptr<Attachment> AttachRemote(const std::string& id, const std::string& op,
                                           OnDisconnect rule = OnDisconnect::kKill) {
    auto attached = Run(remote_->Attach(SandboxId(id), op, rule, Soon()));
    if (!attached.ok()) {
      ADD_FAILURE() << attached.error().ToString();
      return nullptr;
    }
    return *std::move(attached);
  }
  // A connection of another process, by hand.
  std::shared_ptr<rpc::Channel> RawChannel(const std::string& role = "apiserver") {
    auto made = Run([](RemoteEdgeTest* self, auto holder) -> Task<std::shared_ptr<rpc::Channel>> {
      auto channel =
          co_await rpc::Channel::ConnectTls(self->shards_->at(0), "127.0.0.1", self->port_,
                                            holder->Get(), {.roles = {"edge"}, .id = "n1"}, Soon());
      co_return std::move(channel);
    }(this, HolderOf(role, "a2")));
    EXPECT_TRUE(made.ok()) << made.error().ToString();
    return made.ok() ? *made : nullptr;
  }

  ca::KeyAndCertificate material_;
  std::shared_ptr<const ca::Authority> authority_;
  std::atomic<uint64_t> epoch_ = 1;
  std::unique_ptr<FencingGate> gate_;
  std::unique_ptr<EdgeServer> served_;
  std::unique_ptr<rpc::Server> rpc_;
  uint16_t port_ = 0;
  std::shared_ptr<RemoteEdge> remote_;
};

TEST_F(RemoteEdgeTest, CallsReachTheEdge_FromEveryShard) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  for (size_t shard = 0; shard < shards_->size(); ++shard) {
    auto view = runtime::BlockOn(shards_->at(shard), remote_->Get(SandboxId(id), Soon()));
    ASSERT_TRUE(view.ok()) << view.error().ToString();
    EXPECT_EQ(view->record().state(), v1::STATE_RUNNING);
  }
  auto request = ExecOf("op", {"echo", "hi"});
  request.set_wait_ms(1'000);
  auto reply = Run(remote_->Exec(SandboxId(id), request, nullptr, Soon()));
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_EQ(reply->stdout_chunks(0).data(), "hi\n");
  v1::ListRequestAll list;
  list.set_page_size(10);
  EXPECT_EQ(Run(remote_->List(list, Soon()))->records_size(), 1);
  EXPECT_EQ(Run(remote_->Node(Soon()))->node_id(), "n1");
  EXPECT_EQ(*Run(remote_->ProjectOf(SandboxId(id))), "");
  v1::EventsRequest events;
  events.set_id(id);
  events.set_max_events(10);
  EXPECT_GE(Run(remote_->Events(events, Soon()))->events_size(), 3);
  v1::RenewRequest renew;
  renew.set_id(id);
  renew.set_ttl_ms(60'000);
  EXPECT_TRUE(Run(remote_->Renew(renew, Soon())).ok());
  EXPECT_TRUE(Run(remote_->Stats(SandboxId(id), Soon())).ok());
  EXPECT_EQ(Run(remote_->ListExecs(SandboxId(id), Soon()))->execs_size(), 1);
  v1::DeleteRequest remove;
  remove.set_id(id);
  remove.set_wait(true);
  EXPECT_EQ(Run(remote_->Delete(remove, Soon()))->record().state(), v1::STATE_STOPPED);
  CheckInvariants();
}

TEST_F(RemoteEdgeTest, Errors_ArriveAsTheyWere) {
  StartAll();
  const SandboxId none("sb-n1-01h00000000000000000000000");
  const auto here = Run(edge_->Get(none, Soon())).error();
  const auto there = Run(remote_->Get(none, Soon())).error();
  EXPECT_EQ(there.code(), here.code());
  EXPECT_EQ(there.reason(), here.reason());
  EXPECT_EQ(there.message(), here.message());
  v1::CreateRequest bad = CreateRequestOf("r1");
  bad.set_sandbox_id("sb-other-01h00000000000000000000000");
  const auto refused = Run(remote_->Create(bad, Soon())).error();
  EXPECT_EQ(refused.reason(), "create.sandbox_id");
  EXPECT_EQ(refused.field(), "sandbox_id");
  const std::string id = CreateDelivered("r2");
  auto changed = CreateRequestOf("r2");
  changed.mutable_spec()->set_base("other:1");
  EXPECT_EQ(Run(remote_->Create(changed, Soon())).error().code(), Code::kAlreadyExists);
  v1::DeleteRequest remove;
  remove.set_id(id);
  remove.set_wait(true);
  ASSERT_TRUE(Run(remote_->Delete(remove, Soon())).ok());
  const auto gone = Run(remote_->Exec(SandboxId(id), ExecOf("op", {"x"}), nullptr, Soon())).error();
  EXPECT_EQ(gone.code(), Code::kGone);
  EXPECT_EQ(gone.reason(), "sandbox.ended.user_stop");
}

TEST_F(RemoteEdgeTest, DeadlineOfTheEdge_IsTold) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  ASSERT_TRUE(Run(remote_->Exec(SandboxId(id), ExecOf("op", {"serve"}), nullptr, Soon())).ok());
  v1::PollRequest poll;
  poll.set_op_id("op");
  poll.set_wait_ms(60'000);
  const auto start = std::chrono::steady_clock::now();
  auto reply = Run(remote_->Poll(SandboxId(id), poll, nullptr, Deadline::After(milliseconds(300))));
  const auto took = std::chrono::steady_clock::now() - start;
  // The wait is cut to the deadline, as on one machine.
  EXPECT_LT(took, seconds(20));
  EXPECT_GE(took, milliseconds(100));
  if (reply.ok()) {
    EXPECT_TRUE(reply->running());
  } else {
    EXPECT_EQ(reply.error().code(), Code::kDeadlineExceeded) << reply.error().ToString();
  }
}

TEST_F(RemoteEdgeTest, Claim_DeliveredOrNot) {
  StartAll();
  const std::string kept = CreateDelivered("r1");
  std::string lost;
  {
    auto created = CreateRemote("r2");
    ASSERT_TRUE(created.ok());
    lost = created->view.record().id();
  }
  Await([&] { return Get(lost).claim_until_unix_ms() != 0; });
  Advance(options_.claim_grace + milliseconds(1));
  AwaitState(lost, v1::STATE_STOPPED);
  EXPECT_EQ(Get(lost).termination().cause(), model::cause::kUnclaimed);
  EXPECT_EQ(Get(kept).state(), v1::STATE_RUNNING);
}

TEST_F(RemoteEdgeTest, Claim_OfAConnectionThatEnds_IsLost) {
  StartAll();
  auto channel = RawChannel();
  v1::EdgeCall call;
  call.set_epoch(1);
  call.set_body(CreateRequestOf("r1").SerializeAsString());
  auto id = Run([](std::shared_ptr<rpc::Channel> on, std::string payload) -> Task<std::string> {
    auto stream = on->OpenStream(kEdgeService, "Create", std::move(payload), Deadline::Never());
    if (!stream.ok()) co_return std::move(stream).error();
    auto message = co_await (*stream)->Receive(Soon());
    if (!message.ok()) co_return std::move(message).error();
    v1::EdgeAnswer answer;
    v1::CreateReply reply;
    answer.ParseFromString(**message);
    reply.ParseFromString(answer.body());
    on->Close();
    co_return reply.view().record().id();
  }(std::move(channel), call.SerializeAsString()));
  ASSERT_TRUE(id.ok()) << id.error().ToString();
  Await([&] { return Get(*id).claim_until_unix_ms() != 0; });
}

TEST_F(RemoteEdgeTest, Follower_ThatVanishes_EndsItsExec) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  auto follower = AttachRemote(id, "op");
  auto reply = Run(remote_->Exec(SandboxId(id), ExecOf("op", {"serve"}), follower.get(), Soon()));
  ASSERT_TRUE(reply.ok() && reply->running());
  Advance(options_.disconnect_grace + milliseconds(1));
  EXPECT_TRUE(host_->Running(id, "op"));
  follower.reset();
  Await([&] {
    Advance(options_.disconnect_grace + milliseconds(1));
    return !host_->Running(id, "op");
  });
  EXPECT_EQ(host_->KilledBy(id, "op"), "disconnect");
}

TEST_F(RemoteEdgeTest, Follower_ThatLeavesInOrder_EndsNothing) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  auto follower = AttachRemote(id, "op");
  ASSERT_TRUE(
      Run(remote_->Exec(SandboxId(id), ExecOf("op", {"serve"}), follower.get(), Soon())).ok());
  follower->Finish();
  follower.reset();
  // A call on the same connection comes after the message.
  ASSERT_TRUE(Run(remote_->Get(SandboxId(id), Soon())).ok());
  Advance(options_.disconnect_grace + seconds(1));
  ASSERT_TRUE(Run(remote_->Get(SandboxId(id), Soon())).ok());
  EXPECT_TRUE(host_->Running(id, "op"));
}

TEST_F(RemoteEdgeTest, Follower_OfAConnectionThatEnds_HasVanished) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  auto channel = RawChannel();
  v1::AttachRequest attach;
  attach.set_op_id("op");
  v1::EdgeCall call;
  call.set_epoch(1);
  call.set_sandbox_id(id);
  call.set_body(attach.SerializeAsString());
  auto number = Run([](std::shared_ptr<rpc::Channel> on, std::string payload, std::string box,
                       v1::ExecRequest exec) -> Task<uint64_t> {
    auto stream = on->OpenStream(kEdgeService, "Attach", std::move(payload), Deadline::Never());
    if (!stream.ok()) co_return std::move(stream).error();
    auto message = co_await (*stream)->Receive(Soon());
    if (!message.ok()) co_return std::move(message).error();
    v1::EdgeAnswer answer;
    v1::AttachReply reply;
    answer.ParseFromString(**message);
    reply.ParseFromString(answer.body());
    v1::EdgeCall start;
    start.set_epoch(1);
    start.set_sandbox_id(box);
    start.set_follower(reply.follower());
    start.set_body(exec.SerializeAsString());
    auto started = co_await on->CallRaw(kEdgeService, "Exec", start.SerializeAsString(), Soon());
    if (!started.ok()) co_return std::move(started).error();
    on->Close();
    co_return reply.follower();
  }(std::move(channel), call.SerializeAsString(), id, ExecOf("op", {"serve"})));
  ASSERT_TRUE(number.ok()) << number.error().ToString();
  Await([&] {
    Advance(options_.disconnect_grace + milliseconds(1));
    return !host_->Running(id, "op");
  });
  EXPECT_EQ(host_->KilledBy(id, "op"), "disconnect");
}

TEST_F(RemoteEdgeTest, FollowerOfAnother_CannotBeUsed) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  auto follower = AttachRemote(id, "op");
  auto channel = RawChannel();  // apiserver a2
  v1::EdgeCall call;
  call.set_epoch(1);
  call.set_sandbox_id(id);
  call.set_follower(1);
  call.set_body(ExecOf("op", {"serve"}).SerializeAsString());
  auto answer = Run([](std::shared_ptr<rpc::Channel> on, std::string payload) -> Task<std::string> {
    auto got = co_await on->CallRaw(kEdgeService, "Exec", std::move(payload), Soon());
    co_return std::move(got);
  }(std::move(channel), call.SerializeAsString()));
  ASSERT_TRUE(answer.ok());
  v1::EdgeAnswer parsed;
  ASSERT_TRUE(parsed.ParseFromString(*answer));
  EXPECT_EQ(parsed.error().reason(), "edge.follower_gone");
}

TEST_F(RemoteEdgeTest, Pack_ReportsProgressAndEndsWithItsCaller) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  v1::PackRequest request;
  request.set_kind("workspace");
  request.set_name("w:1");
  std::atomic<uint64_t> entries = 0;
  auto packed = Run(remote_->Pack(
      SandboxId(id), request,
      [&](const v1::PackProgress& state) {
        entries = state.entries();
        return true;
      },
      Soon()));
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_EQ(packed->layer().names(0), "w:1");
  EXPECT_EQ(entries, 3u);
  // One that never ends by itself.
  request.set_name("endless");
  auto refused = Run(
      remote_->Pack(SandboxId(id), request, [](const v1::PackProgress&) { return false; }, Soon()));
  EXPECT_EQ(refused.error().reason(), "layer.cancelled");
  // The edge knows that, too: another one may begin.
  request.set_name("w:2");
  Await([&] { return Run(remote_->Pack(SandboxId(id), request, nullptr, Soon())).ok(); });
}

TEST_F(RemoteEdgeTest, ConnectionThatEnds_ReadsAreRepeatedAndTheRestIsUnreachable) {
  StartAll();
  const std::string id = CreateDelivered("r1");
  v1::ExecRequest request = ExecOf("op", {"serve"});
  ASSERT_TRUE(Run(remote_->Exec(SandboxId(id), request, nullptr, Soon())).ok());
  v1::PollRequest poll;
  poll.set_op_id("op");
  poll.set_wait_ms(20'000);
  auto waiting = Begin(remote_->Poll(SandboxId(id), poll, nullptr, Soon()));
  // Sent after it over the same connection: the wait has arrived when this is answered.
  ASSERT_TRUE(Run(remote_->Get(SandboxId(id), Soon())).ok());
  ASSERT_EQ(waiting.wait_for(seconds(0)), std::future_status::timeout);
  StopServing();
  EXPECT_EQ(waiting.get().error().reason(), "edge.unreachable");
  auto away = Run(remote_->Get(SandboxId(id), Soon()));
  ASSERT_FALSE(away.ok());
  EXPECT_EQ(away.error().code(), Code::kUnavailable);
  EXPECT_EQ(away.error().reason(), "edge.unreachable");
  Serve();  // at the same port
  Await([&] { return Run(remote_->Get(SandboxId(id), Soon())).ok(); });
  EXPECT_TRUE(host_->Running(id, "op"));
  EXPECT_EQ(host_->Starts(id, "op"), 1u);
}

TEST_F(RemoteEdgeTest, StaleCaller_IsRefused) {
  StartAll();
  CreateDelivered("r1");
  epoch_ = 3;
  ASSERT_TRUE(Run(remote_->Node(Soon())).ok());
  epoch_ = 2;
  auto stale = Run(remote_->Node(Soon()));
  ASSERT_FALSE(stale.ok());
  EXPECT_EQ(stale.error().reason(), "edge.epoch_stale");
  EXPECT_EQ(stale.error().code(), Code::kFailedPrecondition);
}

TEST_F(RemoteEdgeTest, HigherEpoch_EndsAllSandboxesBeforeItAnswers) {
  StartAll();
  std::vector<std::string> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(CreateDelivered(fmt::format("r{}", i)));
  epoch_ = 2;
  v1::ListRequestAll list;
  list.set_page_size(100);
  auto page = Run(remote_->List(list, Soon()));
  ASSERT_TRUE(page.ok()) << page.error().ToString();
  EXPECT_EQ(page->records_size(), 0);  // the first answer of the new epoch
  for (const std::string& id : ids) {
    const auto record = Get(id);
    EXPECT_EQ(record.state(), v1::STATE_LOST);
    EXPECT_EQ(record.termination().cause(), model::cause::kNodeLost);
    EXPECT_EQ(record.termination().fault(), v1::FAULT_INFRASTRUCTURE);
    EXPECT_NE(record.termination().message().find("epoch 2"), std::string::npos);
  }
  EXPECT_THAT(host_->Things(), ::testing::IsEmpty());
  CreateDelivered("new");
  CheckInvariants();
}

TEST_F(RemoteEdgeTest, CreateUnderWay_IsFenced) {
  StartAll();
  ASSERT_TRUE(fault::Arm("edge.create.before_journal=block").ok());
  const uint64_t fired = fault::Fired("edge.create.before_journal");
  std::vector<std::future<Result<Created>>> creates;
  for (int i = 0; i < 5; ++i) {
    creates.push_back(Begin(remote_->Create(CreateRequestOf(fmt::format("r{}", i)), Soon())));
  }
  ASSERT_TRUE(fault::WaitFired("edge.create.before_journal", fired + 1, seconds(20)));
  v1::ListRequestAll list;
  list.set_page_size(100);
  const auto all = [&] {
    auto page = Run(edge_->List(list, Soon()));
    EXPECT_TRUE(page.ok());
    return *std::move(page);
  };
  Await([&] { return all().records_size() == 5; });
  std::vector<std::string> ids;
  const v1::ListPage held = all();
  for (const auto& record : held.records()) ids.push_back(record.id());
  epoch_ = 2;
  auto first = Begin(remote_->List(list, Soon()));
  const auto serves_old = [](EpochGate& gate) -> Task<bool> { co_return gate.Serves(1); };
  Await([&] { return !*Run(serves_old(*gate_)); });
  fault::DisarmAll();
  // The first answer of the new epoch knows none of them.
  auto page = first.get();
  ASSERT_TRUE(page.ok()) << page.error().ToString();
  for (const auto& record : page->records()) {
    EXPECT_EQ(std::count(ids.begin(), ids.end(), record.id()), 0) << record.id();
  }
  for (auto& one : creates) {
    auto created = one.get();
    // One may have been made before the fence had begun; then that has ended it.
    if (created.ok() && created->claim) created->claim->Delivered();
  }
  size_t on_record = 0;
  for (const std::string& id : ids) {
    auto record = Run(edge_->Get(SandboxId(id), Soon()));
    if (!record.ok()) continue;  // never on record
    ++on_record;
    EXPECT_EQ(record->record().state(), v1::STATE_LOST) << id;
    EXPECT_EQ(record->record().termination().cause(), model::cause::kNodeLost) << id;
  }
  EXPECT_GT(on_record, 0u);  // the one that was held, at least
  CheckInvariants();
}

TEST_F(RemoteEdgeTest, Garbage_IsRefused) {
  StartAll();
  auto channel = RawChannel();
  for (const char* method : {"Get", "Exec", "List"}) {
    auto answer = Run([](std::shared_ptr<rpc::Channel> on, std::string name) -> Task<std::string> {
      auto got = co_await on->CallRaw(kEdgeService, name, "\xff\xff\xff", Soon());
      co_return std::move(got);
    }(channel, method));
    ASSERT_TRUE(answer.ok()) << answer.error().ToString();
    v1::EdgeAnswer parsed;
    ASSERT_TRUE(parsed.ParseFromString(*answer));
    EXPECT_EQ(parsed.error().code(), "INVALID_ARGUMENT") << method;
  }
  (void)Run([](std::shared_ptr<rpc::Channel> last) -> Task<void> {
    last.reset();
    co_return Ok();
  }(std::move(channel)));
}

TEST(CallError, ComesBackAsItWas) {
  const Error error = Error(Code::kGone, "sandbox.ended.ttl", "it ended")
                          .WithField("id")
                          .WithErrno(5)
                          .Context("while {}", "asking");
  const Error back = FromWire(ToWire(error));
  EXPECT_EQ(back.code(), Code::kGone);
  EXPECT_EQ(back.reason(), "sandbox.ended.ttl");
  EXPECT_EQ(back.message(), "it ended (while asking)");
  EXPECT_EQ(back.field(), "id");
  EXPECT_EQ(back.sys_errno(), 5);
}

TEST(CallError, HostileOnesAreBounded) {
  v1::CallError bad;
  bad.set_code("NO SUCH CODE");
  bad.set_reason("Not a reason\n");
  bad.set_message(std::string(100'000, '\xff'));
  const Error error = FromWire(bad);
  EXPECT_EQ(error.code(), Code::kInternal);
  EXPECT_EQ(error.reason(), "edge.remote_error");
  EXPECT_LT(error.message().size(), 5000u);
  bad.set_code("INTERNAL");
  size_t own = 0;
  for (int i = 0; i < 5000; ++i) {
    bad.set_reason(fmt::format("made.up.{}", i));
    if (FromWire(bad).reason() != "edge.remote_error") ++own;
  }
  EXPECT_LE(own, 2048u);
  // What was known before still arrives.
  bad.set_reason("made.up.0");
  EXPECT_EQ(FromWire(bad).reason(), "made.up.0");
}

}  // namespace
}  // namespace dsec::cluster
