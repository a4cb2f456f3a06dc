// SPDX-License-Identifier: Apache-2.0
#include "router/testing/sim_node.h"

#include <algorithm>
#include <utility>

#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::router::testing {

using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;

namespace {

constexpr size_t kEventsKept = 200'000;
constexpr milliseconds kLook{20};

template <typename T>
Task<T> NotHere() {
  co_return Error(Code::kFailedPrecondition, "sim.not_here", "no part of the simulation");
}

}  // namespace

// EdgeApi for one caller that knows the node under one epoch.
class SimEdge final : public edge::EdgeApi {
 public:
  SimEdge(SimNode& node, uint64_t epoch) : node_(node), epoch_(epoch) {}

  Task<edge::Created> Create(v1::CreateRequest request, Deadline deadline) override {
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    auto made = co_await node_.Create(std::move(request), deadline);
    const bool lost = node_.lose_answers_ > 0 && made.ok();
    if (lost) {
      --node_.lose_answers_;
      made->claim.reset();
      (void)co_await runtime::SleepUntil(deadline);
      co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "the answer was lost");
    }
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return made;
  }
  Task<v1::SandboxView> Get(SandboxId id, Deadline deadline) override {
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    const auto it = node_.sandboxes_.find(id.str());
    Result<v1::SandboxView> view = edge::NotFoundError(id.str());
    if (it != node_.sandboxes_.end()) {
      view = v1::SandboxView();
      *view->mutable_record() = node_.RecordOf(*it->second);
    }
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return view;
  }
  Task<std::string> ProjectOf(SandboxId id) override {
    auto view = co_await Get(std::move(id), Deadline::After(std::chrono::seconds(5)));
    if (!view.ok()) co_return std::move(view).error();
    co_return view->record().project();
  }
  Task<v1::ListPage> List(v1::ListRequestAll request, Deadline deadline) override {
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    v1::ListPage page;
    const uint32_t size = request.page_size() == 0 ? 100 : request.page_size();
    for (auto it = node_.sandboxes_.upper_bound(request.page_token()); it != node_.sandboxes_.end();
         ++it) {
      v1::SandboxRecord record = node_.RecordOf(*it->second);
      if (!edge::Matches(record, request)) continue;
      if (static_cast<uint32_t>(page.records_size()) == size) {
        page.set_next_page_token(page.records().rbegin()->id());
        break;
      }
      *page.add_records() = std::move(record);
    }
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return page;
  }
  Task<v1::SandboxView> Delete(v1::DeleteRequest request, Deadline deadline) override {
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    const auto it = node_.sandboxes_.find(request.id());
    Result<v1::SandboxView> view = edge::NotFoundError(request.id());
    if (it != node_.sandboxes_.end()) {
      const bool internal = !request.cause().empty();
      node_.EndOne(*it->second, internal ? request.cause() : std::string(model::cause::kUserStop));
      view = v1::SandboxView();
      *view->mutable_record() = node_.RecordOf(*it->second);
    }
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return view;
  }
  Task<v1::EventsReply> Events(v1::EventsRequest request, Deadline deadline) override {
    const Deadline until = deadline.Sooner(
        Deadline::After(milliseconds(std::min<uint64_t>(request.wait_ms(), 600'000))));
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    v1::EventsReply reply;
    const uint32_t limit = request.max_events() == 0 ? 100 : request.max_events();
    while (true) {
      reply.set_next_seq(request.after_seq());
      uint64_t at =
          std::max(request.id().empty() ? request.after_seq() + 1 : 1, node_.first_event_);
      for (; at < node_.first_event_ + node_.events_.size(); ++at) {
        const SimNode::SimEvent& event = node_.events_[at - node_.first_event_];
        if (!request.id().empty() &&
            (event.sandbox_id != request.id() || event.seq <= request.after_seq())) {
          continue;
        }
        if (static_cast<uint32_t>(reply.events_size()) == limit) break;
        v1::Event& out = *reply.add_events();
        out.set_sandbox_id(event.sandbox_id);
        out.set_seq(event.seq);
        out.set_at_unix_ms(event.at_ms);
        out.set_type(event.type);
        out.set_state(event.state);
        out.set_node_seq(at);
        if (!event.cause.empty()) out.mutable_termination()->set_cause(event.cause);
        reply.set_next_seq(request.id().empty() ? at : event.seq);
      }
      if (reply.events_size() > 0 || until.Expired()) break;
      auto slept = co_await runtime::SleepUntil(until.Sooner(Deadline::After(kLook)));
      if (!slept.ok()) co_return std::move(slept).error();
    }
    if (reply.events_size() == 0 && !request.id().empty() &&
        !node_.sandboxes_.contains(request.id())) {
      co_return edge::NotFoundError(request.id());
    }
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return reply;
  }
  Task<v1::NodeInfo> Node(Deadline deadline) override {
    DSEC_CO_TRY_VOID(co_await node_.Arrive(epoch_, deadline));
    v1::NodeInfo info;
    info.set_node_id(node_.id());
    info.set_live(node_.live_);
    info.set_capacity(node_.options_.capacity);
    DSEC_CO_TRY_VOID(co_await node_.Return(deadline));
    co_return info;
  }
  Task<v1::FileInfo> StatFile(SandboxId id, v1::PathRequest, Deadline deadline) override {
    auto view = co_await Get(std::move(id), deadline);
    if (!view.ok()) co_return std::move(view).error();
    if (view->record().ended_unix_ms() != 0)
      co_return edge::GoneError(view->record().termination());
    co_return v1::FileInfo();
  }
  Task<std::unique_ptr<edge::Attachment>> Attach(SandboxId, std::string, edge::OnDisconnect,
                                                 Deadline) override {
    class Nobody final : public edge::Attachment {
      void Finish() override {}
    };
    std::unique_ptr<edge::Attachment> attachment = std::make_unique<Nobody>();
    co_return attachment;
  }
  // Answers whether the follower that was given is one of this node.
  Task<v1::ExecReply> Exec(SandboxId, v1::ExecRequest, edge::Attachment* follower,
                           Deadline) override {
    v1::ExecReply reply;
    reply.set_known(follower != nullptr);
    co_return reply;
  }

#define DSEC_NOT_HERE(name, request_type, reply_type)                 \
  Task<reply_type> name(SandboxId, request_type, Deadline) override { \
    return NotHere<reply_type>();                                     \
  }
  DSEC_NOT_HERE(FirstTouch, v1::FirstTouchRequest, v1::FirstTouchReply)
  DSEC_NOT_HERE(WriteStdin, v1::StdinRequest, v1::StdinReply)
  DSEC_NOT_HERE(Signal, v1::SignalRequest, void)
  DSEC_NOT_HERE(Resize, v1::ResizeRequest, void)
  DSEC_NOT_HERE(Ack, v1::AckRequest, void)
  DSEC_NOT_HERE(CloseSession, v1::SessionRequest, void)
  DSEC_NOT_HERE(ListFiles, v1::ListRequest, v1::ListReply)
  DSEC_NOT_HERE(ReadFile, v1::ReadRequest, v1::ReadReply)
  DSEC_NOT_HERE(WriteFile, v1::WriteRequest, v1::WriteReply)
  DSEC_NOT_HERE(Mkdir, v1::MkdirRequest, void)
  DSEC_NOT_HERE(Move, v1::MoveRequest, void)
  DSEC_NOT_HERE(Remove, v1::RemoveRequest, void)
  DSEC_NOT_HERE(Chmod, v1::ChmodRequest, void)
  DSEC_NOT_HERE(Watch, v1::WatchRequest, v1::WatchReply)
  DSEC_NOT_HERE(PullArchive, v1::PullArchiveRequest, v1::PullArchiveReply)
  DSEC_NOT_HERE(PushArchive, v1::PushArchiveRequest, v1::PushArchiveReply)
#undef DSEC_NOT_HERE
  Task<v1::SandboxView> Renew(v1::RenewRequest, Deadline) override {
    return NotHere<v1::SandboxView>();
  }
  Task<v1::Usage> Stats(SandboxId, Deadline) override { return NotHere<v1::Usage>(); }
  Task<v1::PackReply> Pack(SandboxId, v1::PackRequest, edge::PackProgressFn, Deadline) override {
    return NotHere<v1::PackReply>();
  }
  Task<v1::ExecReply> Poll(SandboxId, v1::PollRequest, edge::Attachment*, Deadline) override {
    return NotHere<v1::ExecReply>();
  }
  Task<v1::ListExecsReply> ListExecs(SandboxId, Deadline) override {
    return NotHere<v1::ListExecsReply>();
  }
  Task<v1::ListSessionsReply> ListSessions(SandboxId, Deadline) override {
    return NotHere<v1::ListSessionsReply>();
  }

 private:
  SimNode& node_;
  const uint64_t epoch_;
};

class SimNode::SimClaim final : public edge::Claim {
 public:
  SimClaim(SimNode& node, std::shared_ptr<Sandbox> sandbox)
      : node_(node), sandbox_(std::move(sandbox)) {}
  ~SimClaim() override {
    if (sandbox_->delivered || !sandbox_->live()) return;
    sandbox_->claim_until_ms = NowMs() + node_.options_.claim_grace.count();
    runtime::Spawn(node_.gate_, node_.executor_, node_.EndUnclaimed(sandbox_));
  }
  void Delivered() override {
    sandbox_->delivered = true;
    sandbox_->claim_until_ms = 0;
  }

 private:
  SimNode& node_;
  const std::shared_ptr<Sandbox> sandbox_;
};

SimNode::SimNode(SimNodeOptions options, runtime::Executor executor)
    : options_(std::move(options)), executor_(std::move(executor)), rng_(options_.seed) {
  if (options_.store == nullptr) return;
  iam::QuotaOptions quota;
  quota.node_id = options_.id;
  quota.limits = options_.limits;
  quota_ = std::make_unique<iam::QuotaKeeper>(*options_.store, executor_, std::move(quota));
}

SimNode::~SimNode() = default;

int64_t SimNode::NowMs() { return UnixMillis(Clock::System().Wall()); }

std::shared_ptr<edge::EdgeApi> SimNode::Way(uint64_t epoch) {
  return std::make_shared<SimEdge>(*this, epoch);
}

void SimNode::RefuseNext(std::vector<Error> errors) {
  for (Error& error : errors) refusals_.push_back(std::move(error));
}

Task<void> SimNode::Arrive(uint64_t epoch, Deadline deadline) {
  auto slept = co_await runtime::SleepUntil(Deadline::After(options_.rtt / 2));
  if (!slept.ok()) co_return std::move(slept).error();
  while (link_ == Link::kHangs) {
    slept = co_await runtime::SleepUntil(deadline.Sooner(Deadline::After(kLook)));
    if (!slept.ok()) co_return std::move(slept).error();
    if (deadline.Expired())
      co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "no answer");
  }
  if (link_ == Link::kRefuses)
    co_return Error(Code::kUnavailable, "rpc.connect", "connection refused");
  if (epoch < epoch_)
    co_return Error(Code::kFailedPrecondition, "edge.epoch_stale", "this node has a later epoch");
  if (epoch > epoch_) {
    // It was declared dead: what it had is no longer, before it answers.
    for (const auto& [id, sandbox] : sandboxes_)
      EndOne(*sandbox, std::string(model::cause::kNodeLost));
    epoch_ = epoch;
  }
  co_return Ok();
}

Task<void> SimNode::Return(Deadline deadline) {
  auto slept = co_await runtime::SleepUntil(Deadline::After(options_.rtt / 2));
  if (!slept.ok()) co_return std::move(slept).error();
  while (link_ == Link::kHangs) {
    slept = co_await runtime::SleepUntil(deadline.Sooner(Deadline::After(kLook)));
    if (!slept.ok()) co_return std::move(slept).error();
    if (deadline.Expired())
      co_return Error(Code::kDeadlineExceeded, "deadline.exceeded", "no answer");
  }
  if (link_ == Link::kRefuses)
    co_return Error(Code::kUnavailable, "rpc.closed", "connection closed");
  co_return Ok();
}

void SimNode::LoseAll() {
  for (const auto& [id, sandbox] : sandboxes_) {
    if (sandbox->live()) {
      sandbox->ended_ms = NowMs();
      sandbox->cause = "machine_gone";
      sandbox->charge.Release();
    }
    sandbox->done = true;
    if (sandbox->change) sandbox->change->Set();
  }
  sandboxes_.clear();
  requests_.clear();
  live_ = 0;
  first_event_ += events_.size();
  events_.clear();
}

void SimNode::Preload(uint64_t count, const std::string& project) {
  for (uint64_t i = 0; i < count; ++i) {
    auto sandbox = std::make_shared<Sandbox>();
    sandbox->id = NewSandboxId(NodeId(options_.id), Clock::System()).str();
    sandbox->project = project;
    sandbox->state = v1::STATE_RUNNING;
    sandbox->created_ms = NowMs();
    sandbox->events = 2;
    sandbox->done = true;
    sandboxes_.emplace(sandbox->id, sandbox);
  }
  live_ += count;
}

size_t SimNode::charged() const {
  return static_cast<size_t>(std::count_if(sandboxes_.begin(), sandboxes_.end(), [](auto& entry) {
    return entry.second->live() && static_cast<bool>(entry.second->charge);
  }));
}

Task<edge::Created> SimNode::Create(v1::CreateRequest request, Deadline deadline) {
  const std::string digest = edge::CreateDigest(request);
  const std::string key = request.project() + '\0' + request.request_id();
  std::shared_ptr<Sandbox> sandbox;
  bool existed = false;
  if (const auto known = requests_.find(key); known != requests_.end()) {
    sandbox = known->second;
    existed = true;
    if (sandbox->digest != digest)
      co_return Error(Code::kAlreadyExists, "create.request_id_reused", "another body");
  } else {
    if (!refusals_.empty()) {
      Error error = std::move(refusals_.front());
      refusals_.pop_front();
      co_return error;
    }
    if (live_ >= options_.capacity) {
      co_return Error(Code::kResourceExhausted, "capacity.count",
                      fmt::format("{} live of {}", live_, options_.capacity));
    }
    sandbox = std::make_shared<Sandbox>();
    sandbox->id = request.sandbox_id().empty() || options_.forgetful
                      ? NewSandboxId(NodeId(options_.id), Clock::System()).str()
                      : request.sandbox_id();
    sandbox->project = request.project();
    sandbox->request_key = key;
    sandbox->digest = digest;
    sandbox->name = request.spec().name();
    sandbox->labels = {request.spec().labels().begin(), request.spec().labels().end()};
    sandbox->created_ms = NowMs();
    sandbox->change = std::make_shared<runtime::AsyncEvent>();
    sandboxes_.emplace(sandbox->id, sandbox);
    if (!options_.forgetful) requests_.emplace(key, sandbox);
    ++live_;
    ++creates_;
    runtime::Spawn(gate_, executor_, Make(sandbox));
  }
  struct Joined {
    int& count;
    explicit Joined(int& of) : count(of) { ++count; }
    ~Joined() { --count; }
  } const joined(sandbox->joiners);
  while (!sandbox->done) {
    const auto change = sandbox->change;
    auto woken = co_await change->Wait(deadline);
    if (!woken.ok() && woken.error().code() == Code::kDeadlineExceeded)
      co_return Error(Code::kDeadlineExceeded, "create.deadline", "it goes on");
    if (!woken.ok()) co_return std::move(woken).error();
  }
  if (sandbox->failed.has_value()) co_return *sandbox->failed;
  edge::Created created;
  *created.view.mutable_record() = RecordOf(*sandbox);
  created.view.set_existed(existed);
  if (sandbox->live()) {
    sandbox->claim_until_ms = 0;
    created.claim = std::make_unique<SimClaim>(*this, sandbox);
  }
  co_return created;
}

boost::asio::awaitable<void> SimNode::Make(std::shared_ptr<Sandbox> sandbox) {
  const auto fail = [&](Error error) {
    sandbox->failed = std::move(error);
    if (sandboxes_.erase(sandbox->id) > 0 && sandbox->live()) --live_;
    requests_.erase(sandbox->request_key);
    sandbox->ended_ms = NowMs();
    sandbox->done = true;
    sandbox->change->Set();
  };
  if (quota_ != nullptr) {
    const auto project = iam::ProjectPath::FromRecord(sandbox->project);
    iam::Amounts amounts;
    amounts[iam::Resource::kLive] = 1;
    auto charged =
        co_await quota_->Reserve(*project, amounts, Deadline::After(std::chrono::seconds(5)));
    if (!charged.ok()) {
      fail(std::move(charged).error());
      co_return;
    }
    if (sandbox->live()) sandbox->charge = *std::move(charged);
  }
  Announce(*sandbox, "created");
  ++sandbox->events;
  const auto jitter = options_.create_jitter.count() == 0
                          ? 0
                          : rng_.Below(static_cast<uint64_t>(options_.create_jitter.count()));
  (void)co_await runtime::SleepUntil(
      Deadline::After(options_.create_time + milliseconds(static_cast<int64_t>(jitter))));
  if (sandbox->live()) {
    sandbox->state = v1::STATE_RUNNING;
    Announce(*sandbox, "state");
    ++sandbox->events;
    if (sandbox->joiners == 0) {
      sandbox->claim_until_ms = NowMs() + options_.claim_grace.count();
      runtime::Spawn(gate_, executor_, EndUnclaimed(sandbox));
    }
  }
  sandbox->done = true;
  sandbox->change->Set();
}

boost::asio::awaitable<void> SimNode::EndUnclaimed(std::shared_ptr<Sandbox> sandbox) {
  (void)co_await runtime::SleepUntil(Deadline::After(options_.claim_grace));
  if (sandbox->claim_until_ms != 0 && sandbox->live() && NowMs() >= sandbox->claim_until_ms)
    EndOne(*sandbox, std::string(model::cause::kUnclaimed));
}

void SimNode::End(const std::string& id, const std::string& cause) {
  const auto it = sandboxes_.find(id);
  if (it != sandboxes_.end()) EndOne(*it->second, cause);
}

void SimNode::EndOne(Sandbox& sandbox, const std::string& cause) {
  if (!sandbox.live()) return;
  sandbox.ended_ms = NowMs();
  sandbox.cause = cause;
  sandbox.state = model::IsCause(cause) ? model::EndStateOf(cause) : v1::STATE_STOPPED;
  sandbox.charge.Release();
  --live_;
  Announce(sandbox, "ended");
  ++sandbox.events;
}

void SimNode::Announce(const Sandbox& sandbox, const std::string& type) {
  events_.push_back({sandbox.id, sandbox.events + 1, NowMs(), type, sandbox.state, sandbox.cause});
  if (events_.size() > kEventsKept) {
    events_.pop_front();
    ++first_event_;
  }
}

v1::SandboxRecord SimNode::RecordOf(const Sandbox& sandbox) const {
  v1::SandboxRecord record;
  record.set_id(sandbox.id);
  record.set_project(sandbox.project);
  record.set_request_digest(sandbox.digest);
  const size_t end = sandbox.request_key.find('\0');
  if (end != std::string::npos) record.set_request_id(sandbox.request_key.substr(end + 1));
  record.mutable_spec()->set_name(sandbox.name);
  for (const auto& [key, value] : sandbox.labels)
    (*record.mutable_spec()->mutable_labels())[key] = value;
  record.set_state(sandbox.state);
  record.set_created_unix_ms(sandbox.created_ms);
  record.set_ended_unix_ms(sandbox.ended_ms);
  record.set_next_event_seq(sandbox.events + 1);
  if (!sandbox.live()) record.mutable_termination()->set_cause(sandbox.cause);
  return record;
}

}  // namespace dsec::router::testing
