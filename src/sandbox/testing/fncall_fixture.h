// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "sandbox/backends/fncall/fncall_backend.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox::testing {

// FnCall on the node of ContainerTest. What is left on the host after a test is its failure.
class FnCallTest : public ContainerTest {
 protected:
  void SetUp() override;
  void TearDown() override;

  void OpenFnCall();
  // Both backends, as a daemon that starts.
  void OpenAnew();
  std::unique_ptr<FnWorker> MakeWorker(v1::FnWarm warm = {},
                                       const std::string& base = "test-base:1");
  // A run of `sh -c script` with the backend's default limits.
  FnRun Shell(const std::string& script);
  // The same with a program of the layer.
  FnRun Program(std::vector<std::string> argv);
  Result<FnReport> Run(FnWorker& worker, FnRun run);
  // A report, or a failed test.
  FnReport Must(FnWorker& worker, FnRun run);

  std::unique_ptr<FnCallBackend> fncall_;
};

}  // namespace dsec::sandbox::testing
