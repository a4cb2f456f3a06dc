// SPDX-License-Identifier: Apache-2.0
// layer export, index: what a layer is apart from the form that the store keeps it in, and what the
// store knows of the content of its layers.
#include "cli/sharing_commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/build_progress.h"
#include "cli/output.h"
#include "image/layer_export.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct SharingFlags {
  StoreOpener open;
  std::vector<std::string> refs;
  std::string to;
};

Result<void> Export(const SharingFlags& flags, bool as_json) {
  DSEC_TRY(const auto store, flags.open());
  CatchInterrupts();
  ProgressLine line(!as_json);
  json list = json::array();
  std::vector<LayerId> ids;
  for (const std::string& ref : flags.refs) {
    DSEC_TRY(const auto layer, store->Find(ref));
    // What lies below first: with the manifest of the upper one the image is there.
    ids.insert(ids.end(), layer.lower.begin(), layer.lower.end());
    ids.push_back(layer.id);
  }
  for (const LayerId& id : ids) {
    auto made = image::ExportLayer(*store, id, flags.to, [&](const image::Progress& state) {
      line.Show(state);
      return !Interrupted();
    });
    line.Clear();
    if (!made.ok()) return std::move(made).error().Context("export {}", id.str());
    list.push_back({{"id", id.str()}, {"existed", !*made}});
    if (!as_json) std::printf("%s%s\n", id.str().c_str(), *made ? "" : " was there");
  }
  if (as_json) PrintJson({{"layers", std::move(list)}});
  return Ok();
}

Result<void> Index(const SharingFlags& flags, bool as_json) {
  DSEC_TRY(const auto store, flags.open());
  CatchInterrupts();
  ProgressLine line(!as_json);
  auto read = store->IndexContent([&](const image::Progress& state) {
    line.Show(state);
    return !Interrupted();
  });
  line.Clear();
  if (!read.ok()) return std::move(read).error();
  if (as_json) {
    PrintJson({{"read", *read}});
  } else {
    std::fprintf(stderr, "read the content of %llu layers\n",
                 static_cast<unsigned long long>(*read));
  }
  return Ok();
}

}  // namespace

void AddSharingCommands(CLI::App& layer, Context& context, StoreOpener open) {
  auto flags = std::make_shared<SharingFlags>();
  flags->open = std::move(open);
  const auto run = [&context](CLI::App* command, const auto& body) {
    command->callback([&context, body] {
      if (auto done = body(); !done.ok()) context.Fail(done.error());
    });
  };
  CLI::App* exported = layer.add_subcommand(
      "export", "Write the files of layers as an object store serves them (layers_url)");
  exported->add_option("ref", flags->refs, "NAME:TAG or ids")->required();
  exported->add_option("--to", flags->to, "Folder, in which blobs/<hex>/ is made")->required();
  run(exported, [flags, &context] { return Export(*flags, context.json); });

  CLI::App* index = layer.add_subcommand(
      "index", "Read the content of layers that new ones are not compared with yet");
  run(index, [flags, &context] { return Index(*flags, context.json); });
}

}  // namespace dsec::cli
