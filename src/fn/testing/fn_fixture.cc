// SPDX-License-Identifier: Apache-2.0
#include "fn/testing/fn_fixture.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace dsec::fn::testing {
namespace {

boost::asio::awaitable<void> Deliver(runtime::Task<v1::FnResult> task,
                                     std::promise<Result<v1::FnResult>> promise) {
  auto result = co_await std::move(task);
  promise.set_value(std::move(result));
}

}  // namespace

FnFixture::FnFixture() : dir_(std::move(os::TempDir::Create("dsec-fn")).value()) {
  std::filesystem::create_directories(dir_.path() + "/types");
  options_.state_dir = dir_.path() + "/state";
  options_.types_dirs = {dir_.path() + "/types"};
  options_.gpu_root = dir_.path() + "/root";
  options_.clock = &clock_;
  options_.tick = std::chrono::hours(1);  // tests call Tick
  options_.pools.workers_max = 4;
  options_.pools.settle = std::chrono::milliseconds(0);
  options_.pools.make_attempts = 3;
  options_.pools.make_backoff_min = std::chrono::milliseconds(1);
  options_.pools.make_backoff_max = std::chrono::milliseconds(8);
  WriteType("plain", R"({"name": "plain", "aliases": ["p"], "environment": {"base": "base:1"},
    "source": "main.txt", "run": {"argv": ["/bin/run", "{source}", "{args}"]}})");
  WriteType("compiled", R"({"name": "compiled", "environment": {"base": "base:1"},
    "source": "main.txt", "compile": {"argv": ["/bin/cc", "{source}"]},
    "run": {"argv": ["./prog", "{args}"], "env": {"A": "type", "B": "type"}}})");
  WriteType("other", R"({"name": "other", "environment": {"base": "other:1"},
    "source": "main.txt", "run": {"argv": ["/bin/run", "{source}"]}})");
}

FnFixture::~FnFixture() {
  if (service_ != nullptr) Shut();
}

void FnFixture::WriteType(const std::string& name, const std::string& json) {
  std::ofstream(dir_.path() + "/types/" + name + ".json") << json;
}

void FnFixture::Start() {
  metrics_ = std::make_unique<metrics::Registry>();
  options_.metrics = metrics_.get();
  shards_ = std::make_unique<runtime::Shards>(2);
  auto service = FnService::Open(options_, *shards_, backend_);
  ASSERT_TRUE(service.ok()) << service.error().ToString();
  service_ = std::move(*service);
  auto started = service_->Start();
  ASSERT_TRUE(started.ok()) << started.error().ToString();
  removed_ = std::move(*started);
}

void FnFixture::Shut() {
  auto stopped = Wait(service_->Stop(Soon()));
  EXPECT_TRUE(stopped.ok()) << stopped.error().ToString();
  Crash();
}

void FnFixture::Crash() {
  shards_->Stop();
  service_->LetGo();
  shards_.reset();
  service_.reset();
}

v1::FnCall FnFixture::CallOf(const std::string& type, const std::string& code) {
  v1::FnCall call;
  call.set_type(type);
  call.set_code(code);
  return call;
}

Result<v1::FnResult> FnFixture::Call(v1::FnCall call) {
  return Wait(service_->Call(std::move(call), Soon()));
}

v1::FnResult FnFixture::Run(const std::string& type, const std::string& code) {
  auto result = Call(CallOf(type, code));
  EXPECT_TRUE(result.ok()) << result.error().ToString();
  return result.ok() ? *result : v1::FnResult();
}

std::future<Result<v1::FnResult>> FnFixture::Begin(v1::FnCall call) {
  std::promise<Result<v1::FnResult>> promise;
  auto future = promise.get_future();
  EXPECT_TRUE(runtime::Spawn(gate_, shards_->at(next_shard_++ % shards_->size()),
                             Deliver(service_->Call(std::move(call), Soon()), std::move(promise))));
  return future;
}

std::future<Result<v1::FnResult>> FnFixture::BeginCancellable(v1::FnCall call,
                                                              runtime::Running* running) {
  std::promise<Result<v1::FnResult>> promise;
  auto future = promise.get_future();
  *running = runtime::SpawnCancellable(
      gate_, shards_->at(0), Deliver(service_->Call(std::move(call), Soon()), std::move(promise)));
  return future;
}

void FnFixture::Await(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "it did not come";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void FnFixture::Settle() {
  // What was posted to a shard before is done before; a call hops to the home shard once.
  const auto nothing = []() -> runtime::Task<void> { co_return Ok(); };
  for (size_t i = 0; i < 3; ++i) {
    for (size_t shard = 0; shard < shards_->size(); ++shard) {
      EXPECT_TRUE(runtime::BlockOn(shards_->at(shard), nothing()).ok());
    }
  }
}

v1::FnPoolInfo FnFixture::PoolOf(const std::string& base) {
  v1::FnPoolInfo found;
  for (const v1::FnPoolInfo& info : service_->Pools()) {
    if (info.environment().base() == "id-of-" + base) found = info;
  }
  return found;
}

uint64_t FnFixture::Count(const std::string& name, const std::string& label) {
  return static_cast<uint64_t>(Gauge(label.empty() ? name : name + "{" + label + "}"));
}

double FnFixture::Gauge(const std::string& name) {
  std::istringstream lines(metrics_->RenderPrometheus());
  std::string line;
  while (std::getline(lines, line)) {
    if (line.starts_with(name + " ")) return std::stod(line.substr(name.size() + 1));
  }
  return 0;
}

}  // namespace dsec::fn::testing
