// SPDX-License-Identifier: Apache-2.0
// layer gc, nodes, forget: what removes layers that nobody needs, and who keeps it from doing so.
#include "cli/collect_commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "image/node_lease.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct CollectFlags {
  StoreOpener open;
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

Result<void> Collect(const CollectFlags& flags, bool as_json) {
  image::CollectOptions options;
  DSEC_TRY(options.unnamed_for, ParseTime(flags.unnamed_for, "--unnamed-for"));
  DSEC_TRY(options.grace, ParseTime(flags.grace, "--grace"));
  options.dry_run = flags.dry_run;
  DSEC_TRY(const auto store, flags.open());
  DSEC_TRY(const image::CollectReport report, store->Collect(options));
  if (as_json) {
    json removed = json::array(), in_use = json::array();
    for (const LayerId& id : report.removed) removed.push_back(id.str());
    for (const auto& [id, by] : report.in_use) in_use.push_back({{"id", id.str()}, {"by", by}});
    PrintJson({{"removed", std::move(removed)},
               {"removed_bytes", report.removed_bytes},
               {"in_use", std::move(in_use)},
               {"young", report.young},
               {"waiting", report.waiting},
               {"deleted", report.deleted},
               {"dry_run", options.dry_run}});
    return Ok();
  }
  for (const LayerId& id : report.removed) std::puts(id.str().c_str());
  for (const auto& [id, by] : report.in_use)
    std::fprintf(stderr, "%s stays: in use by %s\n", id.str().c_str(), by.c_str());
  std::fprintf(
      stderr,
      "%s %zu layers without a name (%s); %llu are too young; files of %llu removed layers "
      "deleted, of %llu kept for now\n",
      options.dry_run ? "would remove" : "removed", report.removed.size(),
      ShowSize(report.removed_bytes).c_str(), static_cast<unsigned long long>(report.young),
      static_cast<unsigned long long>(report.deleted),
      static_cast<unsigned long long>(report.waiting));
  return Ok();
}

Result<void> Nodes(const CollectFlags& flags, bool as_json) {
  DSEC_TRY(const auto store, flags.open());
  DSEC_TRY(const auto leases, image::ReadLeases(store->root()));
  json list = json::array();
  std::vector<std::vector<std::string>> rows;
  const int64_t now = UnixMillis(Clock::System().Wall());
  for (const image::Lease& lease : leases) {
    list.push_back({{"node", lease.node},
                    {"epoch", lease.epoch},
                    {"layers", lease.layers.size()},
                    {"renewed_unix_ms", lease.renewed_unix_ms}});
    rows.push_back({lease.node, std::to_string(lease.layers.size()),
                    ShowAge(now - lease.renewed_unix_ms), lease.epoch});
  }
  if (as_json) {
    PrintJson({{"nodes", std::move(list)}});
    return Ok();
  }
  std::fputs(Table({"NODE", "LAYERS", "RENEWED", "EPOCH"}, rows).c_str(), stdout);
  return Ok();
}

Result<void> Forget(const CollectFlags& flags) {
  DSEC_TRY(const auto store, flags.open());
  return image::ForgetNode(store->root(), flags.node);
}

}  // namespace

void AddCollectCommands(CLI::App& layer, Context& context, StoreOpener open) {
  auto flags = std::make_shared<CollectFlags>();
  flags->open = std::move(open);
  const auto run = [&context](CLI::App* command, const auto& body) {
    command->callback([&context, body] {
      if (auto done = body(); !done.ok()) context.Fail(done.error());
    });
  };
  CLI::App* collect = layer.add_subcommand(
      "gc", "Remove layers that no name leads to, and files that no node can have mounted");
  collect->add_option("--unnamed-for", flags->unnamed_for, "Only without a name or use so long")
      ->capture_default_str();
  collect->add_option("--grace", flags->grace, "Keep the files of removed layers so long")
      ->capture_default_str();
  collect->add_flag("--dry-run", flags->dry_run, "Say what would be removed");
  run(collect, [flags, &context] { return Collect(*flags, context.json); });

  CLI::App* nodes = layer.add_subcommand("nodes", "Which nodes have layers of the store in use");
  run(nodes, [flags, &context] { return Nodes(*flags, context.json); });

  CLI::App* forget = layer.add_subcommand(
      "forget", "Say that a node is gone for good, so that its layers may be removed");
  forget->add_option("node", flags->node, "As `layer nodes` shows it")->required();
  run(forget, [flags] { return Forget(*flags); });
}

}  // namespace dsec::cli
