// SPDX-License-Identifier: Apache-2.0
#include "apiserver/api_server.h"

#include <fstream>
#include <future>
#include <regex>
#include <set>

#include "apiserver/access.h"
#include "apiserver/testing/api_fixture.h"
#include "http/testing/raw_socket.h"

namespace dsec::apiserver {
namespace {

using testing::Answer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::json;
using testing::kKey;
using testing::kMiB;
using testing::kNobody;
using testing::kTime;
using ::testing::Not;
using testing::Strings;
using ::testing::UnorderedElementsAre;

class ApiServerTest : public testing::ApiFixture {};

// "GET /v1/x/{id}" as a request line with something in place of the names.
std::pair<std::string, std::string> RequestOf(const std::string& route) {
  const size_t space = route.find(' ');
  static const std::regex kName("\\{[a-z]+\\}");
  return {route.substr(0, space), std::regex_replace(route.substr(space + 1), kName, "x")};
}

TEST_F(ApiServerTest, Key_MissingOrWrongIs401BeforeAnythingElse) {
  Strings routes = RouteNames();
  routes.insert(routes.end(), {"GET /v1/nothing", "PATCH /v1/sandboxes", "GET /"});
  const std::pair<http::Headers, std::string> cases[] = {
      {{}, "auth.missing"},
      {{{"Authorization", "Bearer "}}, "auth.missing"},
      {{{"Authorization", "Basic " + kKey}}, "auth.missing"},
      {{{"Authorization", "Bearer x"}}, "auth.invalid"},
      {{{"Authorization", "Bearer " + kKey + "0"}}, "auth.invalid"},
      {{{"X-API-Key", kKey.substr(1)}}, "auth.invalid"},
  };
  for (const std::string& route : routes) {
    const auto [method, path] = RequestOf(route);
    if (path == "/healthz") continue;
    for (const auto& [headers, reason] : cases) {
      const Answer answer = Ask(method, path + "?bad=%zz", method == "GET" ? "" : "{", headers);
      EXPECT_EQ(answer.status, 401) << route;
      EXPECT_EQ(answer.Reason(), reason) << route;
      EXPECT_THAT(answer.body.dump(), Not(HasSubstr(kKey.substr(2))));
    }
  }
  EXPECT_EQ(Ask("GET", "/healthz", "", {}).status, 200);
  for (const http::Headers& headers :
       {http::Headers{{"X-API-Key", kKey}}, http::Headers{{"authorization", "bearer " + kKey}}}) {
    EXPECT_EQ(Ask("GET", "/v1/node", "", headers).status, 200);
  }
}

TEST(ApiRoutes, OpenApi_DescribesExactlyThese) {
  std::ifstream file(DSEC_OPENAPI);
  ASSERT_TRUE(file);
  Strings described;
  std::string path;
  std::smatch found;
  // The file's own layout: paths at two spaces, methods at four.
  static const std::regex kPath("  (/[^ ]*):"), kMethod("    (get|put|post|delete|patch|head):");
  for (std::string line; std::getline(file, line) && !line.starts_with("components:");) {
    if (std::regex_match(line, found, kPath)) path = found[1];
    if (std::regex_match(line, found, kMethod)) {
      std::string method = found[1];
      for (char& c : method) c = static_cast<char>(c - 'a' + 'A');
      described.push_back(fmt::format("{} {}", method, path));
    }
  }
  const Strings routes = RouteNames();
  EXPECT_EQ(std::set<std::string>(routes.begin(), routes.end()).size(), routes.size());
  EXPECT_THAT(described, ::testing::UnorderedElementsAreArray(routes));
}

// A route that nobody has given a row would be the root principal's alone.
TEST(ApiRoutes, AccessTable_HasARowForEachAndNoOther) {
  Strings rows;
  for (const Access& row : AccessTable()) rows.emplace_back(row.route);
  EXPECT_THAT(rows, ::testing::UnorderedElementsAreArray(RouteNames()));
  for (const Access& row : AccessTable()) {
    const bool needs =
        row.scope == Scope::kRoot || row.scope == Scope::kSandbox || row.scope == Scope::kProject;
    EXPECT_TRUE(!needs || row.right.has_value()) << row.route;
    const bool of_sandbox = row.route.find("/v1/sandboxes/{id}") != std::string_view::npos;
    EXPECT_EQ(row.scope == Scope::kSandbox, of_sandbox) << row.route;
  }
  EXPECT_EQ(AccessOf("GET", "/v1/forgotten").scope, Scope::kRoot);
  EXPECT_FALSE(AccessOf("GET", "/v1/forgotten").right.has_value());
}

TEST_F(ApiServerTest, WithoutIam_TheRoutesOfItSaySo) {
  EXPECT_EQ(Ask("GET", "/v1/iam/projects").Reason(), "iam.not_here");
  EXPECT_EQ(Ask("GET", "/v1/iam/whoami").status, 412);
}

TEST_F(ApiServerTest, UnknownPathOrMethod_Is404Or405) {
  for (const char* path : {"/", "/v1", "/v1/nothing", "/v1/sandboxes/", "/v1/sandboxes/a/b",
                           "/v1//node", "/V1/node", "/v1/sandboxes/%zz"}) {
    EXPECT_EQ(Ask("GET", path).Reason(), "request.path") << path;
    EXPECT_EQ(Ask("GET", path).status, 404) << path;
  }
  for (const auto& [method, path, allowed] : {std::tuple{"PUT", "/v1/sandboxes", "POST, GET"},
                                              {"DELETE", "/healthz", "GET"},
                                              {"POST", "/v1/sandboxes/x", "GET, DELETE"},
                                              {"FOO", "/v1/sandboxes:batch", "POST"}}) {
    const Answer answer = Ask(method, path);
    EXPECT_EQ(answer.status, 405) << path;
    EXPECT_EQ(answer.Reason(), "request.method") << path;
    EXPECT_EQ(answer.fields.Find("Allow"), allowed) << path;
  }
}

TEST_F(ApiServerTest, ErrorReply_HasTheFixedMembersAndTheCallersRequestId) {
  const http::Headers headers = {{"X-API-Key", kKey}, {"X-Request-Id", "mine_1"}};
  const Answer answer = Ask("POST", "/v1/sandboxes", R"({"request_id":"r","base":5})", headers);
  EXPECT_EQ(answer.fields.Find("X-Request-Id"), "mine_1");
  EXPECT_EQ(answer.fields.Find("Content-Type"), "application/json");
  EXPECT_EQ(answer.fields.Find("Retry-After"), std::nullopt);
  const json expected = {{"error",
                          {{"code", "INVALID_ARGUMENT"},
                           {"reason", "request.wrong_type"},
                           {"message", "base: must be a string"},
                           {"field", "base"},
                           {"retriable", false},
                           {"request_id", "mine_1"}}}};
  EXPECT_EQ(answer.body, expected);
  // Whatever the name of a field is, the reply is JSON in UTF-8.
  const std::string odd = "a\"\\\x01\xe2\x82\xac";
  EXPECT_EQ(Post("/v1/sandboxes", {{"request_id", "r"}, {"base", "b"}, {odd, 1}}).Field(), odd);
}

// What each kind of request refuses is the business of json_in_test.cc; this is that every route
// reads its body with the one meant for it, and before it looks for the sandbox.
TEST_F(ApiServerTest, BadBody_Is400WithTheFieldNamed) {
  const std::tuple<const char*, const char*, const char*, const char*> cases[] = {
      {"/v1/sandboxes", R"({"request_id":"r","base":"b","ttl_ms":1.5})", "wrong_type", "ttl_ms"},
      {"/v1/sandboxes", R"({"request_id":"r","base":"b"]})", "malformed", ""},
      {"/v1/sandboxes:batch", R"({"request_id":"r","count":0})", "out_of_range", "count"},
      {"/v1/sandboxes:delete", R"({"ids":["a"],"labels":{"a":"b"}})", "contradiction", "labels"},
      {"/renew", R"({"ttl_ms":1,"ttl_ms":2})", "duplicate", "ttl_ms"},
      {"/exec", "", "missing", "argv"},
      {"/exec", R"({"script":"a","wait_ms":1})", "unknown_field", "wait_ms"},
      {"/exec/o/signal", R"({"signal":"BOOM"})", "invalid", "signal"},
      {"/exec/o/resize", R"({"cols":1})", "missing", "rows"},
      {"/exec/o/cancel", R"({"grace":1})", "unknown_field", "grace"},
      {"/exec/o/ack", R"({"x":1})", "unknown_field", "x"},
      {"/exec/a%20b/ack", "", "invalid", "op_id"},
      {"/files/mkdir", R"({"path":"/a","mode":"755"})", "invalid", "mode"},
      {"/files/move", R"({"from":"/a"})", "missing", "to"},
      {"/files/chmod", R"({"path":"/a"})", "missing", "mode"},
  };
  for (const auto& [path, body, reason, field] : cases) {
    const std::string target = std::string_view(path).starts_with("/v1") ? path : kNobody + path;
    ExpectRefused("POST", target, body, std::string("request.") + reason, field);
  }
  // What the node knows the bounds of is refused by it, with the same name.
  json tiny = CreateBody("r");
  tiny["limits"] = {{"memory_bytes", 1}};
  EXPECT_EQ(Post("/v1/sandboxes", tiny).Field(), "limits.memory_bytes");
  EXPECT_THAT(ListedNames("include_ended=true"), IsEmpty());
  EXPECT_EQ(Ask("POST", kNobody + "/exec/o/ack").Reason(), "sandbox.not_found");
}

TEST_F(ApiServerTest, BadQuery_Is400WithTheParameterNamed) {
  const std::tuple<const char*, const char*, const char*, const char*> cases[] = {
      {"GET /v1/sandboxes", "page_size=0", "out_of_range", "page_size"},
      {"GET /v1/sandboxes", "page_size=1001", "out_of_range", "page_size"},
      {"GET /v1/sandboxes", "page_size=99999999999999999999", "out_of_range", "page_size"},
      {"GET /v1/sandboxes", "page_size=ten", "wrong_type", "page_size"},
      {"GET /v1/sandboxes", "page_size=1.5", "wrong_type", "page_size"},
      {"GET /v1/sandboxes", "page_size=%2B1", "wrong_type", "page_size"},
      {"GET /v1/sandboxes", "name=a&name=a", "duplicate", "name"},
      {"GET /v1/sandboxes", "state=asleep", "invalid", "state"},
      {"GET /v1/sandboxes", "label=novalue", "invalid", "label"},
      {"GET /v1/sandboxes", "label=a=1&label=a=2", "contradiction", "label"},
      {"GET /v1/sandboxes", "include_ended=yes", "wrong_type", "include_ended"},
      {"GET /v1/sandboxes", "limit=5", "unknown_field", "limit"},
      {"GET /v1/sandboxes", "name=%zz", "malformed", ""},
      {"GET /v1/events", "after=-1", "wrong_type", "after"},
      {"DELETE ", "grace_ms=300001", "out_of_range", "grace_ms"},
      {"DELETE ", "wait=1", "wrong_type", "wait"},
      {"GET /files", "", "missing", "path"},
      {"GET /files", "path=/a&path=/b", "duplicate", "path"},
      {"PUT /files", "path=/a&mode=755", "invalid", "mode"},
      {"PUT /files", "path=/a&mode=0755&mode=0755", "duplicate", "mode"},
      {"POST /exec/o/stdin", "", "missing", "offset"},
      {"GET /exec/o/stream", "stdout_offset=x", "wrong_type", "stdout_offset"},
  };
  for (const auto& [route, query, reason, field] : cases) {
    const auto [method, path] = RequestOf(route);
    const std::string target = (path.starts_with("/v1") ? path : kNobody + path) + "?" + query;
    ExpectRefused(method, target, "", std::string("request.") + reason, field);
  }
  EXPECT_EQ(Ask("GET", "/v1/sandboxes?page_token=zz").Field(), "page_token");
  // Names in paths are decoded after the path was cut.
  EXPECT_THAT(Ask("GET", "/v1/layers/a%2Fb%3A1").Member("message"), HasSubstr("a/b:1"));
}

TEST_F(ApiServerTest, OverLongBody_Is413WithoutReadingIt) {
  const auto announced = [&](const std::string& target, size_t bytes) {
    http::testing::RawSocket client(server_->addresses()[0]);
    const auto reply = client.Ask(
        fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nX-API-Key: {}\r\nContent-Length: {}\r\n\r\n",
                    target, kKey, bytes));
    return std::pair(reply.status, json::parse(reply.body)["error"].value("reason", ""));
  };
  const std::pair too_large(413, std::string("request.too_large"));
  for (const char* path : {"/v1/sandboxes", "/v1/sandboxes:batch", "/v1/sandboxes:delete"})
    EXPECT_EQ(announced(path, kMiB + 1), too_large) << path;
  for (const char* path : {"/renew", "/exec/o/signal", "/exec/o/ack", "/files/mkdir"})
    EXPECT_EQ(announced(kNobody + path, kMiB + 1), too_large) << path;
  EXPECT_EQ(announced(kNobody + "/exec", 16 * kMiB + 1), too_large);
  EXPECT_EQ(announced(kNobody + "/exec/o/stdin?offset=0", 16 * kMiB + 1), too_large);
  // The bound itself is allowed.
  std::string body = CreateBody("r").dump();
  body.resize(kMiB, ' ');
  EXPECT_EQ(Ask("POST", "/v1/sandboxes", body).status, 201);
  body = R"({"argv":["true"]})";
  body.resize(16 * kMiB, ' ');
  EXPECT_EQ(Ask("POST", kNobody + "/exec", body).Reason(), "sandbox.not_found");
}

TEST_F(ApiServerTest, Create_IsIdempotentByRequestId) {
  const std::string id = MakeSandbox("r1");
  const Answer again =
      Ask("POST", "/v1/sandboxes", R"({"base":"debian:test","ttl_ms":null,"request_id":"r1"})");
  EXPECT_EQ(again.status, 200);
  EXPECT_EQ(again.body["id"], id);
  json other = CreateBody("r1");
  other["env"] = {{"A", "1"}};
  const Answer reused = Post("/v1/sandboxes", other);
  EXPECT_EQ(reused.status, 409);
  EXPECT_EQ(reused.Reason(), "create.request_id_reused");
  EXPECT_EQ(Ask("DELETE", "/v1/sandboxes/" + id).body["state"], "stopped");
  const Answer ended = Post("/v1/sandboxes", CreateBody("r1"));
  EXPECT_EQ(ended.status, 200);
  EXPECT_EQ(ended.body["id"], id);
  EXPECT_EQ(ended.body["termination"]["cause"], "user_stop");
  const json batch = {{"request_id", "b"}, {"count", 3}, {"sandbox", {{"base", "debian:test"}}}};
  std::set<std::string> ids;
  for (int i = 0; i < 2; ++i) {
    const Answer records = Post("/v1/sandboxes:batch", batch);
    ASSERT_EQ(records.body.size(), 4u) << records.body;
    EXPECT_EQ(records.body.back(), json({{"type", "done"}, {"ready", 3}, {"failed", 0}}));
    for (size_t n = 0; n < 3; ++n) ids.insert(records.body[n]["sandbox"]["id"]);
  }
  EXPECT_EQ(ids.size(), 3u);
  CheckInvariants();
}

class FullApiServerTest : public ApiServerTest {
 protected:
  FullApiServerTest() { options_.admission.max_sandboxes = 1; }
};

TEST_F(FullApiServerTest, Create_Is429WithRetryAfter) {
  MakeSandbox("r1");
  const Answer full = Post("/v1/sandboxes", CreateBody("r2"));
  EXPECT_EQ(full.status, 429) << full.body;
  EXPECT_THAT(full.Reason(), ::testing::StartsWith("capacity."));
  EXPECT_EQ(full.body["error"]["retriable"], true);
  EXPECT_TRUE(full.fields.Find("Retry-After").has_value());
}

TEST_F(ApiServerTest, Exec_OpIdRunsOnceAndOtherBodyIsAConflict) {
  const std::string id = MakeSandbox("r1");
  const std::string exec = "/v1/sandboxes/" + id + "/exec";
  const json body = {{"op_id", "op"}, {"argv", {"echo", "hi"}}, {"stream", false}};
  for (const bool known : {false, true}) {
    const Answer whole = Post(exec, body);
    EXPECT_EQ(whole.status, 200) << whole.body;
    EXPECT_EQ(whole.body["known"], known);
    EXPECT_EQ(whole.body["stdout"]["data"], "hi\n");
    EXPECT_EQ(whole.body["result"]["exit_code"], 0);
  }
  json streamed = body;
  streamed["stream"] = true;
  const Answer records = Post(exec, streamed);
  Strings types;
  for (const json& record : records.body) types.push_back(record["type"]);
  EXPECT_THAT(types, ElementsAre("started", "stdout", "exit"));
  EXPECT_EQ(records.body[1]["data_b64"], "aGkK");
  EXPECT_EQ(host_->Starts(id, "op"), 1u);
  json other = body;
  other["argv"] = {"echo", "ho"};
  EXPECT_EQ(Post(exec, other).status, 409);
  EXPECT_EQ(Post(exec, other).Reason(), "exec.op_id_reused");
  const Answer detached = Post(exec, {{"op_id", "d"}, {"argv", {"sleep"}}, {"detached", true}});
  EXPECT_EQ(detached.status, 202);
  EXPECT_EQ(Ask("GET", exec + "/d").body["on_disconnect"], "keep");
  const json more = Ask("GET", exec + "/d/stream?follow=false").body.back();
  EXPECT_EQ(more["type"], "more") << more;
  EXPECT_EQ(Ask("POST", exec + "/d/cancel").status, 204);
  EXPECT_EQ(Ask("GET", exec + "/d").body["result"]["killed_by"], "cancel");
  Ask("DELETE", "/v1/sandboxes/" + id);
  const Answer gone = Post(exec, body);
  EXPECT_EQ(gone.status, 410);
  EXPECT_EQ(gone.Reason(), "sandbox.ended.user_stop");
  EXPECT_EQ(gone.body["error"]["details"]["termination"]["cause"], "user_stop");
}

TEST_F(ApiServerTest, List_FiltersBeforeItCutsPages) {
  std::map<std::string, std::string> ids;
  for (int i = 0; i < 7; ++i) {
    const std::string name = fmt::format("r{}", i);
    ids[name] = MakeSandbox(name, {{"odd", std::to_string(i % 2)}, {"n", std::to_string(i)}});
  }
  Ask("DELETE", "/v1/sandboxes/" + ids["r1"]);
  EXPECT_THAT(ListedNames(""), ElementsAre("r0", "r2", "r3", "r4", "r5", "r6"));
  EXPECT_THAT(ListedNames("label=odd=1"), ElementsAre("r3", "r5"));
  EXPECT_THAT(ListedNames("label=odd=1&label=n%3D5"), ElementsAre("r5"));
  EXPECT_THAT(ListedNames("label=odd=1&include_ended=true"),
              UnorderedElementsAre("r1", "r3", "r5"));
  EXPECT_THAT(ListedNames("state=stopped"), ElementsAre("r1"));
  EXPECT_THAT(ListedNames("state=running&state=stopped&label=n=1"), ElementsAre("r1"));
  Strings seen;
  std::string token;
  size_t pages = 0;
  do {
    const Answer page = Ask("GET", "/v1/sandboxes?page_size=2&label=odd=0&page_token=" + token);
    ASSERT_EQ(page.status, 200) << page.body;
    for (const json& sandbox : page.body["sandboxes"]) {
      seen.push_back(sandbox["request_id"]);
      EXPECT_FALSE(sandbox.contains("execs_running"));
    }
    token = page.body["next_page_token"];
    ++pages;
  } while (!token.empty() && pages < 10);
  EXPECT_THAT(seen, ElementsAre("r0", "r2", "r4", "r6"));
}

TEST_F(ApiServerTest, DeleteMany_AnswersEachAndCounts) {
  const std::string first = MakeSandbox("r1", {{"g", "a"}});
  const std::string second = MakeSandbox("r2", {{"g", "a"}});
  const Answer by_id = Post("/v1/sandboxes:delete", {{"ids", {first, "nobody"}}});
  EXPECT_EQ(by_id.body.back(), json({{"type", "done"}, {"deleted", 1}, {"failed", 1}}));
  const Answer by_label = Post("/v1/sandboxes:delete", {{"labels", {{"g", "a"}}}});
  EXPECT_EQ(by_label.body[0]["id"], second);
  EXPECT_EQ(by_label.body.back(), json({{"type", "done"}, {"deleted", 1}, {"failed", 0}}));
  CheckInvariants();
}

TEST_F(ApiServerTest, EventsPastTheEnd_AreNotWaitedFor) {
  const std::string path = "/v1/sandboxes/" + MakeSandbox("r1");
  Ask("DELETE", path);
  const Answer all = Ask("GET", path + "/events?follow=true");
  EXPECT_EQ(all.body.back()["type"], "ended");
  const uint64_t last = all.body.back()["seq"];
  // It ends: a stream of nothing but keepalives would run into the time limit of the call.
  const Answer past = Ask("GET", fmt::format("{}/events?follow=true&after={}", path, last));
  EXPECT_LE(past.body.size(), 2u) << past.body;
}

TEST_F(ApiServerTest, Stop_EndsStreamsWithAnErrorRecord) {
  const std::string id = MakeSandbox("r1");
  const http::Headers key = {{"X-API-Key", kKey}};
  const json exec = {{"op_id", "op"}, {"argv", {"sleep"}}};
  const http::ClientRequest requests[] = {
      {"GET", "/v1/events?follow=true", key},
      {"GET", "/v1/sandboxes/" + id + "/events?follow=true", key},
      {"POST", "/v1/sandboxes/" + id + "/exec", key, exec.dump()}};
  std::vector<std::unique_ptr<http::BlockingClient>> clients;
  std::vector<std::unique_ptr<http::BlockingClient::Stream>> streams;
  for (const http::ClientRequest& request : requests) {
    clients.push_back(http::BlockingClient::Create({.endpoint = server_->addresses()[0]}).value());
    streams.push_back(clients.back()->Open(request, kTime).value());
    ASSERT_TRUE(streams.back()->ReadLine(kTime).value().has_value());
  }
  auto whole = std::async(std::launch::async, [&] {
    return Post("/v1/sandboxes/" + id + "/exec",
                {{"op_id", "whole"}, {"argv", {"sleep"}}, {"stream", false}});
  });
  Await([&] { return host_->Running(id, "whole"); });
  const auto started = std::chrono::steady_clock::now();
  StopServer();
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(4));
  for (const auto& stream : streams) {
    std::string last;
    for (;;) {
      const auto line = stream->ReadLine(kTime);
      ASSERT_TRUE(line.ok()) << line.error().ToString() << " after " << last;
      if (!*line) break;
      last = **line;
    }
    const json record = json::parse(last);
    EXPECT_EQ(record["type"], "error") << record;
    EXPECT_EQ(record["error"]["reason"], "apiserver.stopping") << record;
  }
  EXPECT_EQ(whole.get().Reason(), "apiserver.stopping");
  EXPECT_TRUE(host_->Running(id, "op"));
  streams.clear();
}

}  // namespace
}  // namespace dsec::apiserver
