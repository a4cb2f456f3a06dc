// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apiserver/api_server.h"
#include "edge/testing/edge_fixture.h"
#include "http/blocking_client.h"

namespace dsec::apiserver::testing {

using json = nlohmann::json;
using Strings = std::vector<std::string>;

inline constexpr auto kTime = std::chrono::seconds(20);
inline constexpr size_t kMiB = size_t{1} << 20;
inline const std::string kKey = "k-0123456789abcdef";
// Well formed, of nobody: what is refused for its body or query is refused before this is seen.
inline const std::string kNobody = "/v1/sandboxes/sb-n1-01h00000000000000000000000";

class EmptyCatalog final : public LayerCatalog {
 public:
  runtime::Task<std::vector<LayerView>> List(LayerQuery, runtime::Deadline) override {
    co_return std::vector<LayerView>();
  }
  runtime::Task<LayerView> Get(std::string ref, runtime::Deadline) override {
    co_return Missing(ref);
  }
  runtime::Task<void> Remove(std::string ref, runtime::Deadline) override {
    co_return Missing(ref);
  }
  runtime::Task<CollectView> Collect(CollectOrder) override { co_return CollectView(); }
  runtime::Task<std::vector<LayerNodeView>> Nodes(runtime::Deadline) override {
    co_return std::vector<LayerNodeView>();
  }
  runtime::Task<void> ForgetNode(std::string node, runtime::Deadline) override {
    co_return Error(Code::kNotFound, "layer.no_lease", node);
  }

 private:
  static Error Missing(const std::string& ref) {
    return Error(Code::kNotFound, "layer.not_found", ref);
  }
};

struct Answer {
  int status = 0;
  http::Fields fields;
  json body;
  std::string Reason() const { return Member("reason"); }
  std::string Field() const { return Member("field"); }
  std::string Member(const char* name) const {
    return body.contains("error") ? body["error"].value(name, "") : "no error: " + body.dump();
  }
};

// NDJSON as an array.
inline json Lines(const std::string& text) {
  json lines = json::array();
  for (size_t from = 0; from < text.size();) {
    const size_t end = text.find('\n', from);
    lines.push_back(json::parse(text.substr(from, end - from)));
    from = end + 1;
  }
  return lines;
}

class ApiFixture : public edge::testing::EdgeFixture {
 protected:
  void SetUp() override {
    Start();
    ApiServerOptions options;
    options.listen = {"127.0.0.1:0"};
    options.api_key = kKey;
    options.registry = metrics_.get();
    options.fn = fn_;
    auto server = ApiServer::Start(*shards_, *edge_, catalog_, std::move(options));
    ASSERT_TRUE(server.ok()) << server.error().ToString();
    server_ = *std::move(server);
    client_ = http::BlockingClient::Create({.endpoint = server_->addresses()[0]}).value();
  }
  void TearDown() override {
    client_.reset();
    if (server_ != nullptr) StopServer();
  }
  void StopServer() {
    (void)Run(server_->Stop(runtime::Deadline::After(kTime)));
    server_.reset();
  }

  // With the key unless the headers are given.
  Answer Ask(const std::string& method, const std::string& target, std::string body = "",
             const http::Headers& headers = {{"Authorization", "Bearer " + kKey}}) {
    auto reply = client_->Call({method, target, headers, std::move(body)}, kTime);
    Answer answer;
    if (!reply.ok()) {
      ADD_FAILURE() << method << " " << target << ": " << reply.error().ToString();
      return answer;
    }
    answer.status = reply->status;
    answer.fields = reply->fields;
    const std::string type(reply->fields.Find("Content-Type").value_or(""));
    if (type == "application/json") answer.body = json::parse(reply->body);
    if (type == "application/x-ndjson") answer.body = Lines(reply->body);
    return answer;
  }
  Answer Post(const std::string& target, const json& body) {
    return Ask("POST", target, body.dump());
  }
  static json CreateBody(const std::string& request_id) {
    return {{"request_id", request_id}, {"base", "debian:test"}};
  }
  std::string MakeSandbox(const std::string& request_id, const json& labels = json::object()) {
    json body = CreateBody(request_id);
    body["labels"] = labels;
    clock_.Advance(std::chrono::milliseconds(1));  // ids are in order of their milliseconds
    const Answer made = Post("/v1/sandboxes", body);
    EXPECT_EQ(made.status, 201) << made.body;
    return made.body.value("id", "");
  }
  void ExpectRefused(const std::string& method, const std::string& target, const std::string& body,
                     const std::string& reason, const std::string& field) {
    const Answer answer = Ask(method, target, body);
    EXPECT_EQ(answer.status, 400) << target << " " << body.substr(0, 200);
    EXPECT_EQ(answer.Reason(), reason) << target << " " << body.substr(0, 200);
    EXPECT_EQ(answer.Field(), field) << target << " " << body.substr(0, 200);
  }
  Strings ListedNames(const std::string& query) {
    const Answer page = Ask("GET", "/v1/sandboxes?" + query);
    EXPECT_EQ(page.status, 200) << page.body;
    Strings names;
    for (const json& sandbox : page.body["sandboxes"])
      names.push_back(sandbox["request_id"].get<std::string>());
    return names;
  }

  fn::FnApi* fn_ = nullptr;  // set before SetUp
  EmptyCatalog catalog_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<http::BlockingClient> client_;
};

}  // namespace dsec::apiserver::testing
