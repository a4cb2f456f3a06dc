// SPDX-License-Identifier: Apache-2.0
// Calls in an interpreter that waits for them.
#include <gmock/gmock.h>
#include <signal.h>

#include "sandbox/testing/warm_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;

class FnWarm : public testing::WarmTest {
 protected:
  void SetUp() override {
    WarmTest::SetUp();
    if (fncall_ == nullptr) return;
    worker_ = Warm({"json", "random", "multiprocessing"});
    ASSERT_NE(worker_, nullptr);
  }
  void TearDown() override {
    worker_.reset();
    WarmTest::TearDown();
  }

  std::unique_ptr<FnWorker> worker_;
};

TEST_F(FnWarm, Code_RunsAsMainWithItsOwnArgumentsAndEnvironment) {
  FnRun run = Code(
      "import sys, os, json\n"
      "print(__name__, __file__, sys.argv, os.getcwd(), sorted(os.environ.items()))\n"
      "print(sys.stdin.read(), end='')\n"
      "sys.exit(4)\n");
  run.argv = {"python3", "main.py", "one", "t wo"};
  run.env = {{"KEY", "value"}};
  run.stdin_bytes = "given";
  const FnReport report = Must(*worker_, run);
  EXPECT_EQ(report.step.verdict(), v1::FN_WRONG_EXIT) << report.step.stderr().data();
  EXPECT_EQ(report.step.exit_code(), 4);
  EXPECT_EQ(report.step.stdout().data(),
            "__main__ main.py ['main.py', 'one', 't wo'] /work [('KEY', 'value')]\ngiven");
  EXPECT_EQ(report.step.stderr().data(), "");
}

TEST_F(FnWarm, Errors_LookAsFromTheInterpreterItself) {
  FnReport report = Must(*worker_, Code("def f():\n  raise ValueError('x')\nf()\n"));
  EXPECT_EQ(report.step.exit_code(), 1);
  EXPECT_EQ(report.step.stderr().data(),
            "Traceback (most recent call last):\n"
            "  File \"main.py\", line 3, in <module>\n    f()\n"
            "  File \"main.py\", line 2, in f\n    raise ValueError('x')\n"
            "ValueError: x\n");
  report = Must(*worker_, Code("if\n"));
  EXPECT_EQ(report.step.exit_code(), 1);
  EXPECT_THAT(report.step.stderr().data(), HasSubstr("SyntaxError"));
}

// What the interpreter does for a program at its end, the call gets as well.
TEST_F(FnWarm, End_IsThatOfAnInterpreter) {
  struct Row {
    const char* code;
    int exit;
    const char* out;
    const char* err;
  };
  const std::vector<Row> rows = {
      {"import sys\nsys.exit('said')\n", 1, "", "said\n"},
      {"raise SystemExit(259)\n", 3, "", ""},
      {"raise SystemExit\n", 0, "", ""},
      {"import threading, time\n"
       "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
       "print('main')\n",
       0, "main\nthread\n", ""},
      {"import atexit\natexit.register(print, 'at exit')\nraise SystemExit(2)\n", 2, "at exit\n",
       ""},
      {"class A:\n  def __del__(self): print('gone', N)\nN = 7\na = A()\na.me = a\n", 0, "gone 7\n",
       ""},
      {"import os, sys\nf = open('kept', 'w')\nf.write('text')\nf.me = f\n"
       "import atexit\natexit.register(lambda: None)\n",
       0, "", ""},
      {"import os\nos._exit = os.kill = None\nimport gc\ngc.collect = None\nprint(1)\n", 0, "1\n",
       ""},
      {"import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1/0\n", 1,
       "hook ZeroDivisionError\n", ""},
      {"import sys\nsys.stdout.close()\n", 0, "", ""},
      {"import os\nif os.fork() == 0: print('child')\nelse: os.wait(); print('parent')\n", 0,
       "child\nparent\n", ""},
  };
  for (const Row& row : rows) {
    FnRun run = Code(row.code);
    run.fetch = {"kept"};
    const FnReport report = Must(*worker_, run);
    EXPECT_EQ(report.step.exit_code(), row.exit) << row.code;
    EXPECT_EQ(report.step.stdout().data(), row.out) << row.code;
    EXPECT_EQ(report.step.stderr().data(), row.err) << row.code;
    if (std::string_view(row.code).find("kept") != std::string_view::npos) {
      ASSERT_EQ(report.files.size(), 1u) << row.code;
      EXPECT_EQ(report.files[0].content, "text");
    }
  }
  FnReport report = Must(*worker_, Code("raise KeyboardInterrupt\n"));
  EXPECT_EQ(report.step.signal(), SIGINT);
  EXPECT_THAT(report.step.stderr().data(), HasSubstr("KeyboardInterrupt"));
  report = Must(*worker_, Code("import os\nprint('lost')\nos.close(1)\n"));
  EXPECT_EQ(report.step.exit_code(), 120);
}

