// SPDX-License-Identifier: Apache-2.0
// Exec, streams of output, stdin, signals, sessions.
#include "apiserver/call.h"
#include "apiserver/json_out.h"
#include "apiserver/or_leave.h"
#include "base/id.h"

namespace dsec::apiserver::exec_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;
using std::chrono::milliseconds;
using std::chrono::seconds;

// How long the first call waits for the end, so that a short command is one round trip and one
// packet; a longer one is told "started" after it.
constexpr uint64_t kFirstWaitMs = 100;
constexpr uint64_t kPollWaitMs = 5000;  // a keepalive follows each in silence
constexpr uint64_t kMaxWholeOutput = 16 << 20;
constexpr auto kMaxWholeTime = std::chrono::minutes(10);
constexpr auto kStdinPatience = seconds(30);
constexpr uint64_t kMaxStdinBody = 16 << 20;

// A poll that ends at once when the client goes or the server stops; then nullopt.
Task<std::optional<v1::ExecReply>> PollOrLeave(Call& call, SandboxId id, v1::PollRequest request,
                                               edge::Attachment* follower) {
  const Deadline deadline = Deadline::After(milliseconds(request.wait_ms()) + seconds(30));
  return OrLeave(call, call.edge().Poll(std::move(id), std::move(request), follower, deadline));
}

v1::PollRequest NextPoll(const v1::ExecReply& reply) {
  v1::PollRequest request;
  request.set_op_id(reply.op_id());
  request.set_stdout_offset(reply.stdout_next());
  request.set_stderr_offset(reply.stderr_next());
  request.set_wait_ms(kPollWaitMs);
  request.set_max_bytes(kChunk);
  return request;
}

bool Finished(const v1::ExecReply& reply) { return !reply.running() && reply.drained(); }

// Writes what follows `reply` (whose own records are in `text`) until the exit record.
Task<void> Follow(Call& call, const SandboxId& id, v1::ExecReply reply, std::string text,
                  edge::Attachment& follower) {
  for (;;) {
    if (Finished(reply)) {
      AppendExit(text, reply);
      auto done = co_await call.exchange.WriteLast(text);
      if (done.ok() && !call.exchange.Gone()) {
        follower.Finish();
        call.services.acks.Add(id, reply.op_id());
      }
      co_return done;
    }
    if (!text.empty()) {
      auto written = co_await call.exchange.Write(text);
      if (!written.ok()) co_return std::move(written).error();
      text.clear();
    }
    auto next = co_await PollOrLeave(call, id, NextPoll(reply), &follower);
    if (!next.ok()) {
      auto done = co_await call.exchange.WriteLast(call.ErrorRecord(next.error()));
      co_return done;
    }
    if (!next->has_value()) {
      if (call.exchange.stopping() && !call.exchange.Gone()) {
        auto done = co_await call.exchange.WriteLast(call.ErrorRecord(Call::Stopping()));
        co_return done;
      }
      co_return Ok();
    }
    reply = std::move(**next);
    AppendOutput(text, reply);
    if (text.empty() && !Finished(reply)) text = kKeepalive;
  }
}

// Appends chunks to a whole output; false above the bound.
bool Collect(const google::protobuf::RepeatedPtrField<v1::StreamChunk>& chunks, std::string& out,
             uint64_t& hole) {
  for (const v1::StreamChunk& chunk : chunks) {
    if (chunk.skipped() > 0) hole = out.size();
    out += chunk.data();
    if (out.size() > kMaxWholeOutput) return false;
  }
  return true;
}

void WriteWhole(JsonWriter& json, std::string_view key, const std::string& data,
                const v1::StreamState& state, uint64_t hole) {
  json.BeginObject(key);
  json.Bytes("data", data);
  json.Field("total", state.total());
  json.Field("dropped", state.dropped());
  if (state.dropped() > 0) json.Field("hole_at", hole);
  json.EndObject();
}

