// SPDX-License-Identifier: Apache-2.0
#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox::testing {

void FnCallTest::SetUp() {
  ContainerTest::SetUp();
  if (backend_ != nullptr) OpenFnCall();
}

void FnCallTest::TearDown() {
  fncall_.reset();
  ContainerTest::TearDown();
}

void FnCallTest::OpenFnCall() {
  fncall_.reset();
  auto opened = FnCallBackend::Open({}, backend_->parts(), layers_->mounts());
  ASSERT_TRUE(opened.ok()) << opened.error().ToString();
  fncall_ = std::move(*opened);
}

void FnCallTest::OpenAnew() {
  fncall_.reset();
  Open();
  if (backend_ != nullptr) OpenFnCall();
}

std::unique_ptr<FnWorker> FnCallTest::MakeWorker(v1::FnWarm warm, const std::string& base) {
  FnWorkerSpec spec;
  spec.environment.set_base(base);
  spec.warm = std::move(warm);
  auto made =
      On(fncall_->MakeWorker(std::move(spec), runtime::Deadline::After(std::chrono::seconds(30))));
  EXPECT_TRUE(made.ok()) << made.error().ToString();
  return made.ok() ? std::move(*made) : nullptr;
}

FnRun FnCallTest::Program(std::vector<std::string> argv) {
  FnRun run;
  run.argv = std::move(argv);
  run.env = {{"PATH", "/usr/bin:/bin"}};
  run.limits = fncall_->Normalize({}, "").value();
  run.fetch_bytes = 1 << 20;
  return run;
}

FnRun FnCallTest::Shell(const std::string& script) { return Program({"sh", "-c", script}); }

Result<FnReport> FnCallTest::Run(FnWorker& worker, FnRun run) {
  return On(worker.Run(std::move(run), runtime::Deadline::After(std::chrono::seconds(60))));
}

FnReport FnCallTest::Must(FnWorker& worker, FnRun run) {
  auto report = Run(worker, std::move(run));
  EXPECT_TRUE(report.ok()) << report.error().ToString();
  return report.ok() ? std::move(*report) : FnReport();
}

}  // namespace dsec::sandbox::testing
