// SPDX-License-Identifier: Apache-2.0
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <openssl/sha.h>

#include <array>
#include <utility>

#include "base/utf8.h"
#include "edge/edge.h"
#include "model/lifecycle.h"

namespace dsec::edge {
namespace {

constexpr size_t kMaxText = 1024;

struct GoneReason {
  std::string_view cause;
  std::string_view reason;
};
constexpr std::array<GoneReason, 13> kGoneReasons = {{
    {model::cause::kUserStop, "sandbox.ended.user_stop"},
    {model::cause::kTtl, "sandbox.ended.ttl"},
    {model::cause::kIdle, "sandbox.ended.idle"},
    {model::cause::kUnclaimed, "sandbox.ended.unclaimed"},
    {model::cause::kEntrypointExit, "sandbox.ended.entrypoint_exit"},
    {model::cause::kCreateFailed, "sandbox.ended.create_failed"},
    {model::cause::kOom, "sandbox.ended.oom"},
    {model::cause::kAgentDied, "sandbox.ended.agent_died"},
    {model::cause::kPurged, "sandbox.ended.purged"},
    {model::cause::kNodeLost, "sandbox.ended.node_lost"},
    {model::cause::kHostRestarted, "sandbox.ended.host_restarted"},
    {model::cause::kJobEnded, "sandbox.ended.job_ended"},
    {model::cause::kDrained, "sandbox.ended.drained"},
}};

// Maps have no order of their own.
void AppendCanonical(const google::protobuf::MessageLite& message, std::string& out) {
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
}

std::string Sha256(const std::string& bytes) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

std::string EndedText(const v1::Termination& termination) {
  std::string text = fmt::format("the sandbox was ended by {}", termination.cause());
  if (termination.limit() != 0) text += fmt::format(", limit {}", termination.limit());
  if (!termination.message().empty()) text += ": " + termination.message();
  return text;
}

}  // namespace

Error StoppingError() {
  return Error(Code::kUnavailable, "edge.stopping", "this daemon is being stopped");
}

Error FencedError() {
  return Error(Code::kUnavailable, "edge.fencing", "the node has taken a new epoch meanwhile");
}

Error NotFoundError(std::string_view id) {
  return Error(Code::kNotFound, "sandbox.not_found",
               fmt::format("there is no sandbox {}", SafeText(id)));
}

Result<void> CheckRunning(const Sandbox& sandbox) {
  switch (sandbox.state()) {
    case v1::STATE_RUNNING:
      // Reached, but not yet on record.
      if (sandbox.create_done) return Ok();
      [[fallthrough]];
    case v1::STATE_PENDING:
    case v1::STATE_STARTING:
      return Error(Code::kConflict, "sandbox.not_ready",
                   fmt::format("{} is not ready yet", sandbox.id()));
    case v1::STATE_STOPPING:
      if (sandbox.stop.cause() != model::cause::kUserStop) return GoneError(sandbox.stop);
      return Error(Code::kConflict, "sandbox.stopping",
                   fmt::format("{} is stopping", sandbox.id()));
    default:
      return GoneError(sandbox.stop);
  }
}

Error GoneError(const v1::Termination& termination) {
  for (const GoneReason& row : kGoneReasons) {
    if (row.cause == termination.cause())
      return Error(Code::kGone, row.reason, EndedText(termination));
  }
  return Error(Code::kGone, "sandbox.ended", EndedText(termination));
}

std::string CreateDigest(const v1::CreateRequest& request) {
  std::string bytes = request.project();
  bytes.push_back('\0');
  AppendCanonical(request.spec(), bytes);
  return Sha256(bytes);
}

std::string ExecDigest(v1::ExecRequest& request) {
  // A script may have megabytes: it is not copied for this.
  const std::string digest = std::move(*request.mutable_request_digest());
  const uint64_t wait_ms = request.wait_ms();
  const uint64_t max_bytes = request.max_bytes();
  request.clear_request_digest();
  request.clear_wait_ms();
  request.clear_max_bytes();
  std::string bytes;
  AppendCanonical(request, bytes);
  request.set_request_digest(digest);
  request.set_wait_ms(wait_ms);
  request.set_max_bytes(max_bytes);
  return Sha256(bytes);
}

v1::ExecReply EndedReply(const std::string& op_id, const v1::Termination& termination) {
  const bool asked = termination.cause() == model::cause::kUserStop;
  v1::ExecReply reply;
  reply.set_op_id(op_id);
  reply.set_known(true);
  reply.set_drained(true);
  v1::ExecResult& result = *reply.mutable_result();
  result.set_kind(asked ? v1::END_KILLED : v1::END_SANDBOX_ENDED);
  result.set_killed_by(asked ? "stop" : termination.cause());
  result.set_limit(termination.limit());
  result.set_ended_unix_ms(static_cast<uint64_t>(termination.at_unix_ms()));
  result.set_message(EndedText(termination));
  return reply;
}

std::string SafeText(std::string_view bytes) {
  std::string text;
  while (!bytes.empty() && text.size() < kMaxText) {
    const size_t length = Utf8SequenceLength(bytes);
    const bool plain = length > 1 || (length == 1 && bytes[0] >= 0x20 && bytes[0] != 0x7f);
    if (plain) {
      text.append(bytes.substr(0, length));
    } else {
      text.push_back('?');
    }
    bytes.remove_prefix(length == 0 ? 1 : length);
  }
  if (!bytes.empty()) text += "...";
  return text;
}

std::chrono::seconds RetryAfter(const Error& error) {
  const std::string_view reason = error.reason();
  if (reason == "capacity.disk" || reason == "capacity.count") return std::chrono::seconds(10);
  if (reason == "capacity.memory" || reason == "capacity.pressure") return std::chrono::seconds(5);
  return std::chrono::seconds(1);
}

}  // namespace dsec::edge