// stream=false: one object after the end.
Task<void> Whole(Call& call, const SandboxId& id, v1::ExecReply reply, edge::Attachment& follower) {
  const Deadline deadline = Deadline::After(kMaxWholeTime);
  const bool known = reply.known();
  std::string out[2];
  uint64_t hole[2] = {0, 0};
  for (;;) {
    if (!Collect(reply.stdout_chunks(), out[0], hole[0]) ||
        !Collect(reply.stderr_chunks(), out[1], hole[1])) {
      follower.Finish();
      co_return Error(Code::kPayloadTooLarge, "exec.output_too_large",
                      "the output is over 16 MiB; use stream");
    }
    if (Finished(reply)) break;
    if (deadline.Expired()) {
      co_return Error(Code::kDeadlineExceeded, "exec.still_running",
                      "the command runs on; use stream or detached");
    }
    auto next = co_await PollOrLeave(call, id, NextPoll(reply), &follower);
    if (!next.ok()) co_return std::move(next).error();
    if (!next->has_value()) {
      if (!call.exchange.Gone()) co_return Call::Stopping();
      co_return Error(Code::kCancelled, "client.gone", "the client has gone");
    }
    reply = std::move(**next);
  }
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("op_id", reply.op_id());
  json.Field("pid", reply.pid());
  json.Field("known", known);
  json.Key("result");
  WriteResult(json, reply.result());
  WriteWhole(json, "stdout", out[0], reply.stdout_state(), hole[0]);
  WriteWhole(json, "stderr", out[1], reply.stderr_state(), hole[1]);
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  if (done.ok() && !call.exchange.Gone()) {
    follower.Finish();
    call.services.acks.Add(id, reply.op_id());
  }
  co_return done;
}

// What GetExec and ListExecs share.
Task<v1::ListExecsReply> Execs(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto execs = co_await call.edge().ListExecs(id, Call::Usual());
  co_return execs;
}

}  // namespace

Task<void> Exec(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.exchange.ReadAll(kMaxExecBody);
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(ExecBody body, ReadExec(*text));
  text = std::string();
  v1::ExecRequest& request = body.request;
  if (request.op_id().empty()) request.set_op_id("op-" + NewUlid(Clock::System()));
  if (!request.detached() && request.timeout_ms() == 0 &&
      call.services.default_exec_timeout.count() > 0) {
    request.set_timeout_ms(static_cast<uint64_t>(call.services.default_exec_timeout.count()));
  }
  const bool keep = body.keep_on_disconnect || request.detached();
  const std::string op = request.op_id();
  if (request.detached()) {
    request.set_wait_ms(0);
    request.set_max_bytes(1);
    auto reply = co_await call.edge().Exec(id, std::move(request), nullptr, Call::Usual());
    if (!reply.ok()) co_return std::move(reply).error();
    std::string out;
    JsonWriter json(out);
    json.BeginObject();
    json.Field("op_id", op);
    json.Field("pid", reply->pid());
    json.Field("known", reply->known());
    json.Field("running", reply->running());
    json.EndObject();
    auto done = co_await call.Json(202, std::move(out));
    co_return done;
  }
  auto follower = co_await call.edge().Attach(
      id, op, keep ? edge::OnDisconnect::kKeep : edge::OnDisconnect::kKill, Call::Usual());
  if (!follower.ok()) co_return std::move(follower).error();
  request.set_wait_ms(kFirstWaitMs);
  request.set_max_bytes(kChunk);
  auto reply = co_await call.edge().Exec(id, std::move(request), follower->get(), Call::Usual());
  if (!reply.ok()) {
    (*follower)->Finish();
    co_return std::move(reply).error();
  }
  if (!body.stream) {
    auto done = co_await Whole(call, id, std::move(*reply), **follower);
    co_return done;
  }
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  std::string records;
  AppendStarted(records, *reply);
  AppendOutput(records, *reply);
  auto done = co_await Follow(call, id, std::move(*reply), std::move(records), **follower);
  co_return done;
}

Task<void> Stream(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  v1::PollRequest request;
  request.set_op_id(op);
  request.set_stdout_offset(call.query.Number("stdout_offset", 0));
  request.set_stderr_offset(call.query.Number("stderr_offset", 0));
  request.set_max_bytes(kChunk);
  const bool follow = call.query.Flag("follow", true);
  DSEC_CO_TRY_VOID(call.query.Finish());
  std::unique_ptr<edge::Attachment> follower;
  if (follow) {
    auto attached = co_await call.edge().Attach(id, op, edge::OnDisconnect::kKill, Call::Usual());
    if (!attached.ok()) co_return std::move(attached).error();
    follower = std::move(*attached);
  }
  auto reply = co_await call.edge().Poll(id, request, follower.get(), Call::Usual());
  if (!reply.ok()) {
    if (follower) follower->Finish();
    co_return std::move(reply).error();
  }
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  std::string records;
  AppendStarted(records, *reply);
  AppendOutput(records, *reply);
  if (follower) {
    auto done = co_await Follow(call, id, std::move(*reply), std::move(records), *follower);
    co_return done;
  }
  // What is there now, and no more.
  while (!Finished(*reply) &&
         (reply->stdout_chunks_size() > 0 || reply->stderr_chunks_size() > 0)) {
    auto written = co_await call.exchange.Write(records);
    if (!written.ok()) co_return std::move(written).error();
    records.clear();
    v1::PollRequest next = NextPoll(*reply);
    next.set_wait_ms(0);
    reply = co_await call.edge().Poll(id, std::move(next), nullptr, Call::Usual());
    if (!reply.ok()) {
      auto done = co_await call.exchange.WriteLast(call.ErrorRecord(reply.error()));
      co_return done;
    }
    AppendOutput(records, *reply);
  }
  if (Finished(*reply)) {
    AppendExit(records, *reply);
  } else {
    AppendMore(records, *reply);
  }
  auto done = co_await call.exchange.WriteLast(records);
  co_return done;
}

