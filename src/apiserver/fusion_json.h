// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "http/json_writer.h"

namespace dsec::apiserver {

// The bodies of SandboxFusion's API as its public clients write and read them. Members that they
// send and we do not know are ignored, as there; numbers of seconds may be fractions.

// Their only bound on time is that of the wall clock: cpu_ms is set so that a program on many cores
// stays within it, but to no more than `max_cpu_ms`.
Result<v1::FnCall> ReadFusionRun(std::string_view body, uint64_t max_cpu_ms);

struct FusionTest {
  v1::FnCall call;  // stdin, input files, names of output files
  std::string stdout;
  bool has_stdout = false;
  std::vector<std::pair<std::string, std::string>> files;  // expected, by path
  std::string info;                                        // the test itself as JSON
};
struct FusionSubmission {
  std::string id;          // as JSON: a number or a string
  std::string code;        // taken from the completion
  std::string_view taken;  // how: fenced, incomplete_fenced, heuristic, empty
  bool run_all = false;    // go on after the first test that fails
  std::vector<FusionTest> tests;
};
// Tests come with the request (config.provided_data.test); data sets of the server's own are not
// there: kNotFound fusion.no_dataset.
Result<FusionSubmission> ReadFusionSubmission(std::string_view body, uint64_t max_cpu_ms);

// Whether what a program wrote is what was expected: white space at the ends of lines and lines of
// nothing else at the end do not count.
bool SameText(std::string_view written, std::string_view expected);

// The reply of run_code, also a part of that of submit.
void WriteFusionResult(http::JsonWriter& json, const v1::FnResult& result);
// 422 of FastAPI: {"detail":[{"loc":["body",FIELD],"msg":...,"type":...}]}.
std::string FusionRefusal(const Error& error);

}  // namespace dsec::apiserver
