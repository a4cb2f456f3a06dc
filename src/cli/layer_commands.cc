// SPDX-License-Identifier: Apache-2.0
// layer build, ls, show, rm, verify, du; the rest is in pack_command.cc and collect_commands.cc.
// They work on the layer store itself, with or without a running node.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cli/build_progress.h"
#include "cli/collect_commands.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/pack_command.h"
#include "cli/sharing_commands.h"
#include "cli/trace_command.h"
#include "image/layer_check.h"
#include "image/layer_store.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

using image::LayerInfo;
using nlohmann::json;

constexpr char kDefaultStateDir[] = "/var/lib/dsec";
constexpr size_t kShownIdLength = 19;  // "sha256:" and the 12 digits that `layer` commands accept

struct BuildFlags {
  std::string kind, name, dir, tar, oci, docker, registry, ref, max_size, collapse, first_touch,
      compress = "none";
  bool plain_http = false, no_share = false;
  std::vector<std::string> labels;
  uint64_t max_entries = 0;
};

struct LayerFlags {
  std::string root, kind, prefix;
  std::string state_dir = kDefaultStateDir;
  std::vector<std::string> labels, refs;
  BuildFlags build;
};

Result<std::unique_ptr<image::LayerStore>> OpenStore(const LayerFlags& flags) {
  return image::LayerStore::Open(flags.root.empty() ? flags.state_dir + "/layers" : flags.root);
}

// The object that GET /v1/layers/{ref} gives.
json ToJson(const LayerInfo& layer) {
  json object = {{"id", layer.id.str()},
                 {"kind", image::KindName(layer.kind)},
                 {"names", layer.names},
                 {"meta_bytes", layer.meta_bytes},
                 {"blob_bytes", layer.blob_bytes},
                 {"entries", layer.entries},
                 {"content_bytes", layer.content_bytes},
                 {"created_unix_ms", layer.created_unix_ms},
                 {"source", layer.source},
                 {"labels", layer.labels}};
  for (const LayerId& id : layer.lower) object["lower"].push_back(id.str());
  if (!layer.config.empty()) {
    object["config"] = {{"env", layer.config.env},
                        {"workdir", layer.config.workdir},
                        {"user", layer.config.user},
                        {"entrypoint", layer.config.entrypoint},
                        {"cmd", layer.config.cmd}};
  }
  return object;
}

std::string Join(const std::vector<std::string>& words, std::string_view between) {
  return fmt::format("{}", fmt::join(words, between));
}

Result<image::BuildRequest> ToRequest(const BuildFlags& flags) {
  image::BuildRequest request;
  DSEC_TRY(request.kind, image::ParseKind(flags.kind));
  request.name = flags.name;
  request.ref = flags.ref;
  DSEC_TRY(request.compression, image::ParseCompression(flags.compress));
  DSEC_TRY(request.labels, ParseLabels(flags.labels));
  int sources = 0;
  const auto take = [&](const std::string& path, image::SourceKind kind) {
    if (path.empty()) return;
    ++sources;
    request.path = path;
    request.source = kind;
  };
  take(flags.dir, image::SourceKind::kDirectory);
  take(flags.tar, image::SourceKind::kTar);
  take(flags.oci, image::SourceKind::kOciLayout);
  take(flags.docker, image::SourceKind::kDockerArchive);
  take(flags.registry, image::SourceKind::kRegistry);
  request.plain_http = flags.plain_http;
  if (sources != 1) {
    return Error(Code::kInvalidArgument, "cli.value",
                 "give exactly one of --from-dir, --from-tar, --from-oci, --from-docker-archive, "
                 "--from-registry");
  }
  if (!flags.max_size.empty()) {
    DSEC_TRY(request.limits.max_bytes, ParseSize(flags.max_size, "--max-size"));
  }
  if (!flags.collapse.empty()) {
    DSEC_TRY(request.collapse_bytes, ParseSize(flags.collapse, "--collapse"));
  }
  if (flags.max_entries > 0) request.limits.max_entries = flags.max_entries;
  DSEC_TRY(request.first_touch, ReadFirstTouch(flags.first_touch));
  request.share = !flags.no_share;
  return request;
}

