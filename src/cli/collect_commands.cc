// SPDX-License-Identifier: Apache-2.0
// layer gc, nodes, forget: what removes layers that nobody needs, and who keeps it from doing so.
// They work on the layer store itself, or through the API of a node on that node's store.
#include "cli/collect_commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "http/target.h"
#include "image/node_lease.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct CollectFlags {
  StoreOpener open;
  bool use_api = false;
  std::string unnamed_for = "7d";
  std::string grace = "10m";
  bool dry_run = false;
  std::string node;
};

// As --ttl, and days.
Result<std::chrono::milliseconds> ParseTime(std::string_view text, std::string_view flag) {
  const bool days = text.ends_with('d');
  if (days) text.remove_suffix(1);
  DSEC_TRY(const uint64_t value,
           ParseMillis(days ? fmt::format("{}h", text) : std::string(text), flag));
  constexpr std::chrono::milliseconds kMost = std::chrono::hours(24 * 365 * 10);
  const auto unit = days ? uint64_t{24} : uint64_t{1};
  if (value > static_cast<uint64_t>(kMost.count()) / unit) {
    return Error(Code::kInvalidArgument, "cli.value", fmt::format("{}: ten years at most", flag))
        .WithField(std::string(flag));
  }
  return std::chrono::milliseconds(value * unit);
}

// What the API answers, of the store itself.
json ToJson(const image::CollectReport& report, bool dry_run) {
  json removed = json::array(), in_use = json::array();
  for (const LayerId& id : report.removed) removed.push_back(id.str());
  for (const auto& [id, by] : report.in_use) in_use.push_back({{"id", id.str()}, {"by", by}});
  return {{"removed", std::move(removed)},
          {"removed_bytes", report.removed_bytes},
          {"in_use", std::move(in_use)},
          {"young", report.young},
          {"waiting", report.waiting},
          {"deleted", report.deleted},
          {"dry_run", dry_run}};
}

json ToJson(const std::vector<image::Lease>& leases) {
  json list = json::array();
  for (const image::Lease& lease : leases) {
    list.push_back({{"node", lease.node},
                    {"epoch", lease.epoch},
                    {"layers", lease.layers.size()},
                    {"renewed_unix_ms", lease.renewed_unix_ms}});
  }
  return {{"nodes", std::move(list)}};
}

Result<json> Ask(Context& context, std::string_view method, const std::string& target,
                 const json& body = nullptr) {
  DSEC_TRY(auto endpoint, FindEndpoint(context.url, context.key));
  Connection api(std::move(endpoint));
  DSEC_TRY(const Reply reply, api.Call(method, target, body.is_null() ? "" : body.dump()));
  return reply.body.empty() ? json() : json::parse(reply.body);
}

Result<json> CollectLayers(const CollectFlags& flags, Context& context) {
  image::CollectOptions options;
  DSEC_TRY(options.unnamed_for, ParseTime(flags.unnamed_for, "--unnamed-for"));
  DSEC_TRY(options.grace, ParseTime(flags.grace, "--grace"));
  options.dry_run = flags.dry_run;
  if (flags.use_api) {
    return Ask(context, "POST", "/v1/layers:collect",
               {{"unnamed_for_ms", options.unnamed_for.count()},
                {"grace_ms", options.grace.count()},
                {"dry_run", options.dry_run}});
  }
  DSEC_TRY(const auto store, flags.open());
  DSEC_TRY(const image::CollectReport report, store->Collect(options));
  return ToJson(report, options.dry_run);
}

Result<void> Collect(const CollectFlags& flags, Context& context) {
  DSEC_TRY(const json report, CollectLayers(flags, context));
  if (context.json) {
    PrintJson(report);
    return Ok();
  }
  const json& removed = report.at("removed");
  for (const json& id : removed) std::puts(id.get<std::string>().c_str());
  for (const json& item : report.at("in_use")) {
    std::fprintf(stderr, "%s stays: in use by %s\n", item.at("id").get<std::string>().c_str(),
                 item.at("by").get<std::string>().c_str());
  }
  const auto number = [&](const char* key) { return report.at(key).get<unsigned long long>(); };
  std::fprintf(
      stderr,
      "%s %zu layers without a name (%s); %llu are too young; files of %llu removed layers "
      "deleted, of %llu kept for now\n",
      flags.dry_run ? "would remove" : "removed", removed.size(),
      ShowSize(number("removed_bytes")).c_str(), number("young"), number("deleted"),
      number("waiting"));
  return Ok();
}

Result<json> LayerNodes(const CollectFlags& flags, Context& context) {
  if (flags.use_api) return Ask(context, "GET", "/v1/layer_nodes");
  DSEC_TRY(const auto store, flags.open());
  DSEC_TRY(const auto leases, image::ReadLeases(store->root()));
  return ToJson(leases);
}

Result<void> Nodes(const CollectFlags& flags, Context& context) {
  DSEC_TRY(const json answer, LayerNodes(flags, context));
  if (context.json) {
    PrintJson(answer);
    return Ok();
  }
  std::vector<std::vector<std::string>> rows;
  const int64_t now = UnixMillis(Clock::System().Wall());
  for (const json& node : answer.at("nodes")) {
    rows.push_back({node.at("node").get<std::string>(),
                    std::to_string(node.at("layers").get<uint64_t>()),
                    ShowAge(now - node.at("renewed_unix_ms").get<int64_t>()),
                    node.at("epoch").get<std::string>()});
  }
  std::fputs(Table({"NODE", "LAYERS", "RENEWED", "EPOCH"}, rows).c_str(), stdout);
  return Ok();
}

Result<void> Forget(const CollectFlags& flags, Context& context) {
  if (flags.use_api) {
    DSEC_TRY_VOID(Ask(context, "DELETE", "/v1/layer_nodes/" + http::PercentEncode(flags.node)));
    return Ok();
  }
  DSEC_TRY(const auto store, flags.open());
  return image::ForgetNode(store->root(), flags.node);
}

}  // namespace

void AddCollectCommands(CLI::App& layer, Context& context, StoreOpener open) {
  auto flags = std::make_shared<CollectFlags>();
  flags->open = std::move(open);
  // The store where one is named, else the node where one is named.
  const auto run = [&context, &layer, flags](CLI::App* command, const auto& body) {
    command->callback([&context, &layer, flags, body] {
      const bool store =
          layer.get_option("--layers")->count() + layer.get_option("--state-dir")->count() > 0;
      const bool node = !context.url.empty() || std::getenv("DSEC_URL") != nullptr;
      flags->use_api = node && !store;
      if (auto done = body(*flags, context); !done.ok()) context.Fail(done.error());
    });
  };
  CLI::App* collect = layer.add_subcommand(
      "gc", "Remove layers that no name leads to, and files that no node can have mounted");
  collect->add_option("--unnamed-for", flags->unnamed_for, "Only without a name or use so long")
      ->capture_default_str();
  collect->add_option("--grace", flags->grace, "Keep the files of removed layers so long")
      ->capture_default_str();
  collect->add_flag("--dry-run", flags->dry_run, "Say what would be removed");
  run(collect, Collect);

  CLI::App* nodes = layer.add_subcommand("nodes", "Which nodes have layers of the store in use");
  run(nodes, Nodes);

  CLI::App* forget = layer.add_subcommand(
      "forget", "Say that a node is gone for good, so that its layers may be removed");
  forget->add_option("node", flags->node, "As `layer nodes` shows it")->required();
  run(forget, Forget);
}

}  // namespace dsec::cli