TEST_F(FnWarm, Calls_SeeNothingOfOneAnother) {
  const std::string_view code =
      "import json, os, random, sys\n"
      "print(hasattr(json, 'planted'), os.path.exists('/tmp/planted'), os.getpid(),\n"
      "      os.listdir('/proc/self/fd')[:3], len(os.listdir('/proc/self/fd')), random.random())\n"
      "json.planted = 1\n"
      "open('/tmp/planted', 'w').close()\n"
      "sys.modules['re'] = None\n"
      "if os.fork() == 0:\n"
      "    os.setsid()\n"
      "    while True: pass\n";
  std::set<std::string> seen;
  for (int i = 0; i < 3; ++i) {
    const FnReport report = Must(*worker_, Code(code));
    EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.stderr().data();
    const std::string out = report.step.stdout().data();
    EXPECT_THAT(out, ::testing::StartsWith("False False 2 ['0', '1', '2'] 4 "));
    seen.insert(out);
  }
  EXPECT_EQ(seen.size(), 3u) << "each has random numbers of its own";
}

TEST_F(FnWarm, Limits_AreThoseOfTheCallWithoutTheInterpreter) {
  FnRun run = Code("x = bytearray(20 << 20)\n");
  run.limits.set_memory_bytes(32 << 20);
  FnReport report = Must(*worker_, run);
  EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.stderr().data();
  EXPECT_GT(report.step.memory_peak_bytes(), 19u << 20);
  EXPECT_LT(report.step.memory_peak_bytes(), 26u << 20);
  run.code = "x = bytearray(100 << 20)\n";
  EXPECT_EQ(Must(*worker_, run).step.verdict(), v1::FN_MEMORY_LIMIT);
  run.code = "while True: pass\n";
  run.limits.set_cpu_ms(300);
  EXPECT_EQ(Must(*worker_, run).step.limit(), "cpu");
  run.code = "import time\ntime.sleep(60)\n";
  run.limits.set_wall_ms(200);
  EXPECT_EQ(Must(*worker_, run).step.limit(), "wall");
  run = Code("f = open('f', 'wb')\nf.write(bytes(2000))\nf.close()\n");
  run.limits.set_file_bytes(1000);
  report = Must(*worker_, run);
  EXPECT_NE(report.step.verdict(), v1::FN_OK);
  run = Code("import multiprocessing\nprint(multiprocessing.Pool(2).map(abs, [-1, -2]))\n");
  report = Must(*worker_, run);
  EXPECT_EQ(report.step.stdout().data(), "[1, 2]\n") << report.step.stderr().data();
}

TEST_F(FnWarm, MissingModule_IsToldWhenTheWorkerIsMade) {
  FnWorkerSpec spec;
  spec.environment.set_base("test-python:1");
  spec.warm.set_kind("python");
  spec.warm.add_argv("/usr/bin/python3");
  spec.warm.add_imports("no_such_module");
  auto made = On(fncall_->MakeWorker(spec, runtime::Deadline::After(std::chrono::seconds(30))));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().reason(), "fn.warm_failed");
  EXPECT_THAT(made.error().message(), HasSubstr("no_such_module"));
  spec.warm.set_kind("ruby");
  made = On(fncall_->MakeWorker(spec, runtime::Deadline::After(std::chrono::seconds(30))));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().field(), "warm.kind");
}

}  // namespace
}  // namespace dsec::sandbox