Result<void> Build(const LayerFlags& flags, bool as_json) {
  DSEC_TRY(const image::BuildRequest request, ToRequest(flags.build));
  DSEC_TRY(const auto store, OpenStore(flags));
  CatchInterrupts();
  ProgressLine line(!as_json);
  auto built = store->Build(request, [&](const image::Progress& progress) {
    line.Show(progress);
    return !Interrupted();
  });
  line.Clear();
  if (!built.ok()) return std::move(built).error();
  PrintWarnings(built->warnings, built->warning_count);
  const LayerInfo& layer = built->layer;
  if (as_json) {
    json object = ToJson(layer);
    object["existed"] = built->existed;
    object["warnings"] = built->warnings;
    object["warning_count"] = built->warning_count;
    object["content_copied"] = built->content_copied;
    object["fetch_ms"] = built->fetch_ms;
    object["read_ms"] = built->read_ms;
    object["write_ms"] = built->write_ms;
    object["shared_bytes"] = built->shared_bytes;
    object["share_ms"] = built->share_ms;
    object["publish_ms"] = built->publish_ms;
    PrintJson(object);
    return Ok();
  }
  const uint64_t millis =
      built->fetch_ms + built->read_ms + built->write_ms + built->share_ms + built->publish_ms;
  std::printf("%s\n", layer.id.str().c_str());
  std::fprintf(
      stderr, "%s %s%s%s: %llu entries, %s of content, %s stored, %s of it shared, %.1f s\n",
      built->existed ? "same as the existing" : "built",
      std::string(image::KindName(layer.kind)).c_str(), request.name.empty() ? "" : " ",
      request.name.c_str(), static_cast<unsigned long long>(layer.entries),
      ShowSize(layer.content_bytes).c_str(), ShowSize(layer.meta_bytes + layer.blob_bytes).c_str(),
      ShowSize(built->shared_bytes).c_str(), static_cast<double>(millis) / 1000);
  return Ok();
}

Result<image::ListFilter> ToFilter(const LayerFlags& flags) {
  image::ListFilter filter;
  if (!flags.kind.empty()) {
    DSEC_TRY(filter.kind, image::ParseKind(flags.kind));
  }
  filter.prefix = flags.prefix;
  DSEC_TRY(filter.labels, ParseLabels(flags.labels));
  return filter;
}

Result<void> List(const LayerFlags& flags, bool as_json) {
  DSEC_TRY(const auto filter, ToFilter(flags));
  DSEC_TRY(const auto store, OpenStore(flags));
  DSEC_TRY(auto layers, store->List(filter));
  if (as_json) {
    json list = json::array();
    for (const LayerInfo& layer : layers) list.push_back(ToJson(layer));
    PrintJson({{"layers", std::move(list)}});
    return Ok();
  }
  std::ranges::sort(layers, [](const LayerInfo& a, const LayerInfo& b) {
    if (a.names.empty() != b.names.empty()) return b.names.empty();
    return std::tie(a.names, a.id) < std::tie(b.names, b.id);
  });
  std::vector<std::vector<std::string>> rows;
  const int64_t now = UnixMillis(Clock::System().Wall());
  for (const LayerInfo& layer : layers) {
    rows.push_back({layer.names.empty() ? "-" : Join(layer.names, ","),
                    std::string(image::KindName(layer.kind)),
                    layer.id.str().substr(0, kShownIdLength), std::to_string(layer.entries),
                    ShowSize(layer.meta_bytes + layer.blob_bytes),
                    ShowAge(now - layer.created_unix_ms)});
  }
  std::fputs(Table({"NAME", "KIND", "ID", "ENTRIES", "SIZE", "AGE"}, rows).c_str(), stdout);
  return Ok();
}

Result<void> Show(const LayerFlags& flags, bool as_json) {
  DSEC_TRY(const auto store, OpenStore(flags));
  DSEC_TRY(const LayerInfo layer, store->Find(flags.refs.front()));
  if (as_json) {
    PrintJson(ToJson(layer));
    return Ok();
  }
  std::vector<std::vector<std::string>> rows = {
      {"id", layer.id.str()},
      {"kind", std::string(image::KindName(layer.kind))},
      {"names", Join(layer.names, ", ")},
      {"entries", std::to_string(layer.entries)},
      {"content", ShowSize(layer.content_bytes)},
      {"metadata", ShowSize(layer.meta_bytes)},
      {"data", ShowSize(layer.blob_bytes)},
      {"age", ShowAge(UnixMillis(Clock::System().Wall()) - layer.created_unix_ms)},
      {"source", layer.source}};
  for (const LayerId& id : layer.lower) rows.push_back({"above", id.str()});
  for (const auto& [key, value] : layer.labels) rows.push_back({"label", key + "=" + value});
  const image::ImageConfig& config = layer.config;
  for (const std::string& variable : config.env) rows.push_back({"env", variable});
  if (!config.workdir.empty()) rows.push_back({"workdir", config.workdir});
  if (!config.user.empty()) rows.push_back({"user", config.user});
  if (!config.entrypoint.empty()) rows.push_back({"entrypoint", json(config.entrypoint).dump()});
  if (!config.cmd.empty()) rows.push_back({"cmd", json(config.cmd).dump()});
  std::fputs(Table({"FIELD", "VALUE"}, rows).c_str(), stdout);
  return Ok();
}

