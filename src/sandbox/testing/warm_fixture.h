// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox::testing {

// FnCall with a layer that holds a Python.
class WarmTest : public FnCallTest {
 protected:
  void SetUp() override {
    if (auto layers = TestLayers::Get(); layers.ok() && WhatIsMissing().empty())
      ASSERT_TRUE((*layers)->AddPython().ok());
    FnCallTest::SetUp();
  }
  // `options` stand between the interpreter and its program.
  static v1::FnWarm WarmOf(const std::vector<std::string>& imports,
                           const std::vector<std::string>& options = {}) {
    v1::FnWarm warm;
    warm.set_kind("python");
    warm.add_argv("/usr/bin/python3");
    for (const std::string& option : options) warm.add_argv(option);
    for (const std::string& name : imports) warm.add_imports(name);
    return warm;
  }
  std::unique_ptr<FnWorker> Warm(const std::vector<std::string>& imports) {
    return MakeWorker(WarmOf(imports), "test-python:1");
  }
  Result<std::unique_ptr<FnWorker>> TryWarm(
      v1::FnWarm warm, std::chrono::milliseconds time = std::chrono::seconds(30)) {
    FnWorkerSpec spec;
    spec.environment.set_base("test-python:1");
    spec.warm = std::move(warm);
    return On(fncall_->MakeWorker(std::move(spec), runtime::Deadline::After(time)));
  }
  FnRun Code(std::string_view code) {
    FnRun run = Program({"/usr/bin/python3", "main.py"});
    run.code_path = "main.py";
    run.code = code;
    return run;
  }
};

}  // namespace dsec::sandbox::testing
