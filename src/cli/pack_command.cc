// SPDX-License-Identifier: Apache-2.0
// layer pack (through the API of a node), layer flatten and layer compress (on the layer store
// itself).
#include "cli/pack_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/build_progress.h"
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
  std::string kind = "workspace", name, compress = "none";
  std::vector<std::string> labels, refs;
};

struct CompressFlags {
  std::string ref, name, method = "lz4hc", first_touch;
  std::vector<std::string> labels;
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

// Makes a layer with a line of progress, and says what it has become.
Result<void> ShowBuild(
    bool as_json,
    const std::function<Result<image::BuildReport>(const image::ProgressFn&)>& build) {
  CatchInterrupts();
  ProgressLine line(!as_json);
  const auto built = build([&](const image::Progress& progress) {
    line.Show(progress);
    return !Interrupted();
  });
  line.Clear();
  if (!built.ok()) return built.error();
  const image::LayerInfo& layer = built->layer;
  if (as_json) {
    PrintJson({{"id", layer.id.str()},
               {"kind", image::KindName(layer.kind)},
               {"names", layer.names},
               {"labels", layer.labels},
               {"entries", layer.entries},
               {"content_bytes", layer.content_bytes},
               {"meta_bytes", layer.meta_bytes},
               {"blob_bytes", layer.blob_bytes},
               {"existed", built->existed},
               {"warnings", built->warnings},
               {"warning_count", built->warning_count}});
    return Ok();
  }
  PrintWarnings(built->warnings, built->warning_count);
  std::puts(layer.id.str().c_str());
  std::fprintf(stderr, "%s: %llu entries, %s of content, %s stored\n",
               built->existed ? "same as the existing" : "built",
               static_cast<unsigned long long>(layer.entries),
               ShowSize(layer.content_bytes).c_str(),
               ShowSize(layer.meta_bytes + layer.blob_bytes).c_str());
  return Ok();
}

Result<void> Flatten(const FlattenFlags& flags, const StoreOpener& open, bool as_json) {
  image::FlattenRequest request;
  request.refs = flags.refs;
  DSEC_TRY(request.kind, image::ParseKind(flags.kind));
  request.name = flags.name;
  DSEC_TRY(request.labels, ParseLabels(flags.labels));
  DSEC_TRY(request.compression, image::ParseCompression(flags.compress));
  DSEC_TRY(const auto store, open());
  image::LayerMounts mounts(*store);
  return ShowBuild(as_json, [&](const image::ProgressFn& progress) {
    return image::Flatten(*store, mounts, request, progress);
  });
}

Result<void> Compress(const CompressFlags& flags, const StoreOpener& open, bool as_json) {
  image::CompressRequest request;
  request.ref = flags.ref;
  request.name = flags.name;
  DSEC_TRY(request.labels, ParseLabels(flags.labels));
  DSEC_TRY(request.first_touch, ReadFirstTouch(flags.first_touch));
  DSEC_TRY(request.compression, image::ParseCompression(flags.method));
  DSEC_TRY(const auto store, open());
  image::LayerMounts mounts(*store);
  return ShowBuild(as_json, [&](const image::ProgressFn& progress) {
    return image::CompressLayer(*store, mounts, request, progress);
  });
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
  CLI::App* flatten =
      layer.add_subcommand("flatten", "Make one layer of several, lowest first, or write one anew");
  flatten->add_option("ref", flags->refs, "NAME:TAG or ids")->required()->expected(1, 500);
  flatten->add_option("--name", flags->name, "NAME:TAG that will lead to the layer");
  flatten->add_option("--kind", flags->kind, "base, workspace or toolkit")->capture_default_str();
  flatten->add_option("--label", flags->labels, "KEY=VALUE (repeat)");
  flatten->add_option("--compress", flags->compress, "none or lz4hc[:LEVEL], from 3 to 12")
      ->capture_default_str();
  flatten->callback([flags, open, &context] {
    if (auto done = Flatten(*flags, open, context.json); !done.ok()) context.Fail(done.error());
  });

  const auto compress_flags = std::make_shared<CompressFlags>();
  CLI::App* compress = layer.add_subcommand("compress", "Make the compressed form of a layer");
  compress->add_option("ref", compress_flags->ref, "NAME:TAG or id")->required();
  compress->add_option("--name", compress_flags->name, "NAME:TAG that will lead to the new layer");
  compress
      ->add_option("--method", compress_flags->method,
                   "lz4hc[:LEVEL], from 3 to 12, or none for the plain form again")
      ->capture_default_str();
  compress->add_option("--first-touch", compress_flags->first_touch, "As of build");
  compress->add_option("--label", compress_flags->labels, "KEY=VALUE (repeat)");
  compress->callback([compress_flags, open = std::move(open), &context] {
    auto done = Compress(*compress_flags, open, context.json);
    if (!done.ok()) context.Fail(done.error());
  });
}

}  // namespace dsec::cli
