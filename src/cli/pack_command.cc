// SPDX-License-Identifier: Apache-2.0
// layer pack (through the API of a node) and layer flatten (on the layer store itself).
#include "cli/pack_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/output.h"
#include "http/error_body.h"
#include "http/target.h"
#include "image/flatten.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct PackFlags {
  std::string sandbox, kind = "workspace", name, timeout;
  std::vector<std::string> labels, scrub, canary_paths, canary_contents;
  bool no_default_scrub = false;
};

struct FlattenFlags {
  std::string kind = "workspace", name;
  std::vector<std::string> labels, refs;
};

Result<void> Pack(const PackFlags& flags, Context& context, Connection& api) {
  json body = {{"kind", flags.kind}, {"name", flags.name}};
  DSEC_TRY(const auto labels, ParseLabels(flags.labels));
  body["labels"] = labels;
  body["scrub"] = flags.scrub;
  body["default_scrub"] = !flags.no_default_scrub;
  body["canary_paths"] = flags.canary_paths;
  body["canary_contents"] = flags.canary_contents;
  if (!flags.timeout.empty()) {
    DSEC_TRY(const auto millis, ParseMillis(flags.timeout, "--timeout"));
    body["timeout_ms"] = millis;
  }
  const bool shown = !context.json && ::isatty(STDERR_FILENO) == 1;
  json last;
  DSEC_TRY_VOID(api.Stream(
      "POST", "/v1/sandboxes/" + http::PercentEncode(flags.sandbox) + "/pack", body.dump(),
      [&](std::string_view line) {
        json record = json::parse(line, nullptr, false);
        if (record.is_object() && record.value("type", "") == "progress") {
          if (shown) {
            std::fprintf(stderr, "\r%s: %llu entries, %s\x1b[K", record.value("phase", "").c_str(),
                         static_cast<unsigned long long>(record.value("entries", uint64_t{0})),
                         ShowSize(record.value("bytes", uint64_t{0})).c_str());
          }
        } else {
          last = std::move(record);
        }
        return true;
      }));
  if (shown) std::fputs("\r\x1b[K", stderr);
  if (last.is_object() && last.contains("error")) return http::ErrorFromReply(500, last.dump());
  if (!last.is_object() || !last.contains("layer")) {
    return Error(Code::kUnavailable, "client.connection", "the reply ended before its last record");
  }
  if (context.json) {
    PrintJson(last);
    return Ok();
  }
  PrintWarnings(last.value("warnings", std::vector<std::string>()),
                last.value("warning_count", uint64_t{0}));
  const json& layer = last["layer"];
  std::puts(layer.value("id", "").c_str());
  std::fprintf(
      stderr,
      "%s %s: %llu entries, %s of content, %llu left out by patterns, still for %.1f ms, %.1f s\n",
      last.value("existed", false) ? "same as the existing" : "packed",
      layer.value("kind", "").c_str(),
      static_cast<unsigned long long>(layer.value("entries", uint64_t{0})),
      ShowSize(layer.value("content_bytes", uint64_t{0})).c_str(),
      static_cast<unsigned long long>(last.value("scrubbed", uint64_t{0})),
      static_cast<double>(last.value("frozen_us", uint64_t{0})) / 1000,
      static_cast<double>(last.value("millis", uint64_t{0})) / 1000);
  return Ok();
}

Result<void> Flatten(const FlattenFlags& flags, const StoreOpener& open, bool as_json) {
  image::FlattenRequest request;
  request.refs = flags.refs;
  DSEC_TRY(request.kind, image::ParseKind(flags.kind));
  request.name = flags.name;
  DSEC_TRY(request.labels, ParseLabels(flags.labels));
  DSEC_TRY(const auto store, open());
  image::LayerMounts mounts(*store);
  DSEC_TRY(const auto built, image::Flatten(*store, mounts, request, nullptr));
  if (as_json) {
    PrintJson({{"id", built.layer.id.str()},
               {"kind", image::KindName(built.layer.kind)},
               {"names", built.layer.names},
               {"entries", built.layer.entries},
               {"content_bytes", built.layer.content_bytes},
               {"meta_bytes", built.layer.meta_bytes},
               {"blob_bytes", built.layer.blob_bytes},
               {"existed", built.existed},
               {"warnings", built.warnings},
               {"warning_count", built.warning_count}});
    return Ok();
  }
  PrintWarnings(built.warnings, built.warning_count);
  std::puts(built.layer.id.str().c_str());
  return Ok();
}

}  // namespace

void AddPackCommands(CLI::App& layer, Context& context, StoreOpener open) {
  const auto pack_flags = std::make_shared<PackFlags>();
  CLI::App* pack = layer.add_subcommand("pack", "Make a layer of what changed in a sandbox");
  pack->add_option("sandbox", pack_flags->sandbox, "Its id")->required();
  pack->add_option("--name", pack_flags->name, "NAME:TAG that will lead to the layer");
  pack->add_option("--kind", pack_flags->kind, "workspace or toolkit")->capture_default_str();
  pack->add_option("--label", pack_flags->labels, "KEY=VALUE (repeat)");
  pack->add_option("--scrub", pack_flags->scrub, "Pattern of paths to leave out (repeat)");
  pack->add_flag("--no-default-scrub", pack_flags->no_default_scrub,
                 "Keep temporary files, logs, histories and caches");
  pack->add_option("--canary-path", pack_flags->canary_paths,
                   "Refuse when a path matches this pattern (repeat)");
  pack->add_option("--canary-content", pack_flags->canary_contents,
                   "Refuse when a file holds this text (repeat)");
  pack->add_option("--timeout", pack_flags->timeout, "Give up after this long (10m)");
  pack->callback([pack_flags, &context] {
    const auto api = context.Open();
    if (api == nullptr) return;
    if (auto done = Pack(*pack_flags, context, *api); !done.ok()) context.Fail(done.error());
  });

  const auto flags = std::make_shared<FlattenFlags>();
  CLI::App* flatten = layer.add_subcommand("flatten", "Make one layer of several, lowest first");
  flatten->add_option("ref", flags->refs, "NAME:TAG or ids")->required()->expected(2, 500);
  flatten->add_option("--name", flags->name, "NAME:TAG that will lead to the layer");
  flatten->add_option("--kind", flags->kind, "base, workspace or toolkit")->capture_default_str();
  flatten->add_option("--label", flags->labels, "KEY=VALUE (repeat)");
  flatten->callback([flags, open = std::move(open), &context] {
    if (auto done = Flatten(*flags, open, context.json); !done.ok()) context.Fail(done.error());
  });
}

}  // namespace dsec::cli