Result<void> Remove(const LayerFlags& flags) {
  DSEC_TRY(const auto store, OpenStore(flags));
  for (const std::string& ref : flags.refs) {
    DSEC_TRY_VOID(store->Remove(ref));
    std::puts(ref.c_str());
  }
  return Ok();
}

// Each layer by itself: one that is damaged does not keep the others from being looked at.
Result<void> Verify(const LayerFlags& flags, bool as_json) {
  DSEC_TRY(const auto store, OpenStore(flags));
  std::vector<std::string> refs = flags.refs;
  if (refs.empty()) {
    DSEC_TRY(const auto layers, store->List({}));
    for (const LayerInfo& layer : layers) refs.push_back(layer.id.str());
  } else {
    // With what lies below them.
    for (const std::string& ref : flags.refs) {
      const auto layer = store->Find(ref);
      if (!layer.ok()) continue;
      for (const LayerId& id : layer->lower) refs.push_back(id.str());
    }
  }
  CatchInterrupts();
  ProgressLine line(!as_json);
  json results = json::array();
  size_t damaged = 0;
  for (const std::string& ref : refs) {
    const auto verified = image::VerifyLayer(*store, ref, [&](const image::Progress& progress) {
      line.Show(progress);
      return !Interrupted();
    });
    line.Clear();
    if (!verified.ok() && verified.error().reason() != "layer.corrupt") return verified.error();
    if (!verified.ok()) ++damaged;
    if (as_json) {
      json object = {{"ref", ref}, {"ok", verified.ok()}};
      if (!verified.ok()) object["error"] = verified.error().message();
      results.push_back(std::move(object));
    } else if (verified.ok()) {
      std::printf("%s ok\n", ref.c_str());
    } else {
      std::printf("%s damaged: %s\n", ref.c_str(), verified.error().message().c_str());
    }
  }
  if (as_json) PrintJson({{"layers", std::move(results)}, {"damaged", damaged}});
  if (damaged == 0) return Ok();
  return Error(Code::kInternal, "layer.corrupt",
               fmt::format("{} of {} layers are damaged", damaged, refs.size()));
}

Result<void> Usage(const LayerFlags& flags, bool as_json) {
  DSEC_TRY(const auto filter, ToFilter(flags));
  DSEC_TRY(const auto store, OpenStore(flags));
  DSEC_TRY(const image::StoreUsage usage, image::MeasureStore(*store, filter));
  uint64_t meta = 0, blob = 0, shared = 0, trace = 0, content = 0, unnamed = 0;
  json list = json::array();
  std::vector<std::vector<std::string>> rows;
  for (const image::LayerUsage& item : usage.layers) {
    const LayerInfo& layer = item.layer;
    meta += item.meta_blocks;
    blob += item.blob_blocks;
    shared += item.shared_bytes;
    trace += item.trace_blocks;
    content += layer.content_bytes;
    if (item.unnamed) unnamed += item.meta_blocks + item.blob_blocks;
    list.push_back({{"id", layer.id.str()},
                    {"kind", image::KindName(layer.kind)},
                    {"names", layer.names},
                    {"content_bytes", layer.content_bytes},
                    {"meta_allocated_bytes", item.meta_blocks},
                    {"blob_allocated_bytes", item.blob_blocks},
                    {"shared_bytes", item.shared_bytes},
                    {"trace_allocated_bytes", item.trace_blocks}});
    rows.push_back(
        {ShowSize(item.meta_blocks + item.blob_blocks), ShowSize(item.meta_blocks),
         ShowSize(item.blob_blocks), ShowSize(item.shared_bytes), ShowSize(layer.content_bytes),
         std::string(image::KindName(layer.kind)),
         layer.names.empty() ? layer.id.str().substr(0, kShownIdLength) : Join(layer.names, ",")});
  }
  if (as_json) {
    PrintJson({{"layers", std::move(list)},
               {"meta_allocated_bytes", meta},
               {"blob_allocated_bytes", blob},
               {"shared_bytes", shared},
               {"kept_allocated_bytes", usage.kept_blocks},
               {"trace_allocated_bytes", trace},
               {"content_bytes", content},
               {"unnamed_allocated_bytes", unnamed},
               {"removed_allocated_bytes", usage.condemned_blocks},
               {"work_allocated_bytes", usage.work_blocks}});
    return Ok();
  }
  rows.push_back({ShowSize(meta + blob), ShowSize(meta), ShowSize(blob), ShowSize(shared),
                  ShowSize(content), "", fmt::format("total of {} layers", usage.layers.size())});
  std::fputs(
      Table({"STORED", "METADATA", "DATA", "SHARED", "CONTENT", "KIND", "NAME"}, rows).c_str(),
      stdout);
  if (trace > 0) std::printf("%s more are traces of first reads\n", ShowSize(trace).c_str());
  if (usage.kept_blocks > 0)
    std::printf("%s more are of removed layers, kept for those that share them\n",
                ShowSize(usage.kept_blocks).c_str());
  if (unnamed > 0) std::printf("%s are of layers without a name\n", ShowSize(unnamed).c_str());
  if (usage.condemned_blocks > 0)
    std::printf("%s are of removed layers (layer gc)\n", ShowSize(usage.condemned_blocks).c_str());
  if (usage.work_blocks > 0)
    std::printf("%s are of builds under way\n", ShowSize(usage.work_blocks).c_str());
  return Ok();
}

}  // namespace

