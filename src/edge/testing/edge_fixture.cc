// SPDX-License-Identifier: Apache-2.0
#include "edge/testing/edge_fixture.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "base/log.h"
#include "model/lifecycle.h"

namespace dsec::edge::testing {

using std::chrono::milliseconds;

EdgeFixture::EdgeFixture() {
  log::Options quiet;
  quiet.level = log::Level::kError;
  log::Configure(std::move(quiet));
  std::string pattern = (std::filesystem::temp_directory_path() / "dsec-edge-XXXXXX").string();
  dir_ = mkdtemp(pattern.data());
  metrics_ = std::make_unique<metrics::Registry>();
  options_.node_id = NodeId("n1");
  options_.version = "test";
  options_.state_dir = dir_;
  options_.proc_root = dir_ + "/proc";
  options_.clock = &clock_;
  options_.metrics = metrics_.get();
  options_.admission.psi_memory_max = 0;
  options_.admission.disk_reserve_bytes = 0;
  WriteProc("boot-1");
}

EdgeFixture::~EdgeFixture() {
  fault::DisarmAll();
  Crash();
  std::filesystem::remove_all(dir_);
}

void EdgeFixture::WriteProc(const std::string& boot_id) {
  std::filesystem::create_directories(options_.proc_root + "/sys/kernel/random");
  std::ofstream(options_.proc_root + "/sys/kernel/random/boot_id") << boot_id << "\n";
  std::ofstream(options_.proc_root + "/meminfo")
      << "MemTotal: 16000000 kB\nMemAvailable: 16000000 kB\n";
}

void EdgeFixture::Start() {
  shards_ = std::make_unique<runtime::Shards>(2);
  backend_ = std::make_unique<FakeBackend>(*host_);
  auto edge = Edge::Open(options_, *shards_, {{v1::BACKEND_CONTAINER, backend_.get()}});
  ASSERT_TRUE(edge.ok()) << edge.error().ToString();
  edge_ = *std::move(edge);
  auto report = edge_->Start();
  ASSERT_TRUE(report.ok()) << report.error().ToString();
  report_ = *report;
}

void EdgeFixture::Crash() {
  if (shards_ == nullptr) return;
  shards_->Stop();
  if (edge_ != nullptr) edge_->LetGo();
  backend_.reset();
  shards_.reset();
  edge_.reset();
}

void EdgeFixture::Reboot() {
  Crash();
  host_->KillAllAgents();
  const std::string boot_id = fmt::format("boot-{}", 2 + boots_++);
  host_->SetBootId(boot_id);
  WriteProc(boot_id);
}

v1::CreateRequest EdgeFixture::CreateRequestOf(const std::string& request_id) {
  v1::CreateRequest request;
  request.set_request_id(request_id);
  request.mutable_spec()->set_base("debian:test");
  return request;
}

Result<Created> EdgeFixture::TryCreate(const v1::CreateRequest& request) {
  auto created = Run(edge_->Create(request, Soon()));
  if (created.ok() && created->claim != nullptr) created->claim->Delivered();
  return created;
}

std::string EdgeFixture::Create(const std::string& request_id,
                                const std::function<void(v1::CreateRequest&)>& change) {
  v1::CreateRequest request = CreateRequestOf(request_id);
  if (change) change(request);
  const auto created = TryCreate(request);
  if (!created.ok()) {
    ADD_FAILURE() << created.error().ToString();
    return "";
  }
  EXPECT_EQ(created->view.record().state(), v1::STATE_RUNNING);
  return created->view.record().id();
}

Result<v1::SandboxView> EdgeFixture::Delete(const std::string& id, uint64_t grace_ms, bool wait) {
  v1::DeleteRequest request;
  request.set_id(id);
  request.set_grace_ms(grace_ms);
  request.set_wait(wait);
  request.set_who("tester");
  return Run(edge_->Delete(request, Soon()));
}

v1::SandboxRecord EdgeFixture::Get(const std::string& id) {
  const auto view = Run(edge_->Get(SandboxId(id), Soon()));
  if (!view.ok()) {
    ADD_FAILURE() << view.error().ToString();
    return {};
  }
  return view->record();
}

v1::ExecRequest EdgeFixture::ExecOf(const std::string& op_id,
                                    const std::vector<std::string>& argv) {
  v1::ExecRequest request;
  request.set_op_id(op_id);
  for (const std::string& item : argv) request.add_argv(item);
  return request;
}

Result<v1::ExecReply> EdgeFixture::Exec(const std::string& id, const v1::ExecRequest& request,
                                        Attachment* follower) {
  return Run(edge_->Exec(SandboxId(id), request, follower, Soon()));
}

std::vector<v1::Event> EdgeFixture::Events(const std::string& id) {
  std::vector<v1::Event> events;
  v1::EventsRequest request;
  request.set_id(id);
  request.set_max_events(1000);
  while (true) {
    const auto reply = Run(edge_->Events(request, Soon()));
    if (!reply.ok()) {
      ADD_FAILURE() << reply.error().ToString();
      return events;
    }
    if (reply->events().empty()) return events;
    events.insert(events.end(), reply->events().begin(), reply->events().end());
    request.set_after_seq(reply->next_seq());
  }
}

std::vector<std::string> EdgeFixture::EventTypes(const std::string& id) {
  std::vector<std::string> types;
  for (const v1::Event& event : Events(id)) {
    types.push_back(event.type() == "state" ? std::string(model::StateName(event.state()))
                                            : event.type());
  }
  return types;
}

void EdgeFixture::Advance(milliseconds by) {
  clock_.Advance(by);
  edge_->RunDue();
}

void EdgeFixture::Await(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "the condition did not come true";
    std::this_thread::yield();
  }
}

void EdgeFixture::AwaitState(const std::string& id, v1::State state) {
  Await([&] { return Get(id).state() == state; });
}

void EdgeFixture::CheckInvariants() {
  v1::ListRequestAll request;
  request.set_page_size(1000);
  request.set_include_ended(true);
  const auto page = Run(edge_->List(request, Soon()));
  ASSERT_TRUE(page.ok()) << page.error().ToString();
  size_t live = 0;
  for (const v1::SandboxRecord& record : page->records()) {
    const auto events = Events(record.id());
    uint64_t seq = 0;
    size_t ends = 0;
    for (const v1::Event& event : events) {
      EXPECT_EQ(event.seq(), ++seq) << record.id();
      if (event.type() == "ended") ++ends;
    }
    const bool ended = model::IsTerminal(record.state());
    EXPECT_EQ(ends, ended ? 1u : 0u) << record.id();
    if (ended) {
      EXPECT_EQ(events.back().type(), "ended");
      EXPECT_TRUE(model::IsCause(record.termination().cause()));
      EXPECT_EQ(events.back().termination().cause(), record.termination().cause());
      EXPECT_GT(record.ended_unix_ms(), 0);
    } else {
      ++live;
    }
  }
  EXPECT_EQ(host_->agents(), live);
  EXPECT_EQ(host_->Things().size(), 3 * live) << ::testing::PrintToString(host_->Things());
  // Counted down once the end is on record.
  Await([&] { return Run(edge_->Node(Soon()))->live() == live; });
}

}  // namespace dsec::edge::testing
