// SPDX-License-Identifier: Apache-2.0
// Files and archives: raw bodies in pieces of a mebibyte, so that memory stays flat whatever the
// size.
#include "apiserver/call.h"
#include "apiserver/json_out.h"
#include "apiserver/or_leave.h"
#include "base/id.h"
#include "http/error_body.h"

namespace dsec::apiserver::file_ops {
namespace {

using http::JsonWriter;
using runtime::Deadline;
using runtime::Task;

constexpr uint64_t kWatchWaitMs = 5000;

std::string NewTransfer() { return "t-" + NewUlid(Clock::System()); }

std::string StatJson(const v1::FileInfo& info) {
  std::string body;
  JsonWriter json(body);
  WriteFile(json, info);
  return body;
}

// Leaves nothing of an upload that broke off.
Task<void> AbortWrite(Call& call, SandboxId id, std::string transfer) {
  v1::WriteRequest abort;
  abort.set_transfer_id(std::move(transfer));
  abort.set_abort(true);
  (void)co_await call.edge().WriteFile(std::move(id), std::move(abort), Call::Usual());
  co_return Ok();
}

Task<void> AbortPush(Call& call, SandboxId id, std::string transfer) {
  v1::PushArchiveRequest abort;
  abort.set_transfer_id(std::move(transfer));
  abort.set_abort(true);
  (void)co_await call.edge().PushArchive(std::move(id), std::move(abort), Call::Usual());
  co_return Ok();
}

}  // namespace

Task<void> Read(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  const std::string path = call.query.Text("path", true);
  const uint64_t max_bytes = call.query.Number("max_bytes", UINT64_MAX >> 1);
  DSEC_CO_TRY_VOID(call.query.Finish());
  std::optional<http::Range> range;
  if (const auto header = call.exchange.head().fields.Find("Range")) {
    DSEC_CO_TRY(range, http::ParseRange(*header));
  }
  // The first piece tells size, type and the errors of opening.
  v1::ReadRequest request;
  request.set_path(path);
  request.set_length(kChunk);
  if (range && range->suffix) {
    request.set_from_end(true);
    request.set_offset(*range->suffix);
  } else if (range) {
    request.set_offset(range->first);
  }
  auto piece = co_await call.edge().ReadFile(id, request, Call::Usual());
  if (!piece.ok()) co_return std::move(piece).error();
  const uint64_t size = piece->size();
  http::Slice slice{0, size};
  http::Headers headers = {{"Content-Type", "application/octet-stream"},
                           {"Accept-Ranges", "bytes"},
                           {"X-File-Mode", ModeText(piece->info().mode())},
                           {"X-File-Uid", std::to_string(piece->info().uid())},
                           {"X-File-Gid", std::to_string(piece->info().gid())},
                           {"X-File-Mtime-Ns", std::to_string(piece->info().mtime_ns())}};
  if (range) {
    const auto resolved = http::Resolve(*range, size);
    if (!resolved) {
      const Error error(Code::kInvalidArgument, "file.range",
                        fmt::format("the range lies past the {} bytes of the file", size));
      const http::Headers refused = {{"Content-Range", fmt::format("bytes */{}", size)},
                                     {"Content-Type", std::string(kJsonType)}};
      auto done = co_await call.exchange.Reply(416, refused,
                                               http::ErrorBody(error, call.exchange.request_id()));
      co_return done;
    }
    slice = *resolved;
    headers.emplace_back("Content-Range", fmt::format("bytes {}-{}/{}", slice.offset,
                                                      slice.offset + slice.length - 1, size));
  }
  if (slice.length > max_bytes) {
    co_return Error(Code::kPayloadTooLarge, "file.too_large",
                    fmt::format("{} bytes are more than max_bytes {}", slice.length, max_bytes));
  }
  std::string data = std::move(*piece->mutable_data());
  if (data.size() > slice.length) data.resize(slice.length);
  call.exchange.Begin(range ? 206 : 200, headers, slice.length);
  uint64_t sent = 0;
  for (;;) {
    sent += data.size();
    if (sent == slice.length) {
      auto done = co_await call.exchange.WriteLast(data);
      co_return done;
    }
    // A file that shrinks meanwhile: the promised length cannot be kept, so the connection is cut.
    if (data.empty()) co_return Ok();
    auto written = co_await call.exchange.Write(data);
    if (!written.ok()) co_return std::move(written).error();
    v1::ReadRequest next;
    next.set_path(path);
    next.set_offset(slice.offset + sent);
    next.set_length(std::min<uint64_t>(kChunk, slice.length - sent));
    auto more = co_await call.edge().ReadFile(id, std::move(next), Call::Usual());
    if (!more.ok()) co_return std::move(more).error();
    data = std::move(*more->mutable_data());
  }
}

Task<void> Write(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::WriteRequest first;
  first.set_transfer_id(NewTransfer());
  first.set_path(call.query.Text("path", true));
  first.set_user(call.query.Text("user"));
  first.set_parents(call.query.Flag("parents", true));
  const bool has_mode = call.query.Has("mode");
  const std::string mode = call.query.Text("mode");
  DSEC_CO_TRY_VOID(call.query.Finish());
  if (has_mode) {
    DSEC_CO_TRY(const uint32_t parsed, ParseMode(mode, "mode"));
    first.set_mode(parsed);
  }
  const std::string transfer = first.transfer_id();
  v1::WriteRequest request = std::move(first);
  uint64_t offset = 0;
  for (;;) {
    auto data = co_await call.exchange.Read(kChunk);
    if (!data.ok()) {
      // Detached from the client's fate: its going must not leave the temporary file behind.
      (void)co_await AbortWrite(call, id, transfer);
      co_return std::move(data).error();
    }
    const bool last = call.exchange.body_done();
    request.set_offset(offset);
    offset += data->size();
    request.set_data(std::move(*data));
    request.set_commit(last);
    auto reply = co_await call.edge().WriteFile(id, std::move(request), Call::Usual());
    if (!reply.ok()) {
      (void)co_await AbortWrite(call, id, transfer);
      co_return std::move(reply).error();
    }
    if (last) {
      auto done = co_await call.Json(200, StatJson(reply->info()));
      co_return done;
    }
    request = v1::WriteRequest();
    request.set_transfer_id(transfer);
  }
}

Task<void> Remove(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::RemoveRequest request;
  request.set_path(call.query.Text("path", true));
  request.set_recursive(call.query.Flag("recursive", false));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto removed = co_await call.edge().Remove(id, std::move(request),
                                             Deadline::After(std::chrono::minutes(10)));
  if (!removed.ok()) co_return std::move(removed).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Stat(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::PathRequest request;
  request.set_path(call.query.Text("path", true));
  request.set_follow(call.query.Flag("follow", true));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto info = co_await call.edge().StatFile(id, std::move(request), Call::Usual());
  if (!info.ok()) co_return std::move(info).error();
  auto done = co_await call.Json(200, StatJson(*info));
  co_return done;
}

Task<void> List(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::ListRequest request;
  request.set_path(call.query.Text("path", true));
  request.set_after(call.query.Text("after"));
  request.set_page_size(static_cast<uint32_t>(call.query.Number("page_size", 1000, 1, 1000)));
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto page = co_await call.edge().ListFiles(id, std::move(request), Call::Usual());
  if (!page.ok()) co_return std::move(page).error();
  std::string body;
  JsonWriter json(body);
  json.BeginObject();
  json.BeginArray("entries");
  for (const v1::FileInfo& info : page->entries()) WriteFile(json, info);
  json.EndArray();
  json.Bytes("next_after", page->next_after());
  json.EndObject();
  auto done = co_await call.Json(200, std::move(body));
  co_return done;
}

Task<void> Mkdir(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::MkdirRequest request, ReadMkdir(*text));
  auto made = co_await call.edge().Mkdir(id, std::move(request), Call::Usual());
  if (!made.ok()) co_return std::move(made).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Move(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::MoveRequest request, ReadMove(*text));
  auto moved = co_await call.edge().Move(id, std::move(request), Call::Usual());
  if (!moved.ok()) co_return std::move(moved).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Chmod(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  DSEC_CO_TRY_VOID(call.query.Finish());
  auto text = co_await call.Body();
  if (!text.ok()) co_return std::move(text).error();
  DSEC_CO_TRY(v1::ChmodRequest request, ReadChmod(*text));
  auto changed = co_await call.edge().Chmod(id, std::move(request), Call::Usual());
  if (!changed.ok()) co_return std::move(changed).error();
  auto done = co_await call.NoContent();
  co_return done;
}

Task<void> Watch(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::WatchRequest request;
  request.set_watch_id("w-" + NewUlid(Clock::System()));
  request.set_path(call.query.Text("path", true));
  request.set_recursive(call.query.Flag("recursive", false));
  DSEC_CO_TRY_VOID(call.query.Finish());
  const std::string watch = request.watch_id();
  auto reply = co_await call.edge().Watch(id, std::move(request), Call::Usual());
  if (!reply.ok()) co_return std::move(reply).error();
  call.exchange.Begin(200, {{"Content-Type", std::string(kNdjsonType)}});
  auto status = co_await call.exchange.Flush();
  while (status.ok() && !call.exchange.Gone() && !call.exchange.stopping()) {
    v1::WatchRequest next;
    next.set_watch_id(watch);
    next.set_after_seq(reply->next_seq() == 0 ? 0 : reply->next_seq() - 1);
    next.set_wait_ms(kWatchWaitMs);
    auto more = co_await OrLeave(call, call.edge().Watch(id, std::move(next), Call::Usual()));
    if (!more.ok()) {
      auto done = co_await call.exchange.WriteLast(call.ErrorRecord(more.error()));
      co_return done;
    }
    if (!more->has_value()) break;
    reply = std::move(**more);
    std::string lines;
    for (const v1::WatchEvent& event : reply->events()) {
      JsonWriter json(lines);
      json.BeginObject();
      json.Field("type", event.type());
      json.Bytes("path", event.path());
      json.EndObject();
      lines += '\n';
    }
    if (lines.empty()) lines = kKeepalive;
    status = co_await call.exchange.Write(lines);
  }
  v1::WatchRequest close;
  close.set_watch_id(watch);
  close.set_close(true);
  (void)co_await call.edge().Watch(id, std::move(close), Call::Usual());
  if (!status.ok()) co_return std::move(status).error();
  if (call.exchange.Gone()) co_return Ok();
  auto done = co_await call.exchange.WriteLast(call.ErrorRecord(Call::Stopping()));
  co_return done;
}

Task<void> GetArchive(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::PullArchiveRequest request;
  request.set_transfer_id(NewTransfer());
  request.set_path(call.query.Text("path", true));
  request.set_max_bytes(kChunk);
  DSEC_CO_TRY_VOID(call.query.Finish());
  const std::string transfer = request.transfer_id();
  const auto time = std::chrono::minutes(5);
  auto reply = co_await call.edge().PullArchive(id, std::move(request), Deadline::After(time));
  if (!reply.ok()) co_return std::move(reply).error();
  call.exchange.Begin(200, {{"Content-Type", "application/x-tar"}});
  uint64_t offset = 0;
  std::vector<std::string> left_out;
  Result<void> status;
  for (;;) {
    offset += reply->data().size();
    for (const std::string& warning : reply->warnings()) left_out.push_back(warning);
    status = co_await call.exchange.Write(reply->data());
    if (!status.ok() || reply->eof()) break;
    v1::PullArchiveRequest next;
    next.set_transfer_id(transfer);
    next.set_offset(offset);
    next.set_max_bytes(kChunk);
    reply = co_await call.edge().PullArchive(id, std::move(next), Deadline::After(time));
    if (!reply.ok()) {
      status = std::move(reply).error();
      break;
    }
  }
  v1::PullArchiveRequest close;
  close.set_transfer_id(transfer);
  close.set_close(true);
  (void)co_await call.edge().PullArchive(id, std::move(close), Call::Usual());
  if (!status.ok()) co_return std::move(status).error();
  http::Headers trailers;
  if (!left_out.empty()) {
    std::string names;
    for (size_t i = 0; i < left_out.size() && i < 20; ++i) {
      if (i > 0) names += ',';
      names += http::PercentEncode(left_out[i]);
    }
    trailers = {{"X-Archive-Left-Out", std::to_string(left_out.size())},
                {"X-Archive-Left-Out-Names", names}};
  }
  auto done = co_await call.exchange.End(trailers);
  co_return done;
}

Task<void> PutArchive(Call& call) {
  DSEC_CO_TRY(const SandboxId id, call.Sandbox());
  v1::PushArchiveRequest request;
  request.set_transfer_id(NewTransfer());
  request.set_path(call.query.Text("path", true));
  request.set_user(call.query.Text("user"));
  DSEC_CO_TRY_VOID(call.query.Finish());
  const std::string transfer = request.transfer_id();
  uint64_t offset = 0;
  for (;;) {
    auto data = co_await call.exchange.Read(kChunk);
    if (!data.ok()) {
      (void)co_await AbortPush(call, id, transfer);
      co_return std::move(data).error();
    }
    const bool last = call.exchange.body_done();
    request.set_offset(offset);
    offset += data->size();
    request.set_data(std::move(*data));
    request.set_commit(last);
    auto reply = co_await call.edge().PushArchive(id, std::move(request),
                                                  Deadline::After(std::chrono::minutes(5)));
    if (!reply.ok()) {
      (void)co_await AbortPush(call, id, transfer);
      co_return std::move(reply).error();
    }
    if (last) {
      std::string body;
      JsonWriter json(body);
      json.BeginObject();
      json.Field("entries", reply->entries());
      json.Field("bytes", reply->bytes());
      json.EndObject();
      auto done = co_await call.Json(200, std::move(body));
      co_return done;
    }
    request = v1::PushArchiveRequest();
    request.set_transfer_id(transfer);
  }
}

}  // namespace dsec::apiserver::file_ops