void AddLayerCommands(CLI::App& app, Context& context) {
  auto flags = std::make_shared<LayerFlags>();
  CLI::App* layer = app.add_subcommand("layer", "Build and manage layers");
  layer->require_subcommand(1);
  layer->fallthrough();
  layer->add_option("--layers", flags->root, "Layer store (default: layers/ of the state folder)")
      ->envname("DSEC_LAYERS");
  layer->add_option("--state-dir", flags->state_dir, "State folder of the node")
      ->capture_default_str();
  const auto run = [&context](CLI::App* command, const auto& body) {
    command->callback([&context, body] {
      if (auto done = body(); !done.ok()) context.Fail(done.error());
    });
  };

  CLI::App* build = layer->add_subcommand("build", "Build a layer from a folder or an archive");
  BuildFlags& from = flags->build;
  build->add_option("--kind", from.kind, "base, workspace or toolkit")->required();
  build->add_option("--name", from.name, "NAME:TAG that will lead to the layer");
  build->add_option("--from-dir", from.dir, "A folder, taken as it is");
  build->add_option("--from-tar", from.tar, "A tar archive (also .gz .bz2 .xz .zst); - is stdin");
  build->add_option("--from-oci", from.oci, "An OCI image layout folder");
  build->add_option("--from-docker-archive", from.docker, "What `docker save` writes");
  build->add_option("--from-registry", from.registry, "HOST[:PORT]/NAME[:TAG|@DIGEST], by skopeo");
  build->add_flag("--plain-http", from.plain_http, "The registry has no TLS");
  build->add_option("--ref", from.ref, "Which image, when the source holds several");
  build->add_option("--first-touch", from.first_touch,
                    "File: what runs read first, a PATH or PATH<tab>OFFSET<tab>LENGTH a line");
  build->add_option("--compress", from.compress, "none or lz4hc[:LEVEL], from 3 to 12")
      ->capture_default_str();
  build->add_option("--collapse", from.collapse,
                    "Of an image with layers: up to how much content they become one (3g)");
  build->add_flag("--no-share", from.no_share,
                  "Keep all content, also what other layers of the store have");
  build->add_option("--label", from.labels, "KEY=VALUE (repeat)");
  build->add_option("--max-size", from.max_size, "Refuse more content than this (64g)");
  build->add_option("--max-entries", from.max_entries, "Refuse more entries than this (2000000)");
  run(build, [flags, &context] { return Build(*flags, context.json); });

  CLI::App* list = layer->add_subcommand("ls", "List layers");
  list->add_option("--kind", flags->kind, "Only this kind");
  list->add_option("--prefix", flags->prefix, "Only names or ids that begin so");
  list->add_option("--label", flags->labels, "Only with this KEY=VALUE (repeat)");
  run(list, [flags, &context] { return List(*flags, context.json); });

  CLI::App* show = layer->add_subcommand("show", "Show one layer");
  show->add_option("ref", flags->refs, "NAME:TAG or id")->required()->expected(1);
  run(show, [flags, &context] { return Show(*flags, context.json); });

  CLI::App* verify = layer->add_subcommand(
      "verify", "Read all bytes of layers and compare them with what their ids stand for");
  verify->add_option("ref", flags->refs, "NAME:TAG or ids (default: all layers)");
  run(verify, [flags, &context] { return Verify(*flags, context.json); });

  CLI::App* usage = layer->add_subcommand("du", "What layers take in the store");
  usage->add_option("--kind", flags->kind, "Only this kind");
  usage->add_option("--prefix", flags->prefix, "Only names or ids that begin so");
  usage->add_option("--label", flags->labels, "Only with this KEY=VALUE (repeat)");
  run(usage, [flags, &context] { return Usage(*flags, context.json); });

  CLI::App* remove =
      layer->add_subcommand("rm", "Take names away; with its last name a layer goes");
  remove->add_option("ref", flags->refs, "NAME:TAG or ids")->required();
  run(remove, [flags] { return Remove(*flags); });
  AddPackCommands(*layer, context, [flags] { return OpenStore(*flags); });
  AddTraceCommands(*layer, context, [flags] { return OpenStore(*flags); });
  AddCollectCommands(*layer, context, [flags] { return OpenStore(*flags); });
  AddSharingCommands(*layer, context, [flags] { return OpenStore(*flags); });
}

}  // namespace dsec::cli
