// SPDX-License-Identifier: Apache-2.0
// `dsec cluster`: what an operator does on a machine that has the files of the CA.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "ca/key_files.h"
#include "cluster/call_error.h"
#include "cluster/membership.h"
#include "cluster/node_record.h"
#include "rpc/channel.h"
#include "runtime/shards.h"
#include "up/process.h"
#include "up/up.h"

namespace dsec::up {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr std::chrono::minutes kOperatorLife{5};
constexpr std::chrono::seconds kCallTime{20};

std::string_view StateName(v1::NodeState state) {
  switch (state) {
    case v1::NODE_JOINED:
      return "joined";
    case v1::NODE_CORDONED:
      return "cordoned";
    case v1::NODE_DRAINING:
      return "draining";
    case v1::NODE_DEAD:
      return "dead";
    default:
      return "unknown";
  }
}

// A certificate of the role "operator", for this call: whoever has the CA's key may.
Result<std::shared_ptr<const rpc::TlsContext>> OperatorContext(const std::string& ca_dir) {
  DSEC_TRY(const ca::AuthorityFiles files, ca::LoadAuthority(ca_dir));
  DSEC_TRY(const auto authority, ca::Authority::Load(files.authority));
  const rpc::TlsName name{authority->cluster(), "operator", "cli"};
  DSEC_TRY(const ca::KeyAndRequest made, ca::MakeRequest(name));
  DSEC_TRY(const ca::SigningRequest request, ca::ParseRequest(made.request));
  DSEC_TRY(const ca::Issued issued,
           authority->Issue(request, 1, Clock::System().Wall(), kOperatorLife));
  return rpc::TlsContext::Create(
      {issued.certificate, made.key, files.trusted, authority->cluster()});
}

Task<std::string> CallOn(runtime::Executor home, std::shared_ptr<const rpc::TlsContext> context,
                         cluster::HostPort place, std::string method, std::string request) {
  const Deadline deadline = Deadline::After(kCallTime);
  auto channel =
      co_await rpc::Channel::ConnectTls(home, place.host, place.port, std::move(context),
                                        rpc::TlsExpect{.roles = {"apiserver"}}, deadline);
  if (!channel.ok()) co_return std::move(channel).error();
  auto bytes =
      co_await (*channel)->CallRaw(cluster::kClusterService, method, std::move(request), deadline);
  if (!bytes.ok()) co_return std::move(bytes).error();
  v1::EdgeAnswer answer;
  if (!answer.ParseFromString(*bytes)) {
    co_return Error(Code::kUnavailable, "rpc.response", "the apiserver's answer does not parse");
  }
  if (answer.has_error()) co_return cluster::FromWire(answer.error());
  co_return std::move(*answer.mutable_body());
}

template <typename Reply, typename Request>
Result<Reply> Call(const std::string& ca_dir, const std::string& apiserver, const char* method,
                   const Request& request) {
  DSEC_TRY(auto context, OperatorContext(ca_dir));
  DSEC_TRY(cluster::HostPort place, cluster::ParseHostPort(apiserver, "apiserver"));
  runtime::Shards shards(1);
  DSEC_TRY(const std::string body,
           runtime::BlockOn(shards.at(0), CallOn(shards.at(0), std::move(context), std::move(place),
                                                 method, request.SerializeAsString())));
  Reply reply;
  if (!reply.ParseFromString(body)) {
    return Error(Code::kUnavailable, "rpc.response", "the apiserver's answer does not parse");
  }
  return reply;
}

struct Flags {
  std::string ca_dir = config::NodeConfig().ca_dir;
  std::string apiserver = config::NodeConfig().cluster_listen;
  std::string name, role = "edge", id, node;
};

Result<void> Init(const Flags& flags) {
  DSEC_TRY_VOID(ca::InitAuthority(flags.ca_dir, flags.name, Clock::System()));
  DSEC_TRY(const ca::AuthorityFiles files, ca::LoadAuthority(flags.ca_dir));
  DSEC_TRY(const auto authority, ca::Authority::Load(files.authority));
  std::printf("CA of %s in %s, SHA-256 %s\n", authority->cluster().c_str(), flags.ca_dir.c_str(),
              authority->fingerprint().c_str());
  return Ok();
}

Result<void> AddCa(const Flags& flags) {
  DSEC_TRY(const std::string next, ca::AddAuthority(flags.ca_dir, Clock::System()));
  std::printf(
      "The next CA is %s; it is trusted from now on. Copy %s to the other apiservers now; in %lld "
      "hours `dsec cluster ca switch` lets it sign.\n",
      next.c_str(), flags.ca_dir.c_str(), static_cast<long long>(ca::kTrustTime.count()));
  return Ok();
}

Result<void> SwitchCa(const Flags& flags) {
  DSEC_TRY(const std::string next, ca::SwitchAuthority(flags.ca_dir, Clock::System()));
  std::printf("The CA is %s from now on; copy %s to the other apiservers.\n", next.c_str(),
              flags.ca_dir.c_str());
  return Ok();
}

Result<void> Token(const Flags& flags) {
  v1::MakeTokenRequest request;
  request.set_role(flags.role);
  request.set_id(flags.id);
  DSEC_TRY(const auto reply,
           Call<v1::MakeTokenReply>(flags.ca_dir, flags.apiserver, "MakeToken", request));
  std::printf("%s\n", reply.token().c_str());
  return Ok();
}

Result<void> Nodes(const Flags& flags) {
  DSEC_TRY(const auto reply,
           Call<v1::NodesReply>(flags.ca_dir, flags.apiserver, "Nodes", v1::Empty()));
  std::printf("%-32s %-9s %6s  %-24s %s\n", "NODE", "STATE", "EPOCH", "ADDRESS", "BUILD");
  for (const v1::NodeRecord& node : reply.nodes()) {
    std::printf("%-32s %-9s %6llu  %-24s %s\n", node.node_id().c_str(),
                std::string(StateName(node.state())).c_str(),
                static_cast<unsigned long long>(node.epoch()), node.address().c_str(),
                node.build().c_str());
  }
  return Ok();
}

Result<void> Forget(const Flags& flags) {
  v1::ForgetNodeRequest request;
  request.set_node_id(flags.node);
  DSEC_TRY_VOID(Call<v1::Empty>(flags.ca_dir, flags.apiserver, "Forget", request));
  return Ok();
}

}  // namespace

