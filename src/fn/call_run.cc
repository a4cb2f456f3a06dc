// SPDX-License-Identifier: Apache-2.0
#include "fn/call_run.h"

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <map>
#include <set>

#include "base/log.h"
#include "fn/digest.h"
#include "fn/rules.h"

namespace dsec::fn {
namespace {

using runtime::Deadline;
using sandbox::FnReport;
using sandbox::FnRun;

constexpr std::string_view kEverything = "*";
constexpr std::string_view kExecFailed = "fn.exec_failed";
constexpr std::string_view kArtifactGone = "fn.artifact_gone";  // of the compile step; stays here
constexpr std::string_view kWorkerDied = "fn.worker_died";
constexpr std::string_view kWorkerBroken = "fn.worker_broken";
// What shells exit with when a command cannot be executed or found (POSIX, exit status for
// commands).
constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;
// How often artefacts of the cache may be gone by the time they are needed.
constexpr int kMaxCompiles = 3;

std::chrono::nanoseconds Since(MonoTime start) { return std::chrono::steady_clock::now() - start; }

double Seconds(uint64_t usec) { return static_cast<double>(usec) * 1e-6; }

// What the program itself decided. Times depend on how busy the node is.
bool Cacheable(const v1::FnStep& step) { return step.limit() != "wall" && step.limit() != "cpu"; }

// What programs look for wherever they run; a later list stands before an earlier one.
std::vector<std::pair<std::string, std::string>> Env(
    std::initializer_list<const google::protobuf::RepeatedPtrField<v1::KeyValue>*> lists) {
  std::map<std::string, std::string> env = {
      {"PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, {"HOME", "/tmp"}};
  for (const auto* list : lists) {
    for (const v1::KeyValue& pair : *list) env[pair.key()] = pair.value();
  }
  return {env.begin(), env.end()};
}

Pools::Cause CauseOf(const Error& error) {
  if (error.reason() == kWorkerDied) return Pools::Cause::kDied;
  if (error.reason() == kWorkerBroken) return Pools::Cause::kBroken;
  return Pools::Cause::kFailed;
}

}  // namespace

Error CallRun::Fault(Error error, bool retriable) {
  fault_ = true;
  retriable_ = retriable;
  return error;
}

Error CallRun::ExecFault(std::string_view step, const Error& error) {
  return Fault(Error(Code::kFailedPrecondition, "fn.environment",
                     fmt::format("{}: {}", step, error.message()))
                   .WithErrno(error.sys_errno()));
}

runtime::Task<v1::FnResult> CallRun::Execute() {
  auto done = co_await Steps();
  held_.Release();
  result_.set_queue_usec(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(queued_).count()));
  result_.set_attempts(std::max(1u, faults_ + (exhausted_ ? 0 : 1)));
  if (!done.ok()) {
    if (!fault_) co_return std::move(done).error();
    result_.set_verdict(v1::FN_INFRASTRUCTURE);
    result_.set_reason(std::string(done.error().reason()));
    result_.set_message(done.error().message());
    result_.set_retriable(retriable_);
    result_.clear_files();
    result_.clear_missing();
  }
  co_return std::move(result_);
}

runtime::Task<void> CallRun::Steps() {
  const bool compiles = !type_.compile().argv().empty();
  if (compiles) {
    DSEC_CO_TRY(compile_limits_, engine_.backend.Normalize(
                                     MergeLimits(call_.compile_limits(), type_.compile().limits()),
                                     "compile_limits"));
  }
  DSEC_CO_TRY(run_limits_, engine_.backend.Normalize(
                               MergeLimits(call_.limits(), type_.run().limits()), "limits"));
  if (call_.gpu().count() > 0) DSEC_CO_TRY_VOID(engine_.gpus.CheckPossible(call_.gpu()));
  auto resolved = co_await engine_.environments.Resolve(
      call_.has_environment() ? call_.environment() : type_.environment(),
      Deadline::After(engine_.options.resolve_timeout));
  if (!resolved.ok()) {
    if (resolved.error().code() == Code::kCancelled) co_return std::move(resolved).error();
    if (IsLayerError(resolved.error())) {
      std::string field = "environment." + resolved.error().field();
      co_return std::move(resolved).error().WithField(std::move(field));
    }
    co_return Fault(std::move(resolved).error());
  }
  environment_ = std::move(resolved).value();
  for (int i = 0; i < call_.files_size(); ++i) {
    const std::string& artifact = call_.files(i).artifact();
    if (artifact.empty() || engine_.artifacts.Has(artifact)) continue;
    co_return Error(Code::kNotFound, "artifact.not_found",
                    fmt::format("files[{}].artifact: the node has no artefact {}", i, artifact))
        .WithField(fmt::format("files[{}].artifact", i));
  }
  if (!compiles) {
    auto ran = co_await RunWith(nullptr);
    if (!ran.ok()) co_return std::move(ran).error();
    co_return Ok();
  }
  for (int i = 0; i < kMaxCompiles; ++i) {
    auto compiled = co_await Compile();
    if (!compiled.ok()) co_return std::move(compiled).error();
    *result_.mutable_compile() = (*compiled)->step;
    result_.mutable_compile()->set_cached(cached_);
    if ((*compiled)->step.verdict() != v1::FN_OK) {
      result_.set_verdict(v1::FN_COMPILE_ERROR);
      result_.set_message((*compiled)->message);
      co_return Ok();
    }
    auto ran = co_await RunWith(std::move(*compiled));
    if (!ran.ok()) co_return std::move(ran).error();
    if (*ran) co_return Ok();
  }
  co_return Fault(Error(Code::kUnavailable, "fn.artifacts_lost",
                        "artefacts of the compile step were dropped before they were used; the "
                        "bound of the store is too small for what runs"));
}

std::vector<std::string> CallRun::Words(const v1::FnCommand& command) const {
  std::vector<std::string> words;
  for (const std::string& word : command.argv()) {
    if (word == kSourceWord) {
      words.push_back(type_.source());
    } else if (word == kArgsWord) {
      words.insert(words.end(), call_.args().begin(), call_.args().end());
    } else {
      words.push_back(word);
    }
  }
  return words;
}

CallRun::Files CallRun::CallFiles() const {
  Files files;
  for (const v1::FnFile& file : call_.files()) files.push_back(&file);
  return files;
}

std::shared_ptr<Pools::Pool> CallRun::PoolFor(bool run) {
  PoolSpec spec;
  spec.environment = environment_;
  if (run) spec.warm = type_.warm();
  if (run && call_.gpu().count() > 0) {
    spec.gpu = call_.gpu().kind().empty() ? std::string(kWholeGpu) : call_.gpu().kind();
  }
  // What a type wants kept are workers of its own environment that its calls end up on.
  v1::FnPoolSize size = type_.pool();
  if (call_.has_environment() || !spec.gpu.empty() || spec.warm.kind() != type_.warm().kind()) {
    size.set_min(0);
  }
  return engine_.pools.Find(std::move(spec), size);
}

std::string CallRun::CompileKey() const {
  FieldDigest digest;
  digest.Add(environment_.SerializeAsString());
  digest.Add(type_.source());
  digest.Add(type_.compile().SerializeAsString());
  digest.Add(compile_limits_.SerializeAsString());
  digest.Add(call_.code());
  for (const v1::FnFile& file : call_.files()) {
    digest.Add(file.path());
    digest.Add(file.mode());
    digest.Add(file.artifact().empty() ? ArtifactDigest(file.content()) : file.artifact());
  }
  return digest.Finish();
}

runtime::Task<std::shared_ptr<const Compiled>> CallRun::Compile() {
  key_ = CompileKey();
  while (true) {
    if (auto known = engine_.cache.Find(key_)) {
      engine_.metrics.cache_hits.Add();
      cached_ = true;
      co_return known;
    }
    const auto under_way = engine_.cache.Flight(key_);
    if (under_way == nullptr) break;
    engine_.metrics.cache_joins.Add();
    const MonoTime start = std::chrono::steady_clock::now();
    auto woken = co_await under_way->done.Wait(Deadline::Never());
    queued_ += Since(start);
    if (!woken.ok()) co_return std::move(woken).error();
    cached_ = true;
    if (under_way->outcome != nullptr) co_return under_way->outcome;
    if (under_way->fault) co_return Fault(*under_way->fault, under_way->retriable);
  }
  engine_.metrics.cache_misses.Add();
  cached_ = false;
  // Whatever becomes of this call, those who wait hear of it.
  struct Flying {
    ~Flying() {
      if (flight != nullptr) cache.End(key, flight);
    }
    CompileCache& cache;
    const std::string& key;
    std::shared_ptr<CompileFlight> flight;
  };
  Flying flying{engine_.cache, key_, engine_.cache.Begin(key_)};
  auto compiled = co_await CompileNow();
  if (!compiled.ok()) {
    if (fault_) {
      flying.flight->fault = compiled.error();
      flying.flight->retriable = retriable_;
    }
    co_return std::move(compiled).error();
  }
  flying.flight->outcome = *compiled;
  if (!Cacheable((*compiled)->step)) co_return compiled;
  if ((*compiled)->files.empty()) {
    engine_.cache.Put(key_, *compiled);
    co_return compiled;
  }
  // The files go to the disk while this call goes on; until then equal ones join the flight.
  flying.flight->done.Set();
  (void)runtime::Spawn(engine_.background, engine_.home,
                       StoreCompiled(engine_, key_, std::move(flying.flight)));
  co_return compiled;
}

boost::asio::awaitable<void> CallRun::StoreCompiled(const Engine& engine, std::string key,
                                                    std::shared_ptr<CompileFlight> flight) {
  auto store = [&engine, compiled = flight->outcome]() -> Result<std::shared_ptr<const Compiled>> {
    auto stored = std::make_shared<Compiled>();
    stored->step = compiled->step;
    for (const v1::FnFile& file : compiled->files) {
      DSEC_TRY(std::string digest, engine.artifacts.Put(file.content()));
      v1::FnFile& kept = stored->files.emplace_back();
      kept.set_path(file.path());
      kept.set_mode(file.mode());
      kept.set_artifact(std::move(digest));
    }
    return std::shared_ptr<const Compiled>(std::move(stored));
  };
  auto stored = co_await engine.disk.Run(std::move(store), Deadline::Never());
  if (stored.ok()) {
    engine.cache.Put(key, std::move(stored).value());
  } else {
    log::Warn("fn.compile_not_cached", {{"error", stored.error()}});
  }
  engine.cache.End(key, flight);
}

runtime::Task<std::shared_ptr<const Compiled>> CallRun::CompileNow() {
  FnRun run;
  run.argv = Words(type_.compile());
  run.env = Env({&type_.compile().env()});
  run.limits = compile_limits_;
  run.code_path = type_.source();
  run.code = call_.code();
  const auto& artifacts = type_.compile().artifacts();
  run.fetch.assign(artifacts.begin(), artifacts.end());
  if (run.fetch.empty()) run.fetch.emplace_back(kEverything);
  run.fetch_bytes = engine_.options.fetch_bytes;
  auto report = co_await Step(PoolFor(false), std::move(run), CallFiles());
  if (!report.ok()) {
    if (report.error().reason() == kExecFailed) co_return ExecFault("compile", report.error());
    co_return std::move(report).error();
  }
  v1::FnStep& step = report->step;
  engine_.metrics.compile_seconds.Observe(Seconds(step.wall_usec()));
  if (step.verdict() == v1::FN_WRONG_EXIT &&
      (step.exit_code() == kNotFound || step.exit_code() == kNotExecutable)) {
    // A compiler has its own codes; these are what a shell says that did not find one.
    co_return Fault(
        Error(Code::kFailedPrecondition, "fn.environment",
              fmt::format("compile: {} ended with {}, as when a program of it cannot be found",
                          type_.compile().argv(0), step.exit_code())));
  }
  // A call that waits for devices keeps no worker from those that hold some.
  if (call_.gpu().count() > 0 || call_.compile_only()) held_.Release();
  auto compiled = std::make_shared<Compiled>();
  if (step.verdict() != v1::FN_OK) {
    step.set_verdict(v1::FN_COMPILE_ERROR);
  } else if (!report->missing.empty()) {
    step.set_verdict(v1::FN_COMPILE_ERROR);
    compiled->message = fmt::format("the compile command ended well and left no usable {}",
                                    report->missing.front());
  } else {
    for (sandbox::FnFetched& fetched : report->files) {
      v1::FnFile& file = compiled->files.emplace_back();
      file.set_path(std::move(fetched.path));
      file.set_content(std::move(fetched.content));
      file.set_mode(fetched.mode);
    }
  }
  compiled->step = std::move(step);
  co_return std::shared_ptr<const Compiled>(std::move(compiled));
}

runtime::Task<bool> CallRun::RunWith(std::shared_ptr<const Compiled> compiled) {
  if (call_.compile_only()) {
    for (const v1::FnFile& file : compiled->files) {
      auto added = co_await AddFile(file);
      if (!added.ok()) {
        if (added.error().code() != Code::kNotFound) co_return std::move(added).error();
        result_.clear_files();
        engine_.cache.Drop(key_);
        co_return false;
      }
    }
    result_.set_verdict(v1::FN_OK);
    co_return true;
  }
  FnRun run;
  run.argv = Words(type_.run());
  run.env = Env({&type_.run().env(), &call_.env()});
  run.limits = run_limits_;
  const auto& words = type_.run().argv();
  if (compiled == nullptr || std::find(words.begin(), words.end(), kSourceWord) != words.end()) {
    run.code_path = type_.source();
    run.code = call_.code();
  }
  run.stdin_bytes = call_.stdin();
  run.fetch.assign(call_.fetch().begin(), call_.fetch().end());
  run.fetch_bytes = engine_.options.fetch_bytes;
  Files files = CallFiles();
  if (compiled != nullptr) {
    // What the compile step made of a file stands in place of it.
    std::set<std::string_view> made;
    for (const v1::FnFile& file : compiled->files) made.insert(file.path());
    std::erase_if(files, [&](const v1::FnFile* file) { return made.contains(file->path()); });
    if (made.contains(run.code_path)) run.code_path.clear();
    for (const v1::FnFile& file : compiled->files) files.push_back(&file);
  }
  GpuAllocator::Grant devices;
  if (call_.gpu().count() > 0) {
    const MonoTime start = std::chrono::steady_clock::now();
    auto granted = co_await engine_.gpus.Acquire(call_.gpu(), Deadline::Never());
    queued_ += Since(start);
    if (!granted.ok()) co_return std::move(granted).error();
    devices = std::move(*granted);
    run.devices = devices.Files();
  }
  auto report = co_await Step(PoolFor(true), std::move(run), std::move(files));
  if (!report.ok()) {
    const Error& error = report.error();
    if (error.reason() == kArtifactGone) {
      engine_.cache.Drop(key_);
      co_return false;
    }
    if (error.reason() != kExecFailed) co_return std::move(report).error();
    if (type_.run().argv(0).starts_with('/')) co_return ExecFault("run", error);
    // The program of the call is none.
    v1::FnStep& step = *result_.mutable_run();
    step.set_verdict(v1::FN_WRONG_EXIT);
    step.set_exit_code(error.sys_errno() == ENOENT ? kNotFound : kNotExecutable);
    result_.set_verdict(step.verdict());
    result_.set_message(error.message());
    co_return true;
  }
  held_.Release();
  engine_.metrics.run_seconds.Observe(Seconds(report->step.wall_usec()));
  for (sandbox::FnFetched& fetched : report->files) {
    v1::FnFile file;
    file.set_path(std::move(fetched.path));
    file.set_content(std::move(fetched.content));
    file.set_mode(fetched.mode);
    DSEC_CO_TRY_VOID(co_await AddFile(std::move(file)));
  }
  for (std::string& path : report->missing) result_.add_missing(std::move(path));
  result_.set_verdict(report->step.verdict());
  *result_.mutable_run() = std::move(report->step);
  co_return true;
}

runtime::Task<void> CallRun::AddFile(v1::FnFile file) {
  if (call_.keep_artifacts() && file.artifact().empty()) {
    auto put = [&artifacts = engine_.artifacts, bytes = std::move(*file.mutable_content())] {
      return artifacts.Put(bytes);
    };
    auto digest = co_await engine_.disk.Run(std::move(put), Deadline::Never());
    if (!digest.ok() && digest.error().code() == Code::kCancelled) {
      co_return std::move(digest).error();
    }
    if (!digest.ok()) co_return Fault(std::move(digest).error());
    file.clear_content();
    file.set_artifact(std::move(*digest));
  } else if (!call_.keep_artifacts() && !file.artifact().empty()) {
    auto get = [&artifacts = engine_.artifacts, digest = file.artifact()] {
      return artifacts.Get(digest);
    };
    DSEC_CO_TRY(*file.mutable_content(),
                co_await engine_.disk.Run(std::move(get), Deadline::Never()));
    file.clear_artifact();
  }
  *result_.add_files() = std::move(file);
  co_return Ok();
}

runtime::Task<CallRun::Files> CallRun::Load(Files files,
                                            std::vector<std::unique_ptr<v1::FnFile>>* loaded) {
  for (const v1::FnFile*& file : files) {
    if (file->artifact().empty()) continue;
    auto get = [&artifacts = engine_.artifacts, digest = file->artifact()] {
      return artifacts.Get(digest);
    };
    auto bytes = co_await engine_.disk.Run(std::move(get), Deadline::Never());
    if (!bytes.ok()) {
      if (bytes.error().code() != Code::kNotFound) co_return std::move(bytes).error();
      const auto& given = call_.files();
      const auto mine = std::find_if(given.begin(), given.end(),
                                     [&](const v1::FnFile& other) { return &other == file; });
      if (mine == given.end()) {
        co_return Error(Code::kUnavailable, kArtifactGone, bytes.error().message());
      }
      co_return std::move(bytes).error().WithField(
          fmt::format("files[{}].artifact", mine - given.begin()));
    }
    auto with_content = std::make_unique<v1::FnFile>();
    with_content->set_path(file->path());
    with_content->set_mode(file->mode());
    with_content->set_content(std::move(*bytes));
    file = with_content.get();
    loaded->push_back(std::move(with_content));
  }
  co_return files;
}

runtime::Task<FnReport> CallRun::Step(std::shared_ptr<Pools::Pool> pool, FnRun run, Files files) {
  while (true) {
    auto report = co_await StepOnce(pool, run, files);
    if (report.ok() || !tried_) co_return report;
    ++faults_;
    if (report.error().reason() == kWorkerDied) ++deaths_;
    if (faults_ < engine_.options.attempts) {
      engine_.metrics.retried.Add();
      continue;
    }
    exhausted_ = true;
    if (deaths_ < faults_) co_return Fault(std::move(report).error());
    co_return Fault(
        Error(Code::kInternal, "fn.poison",
              fmt::format("each of {} workers died of it: {}", faults_, report.error().message())),
        false);
  }
}

runtime::Task<FnReport> CallRun::StepOnce(std::shared_ptr<Pools::Pool> pool, const FnRun& run,
                                          const Files& files) {
  tried_ = false;
  const MonoTime start = std::chrono::steady_clock::now();
  Pools::Request request{call_.principal(), begun_};
  auto lease = co_await engine_.pools.Acquire(std::move(pool), std::move(request), std::move(held_),
                                              Deadline::Never());
  queued_ += Since(start);
  if (!lease.ok()) {
    if (lease.error().reason() == "fn.no_worker") co_return Fault(std::move(lease).error());
    co_return std::move(lease).error();
  }
  begun_ = true;
  std::vector<std::unique_ptr<v1::FnFile>> loaded;
  FnRun attempt = run;
  DSEC_CO_TRY(attempt.files, co_await Load(files, &loaded));
  if (lease->used_before()) engine_.metrics.reused.Add();
  lease->SetUsed();
  engine_.metrics.running.Add(1);
  auto report = co_await lease->worker().Run(
      std::move(attempt), Deadline::After(std::chrono::milliseconds(run.limits.wall_ms()) +
                                          engine_.options.step_slack));
  engine_.metrics.running.Add(-1);
  if (!report.ok()) {
    if (report.error().reason() == kExecFailed) {
      lease->SetClean();
      co_return std::move(report).error();
    }
    tried_ = report.error().code() != Code::kCancelled;
    if (tried_) {
      log::Warn("fn.step_failed", {{"worker", lease->worker().name()}, {"error", report.error()}});
    }
    lease->Discard(CauseOf(report.error()));
    co_return std::move(report).error();
  }
  const v1::FnVerdict verdict = report->step.verdict();
  if (verdict == v1::FN_INFRASTRUCTURE || verdict == v1::FN_VERDICT_UNSPECIFIED) {
    tried_ = true;
    lease->Discard(Pools::Cause::kBroken);
    co_return Error(Code::kUnavailable, "fn.step_failed",
                    report->dirt.empty() ? "the worker gave no verdict" : report->dirt);
  }
  if (report->dirty) {
    log::Warn("fn.worker_dirty", {{"worker", lease->worker().name()}, {"why", report->dirt}});
    lease->Discard(Pools::Cause::kDirty);
  } else {
    lease->SetClean();
    held_ = std::move(*lease);
  }
  co_return report;
}

}  // namespace dsec::fn