Task<void> ListExecs(Call& call) {
  auto execs = co_await Execs(call);
  if (!execs.ok()) co_return std::move(execs).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("execs");
  for (const v1::ExecSummary& exec : execs->execs()) WriteExecSummary(json, exec);
  json.EndArray();
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> GetExec(Call& call) {
  DSEC_CO_TRY(const std::string op, call.Op());
  auto execs = co_await Execs(call);
  if (!execs.ok()) co_return std::move(execs).error();
  for (const v1::ExecSummary& exec : execs->execs()) {
    if (exec.op_id() != op) continue;
    std::string body;
    JsonWriter json(body);
    WriteExecSummary(json, exec);
    auto done = co_await call.Json(200, std::move(body));
    co_return done;
  }
  co_return Error(Code::kNotFound, "exec.not_found",
                  fmt::format("no command {} runs or is kept", op));
}

Task<void> Stdin(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  if (!call.query.Has("offset")) (void)call.query.Text("offset", true);
  const uint64_t offset = call.query.Number("offset", 0);
  const bool eof = call.query.Flag("eof", false);
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto data = co_await call.exchange.ReadAll(kMaxStdinBody);
  if (!data.ok()) co_return std::move(data).error();
  size_t sent = 0;
  v1::StdinReply reply;
  Deadline patience = Deadline::After(kStdinPatience);
  do {
    v1::StdinRequest request;
    request.set_op_id(op);
    request.set_offset(offset + sent);
    const size_t size = std::min(kChunk, data->size() - sent);
    request.set_data(data->substr(sent, size));
    request.set_eof(eof && sent + size == data->size());
    auto taken = co_await call.edge().WriteStdin(id, std::move(request), Call::Usual());
    if (!taken.ok()) co_return std::move(taken).error();
    reply = std::move(*taken);
    const uint64_t reached = reply.accepted() > offset ? reply.accepted() - offset : 0;
    if (reached > sent || size == 0) {
      sent = std::min<size_t>(reached, data->size());
      patience = Deadline::After(kStdinPatience);
      if (size == 0) break;
    } else {
      // aether holds the call until there is room or its own wait is over, so this does not spin.
      if (patience.Expired() || call.exchange.Gone()) break;
    }
  } while (sent < data->size() && !reply.closed());
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.Field("accepted", reply.accepted());
  json.Field("closed", reply.closed());
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> Signal(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::SignalRequest request, ReadSignal(*text));
  request.set_op_id(op);
  auto sent = co_await call.edge().Signal(id, std::move(request), Call::Usual());
  if (!sent.ok()) co_return std::move(sent).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Resize(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  v1::ResizeRequest request;
  DSEC_CO_TRY(*request.mutable_tty(), ReadTerminalSize(*text));
  request.set_op_id(op);
  auto resized = co_await call.edge().Resize(id, std::move(request), Call::Usual());
  if (!resized.ok()) co_return std::move(resized).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Cancel(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(const uint64_t grace, ReadCancel(*text));
  v1::SignalRequest request;
  request.set_op_id(op);
  request.set_killed_by("cancel");
  request.set_grace_ms(grace);
  request.set_tree(true);
  auto sent = co_await call.edge().Signal(id, std::move(request), Call::Usual());
  if (!sent.ok()) co_return std::move(sent).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Ack(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY(const std::string op, call.Op());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY_VOID(ReadEmpty(*text));
  v1::AckRequest request;
  request.set_op_id(op);
  auto noted = co_await call.edge().Ack(id, std::move(request), Call::Usual());
  if (!noted.ok()) co_return std::move(noted).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> ListSessions(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto sessions = co_await call.edge().ListSessions(id, Call::Usual());
  if (!sessions.ok()) co_return std::move(sessions).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("sessions");
  for (const v1::SessionInfo& session : sessions->sessions()) {
    json.BeginObject();
    json.Field("name", session.name());
    json.Field("started_unix_ms", session.started_unix_ms());
    json.Field("execs", session.execs());
    json.Field("busy", session.busy());
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> CloseSession(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  v1::SessionRequest request;
  request.set_name(call.params[1]);
  auto closed = co_await call.edge().CloseSession(id, std::move(request), Call::Usual());
  if (!closed.ok()) co_return std::move(closed).error();
  auto done = co_await call.NoContent();
  co_return done;
}

}  // namespace dsec::apiserver::exec_ops