int ClusterMain(int argc, char** argv) {
  Flags flags;
  CLI::App app("A cluster's CA, tokens and nodes", "dsec cluster");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--ca-dir", flags.ca_dir, "Folder of ca.key, ca.pem, trusted.pem");
  app.add_option("--apiserver", flags.apiserver, "HOST:PORT: cluster_listen of an apiserver");
  auto* init = app.add_subcommand("init", "Make the cluster's CA");
  init->add_option("--name", flags.name, "Of the cluster: 1 to 64 of [a-z0-9-]")->required();
  auto* authority = app.add_subcommand("ca", "Change the cluster's CA, in two steps");
  authority->require_subcommand(1);
  auto* add =
      authority->add_subcommand("add", "Make the next CA and trust it; it signs nothing yet");
  auto* change = authority->add_subcommand("switch", "Let the next CA sign, a day after `add`");
  auto* token = app.add_subcommand("token", "Make a join token: one use, ten minutes");
  token->add_option("--role", flags.role, "edge or watcher");
  token->add_option("--id", flags.id, "Only for the daemon of this id");
  auto* nodes = app.add_subcommand("nodes", "List the nodes");
  auto* forget = app.add_subcommand("forget", "Remove a node that will not come back");
  forget->add_option("node", flags.node, "Its id")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  Result<void> done = Ok();
  if (init->parsed()) done = Init(flags);
  if (add->parsed()) done = AddCa(flags);
  if (change->parsed()) done = SwitchCa(flags);
  if (token->parsed()) done = Token(flags);
  if (nodes->parsed()) done = Nodes(flags);
  if (forget->parsed()) done = Forget(flags);
  return done.ok() ? 0 : Fail(done.error());
}

}  // namespace dsec::up
