// SPDX-License-Identifier: Apache-2.0
// disk import, info, collapse, export, verify: layers of disks as files, with or without a node.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/build_progress.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "disk/image_io.h"
#include "disk/layer_writer.h"
#include "disk/published.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

using nlohmann::json;
using Chain = std::vector<std::shared_ptr<const disk::Layer>>;

struct DiskFlags {
  std::string raw, qcow2, out, root;
  std::vector<std::string> layers;
};

Result<Chain> OpenChain(const std::vector<std::string>& paths) {
  Chain chain;
  for (const std::string& path : paths) {
    DSEC_TRY(auto layer, disk::OpenLayerAt(AT_FDCWD, path));
    chain.push_back(std::move(layer));
  }
  DSEC_TRY_VOID(disk::CheckChain(chain));
  return chain;
}

bool GoOn(uint64_t) { return !Interrupted(); }

json ToJson(const disk::LayerInfo& info) {
  return {{"uuid", info.uuid},
          {"parent_uuid", info.parent_uuid},
          {"virtual_size", info.virtual_bytes},
          {"entries", info.index_entries},
          {"user_tag", info.user_tag}};
}

Result<void> Import(const DiskFlags& flags) {
  if (flags.raw.empty() == flags.qcow2.empty()) {
    return Error(Code::kInvalidArgument, "cli.value",
                 "give exactly one of --from-raw, --from-qcow2");
  }
  CatchInterrupts();
  DSEC_TRY(const Chain parent, OpenChain(flags.layers));
  DSEC_TRY(const auto info, flags.raw.empty()
                                ? disk::ImportQcow2(flags.qcow2, flags.out, parent, GoOn)
                                : disk::ImportRaw(flags.raw, flags.out, parent, GoOn));
  json object = ToJson(info);
  object["layer"] = flags.out;
  if (!flags.root.empty()) {
    DSEC_TRY(object["published"], disk::Publish(flags.root, flags.out, GoOn));
  }
  PrintJson(object);
  return Ok();
}

Result<void> Info(const DiskFlags& flags) {
  json all = json::array();
  for (const std::string& path : flags.layers) {
    DSEC_TRY(const auto layer, disk::OpenLayerAt(AT_FDCWD, path));
    DSEC_TRY(const auto index, layer->ReadIndex());
    uint64_t data = 0, zeros = 0;
    for (const auto& extent : index)
      (extent.zero ? zeros : data) += uint64_t{extent.count} * disk::kSectorBytes;
    json object = ToJson(layer->info);
    object["layer"] = path;
    object["data_bytes"] = data;
    object["zeroed_bytes"] = zeros;
    all.push_back(std::move(object));
  }
  PrintJson(all);
  return Ok();
}

Result<void> Collapse(const DiskFlags& flags) {
  CatchInterrupts();
  DSEC_TRY(const Chain chain, OpenChain(flags.layers));
  DSEC_TRY(const auto file,
           os::OpenAt(AT_FDCWD, flags.out.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  auto info = disk::CollapseTo(file.get(), chain, chain.front()->info.parent_uuid.empty(), GoOn);
  if (!info.ok()) {
    std::error_code ignored;
    std::filesystem::remove(flags.out, ignored);
    return std::move(info).error();
  }
  PrintJson(ToJson(*info));
  return Ok();
}

Result<void> Export(const DiskFlags& flags) {
  CatchInterrupts();
  DSEC_TRY(const Chain chain, OpenChain(flags.layers));
  if (!chain.front()->info.parent_uuid.empty()) {
    return Error(Code::kInvalidArgument, "disk.bad_chain",
                 fmt::format("layer 0 was made over \"{}\", which is not given",
                             chain.front()->info.parent_uuid))
        .WithField("layers[0]");
  }
  DSEC_TRY(const uint64_t bytes, disk::ExportRaw(chain, flags.out, GoOn));
  PrintJson({{"image", flags.out}, {"data_bytes", bytes}});
  return Ok();
}

Result<void> Verify(const DiskFlags& flags) {
  for (const std::string& name : flags.layers) {
    if (!flags.root.empty()) {
      DSEC_TRY_VOID(disk::VerifyPublished(flags.root, name));
    } else {
      DSEC_TRY(const auto layer, disk::OpenLayerAt(AT_FDCWD, name));
      DSEC_TRY_VOID(disk::VerifyLayer(*layer));
    }
    std::printf("%s: ok\n", name.c_str());
  }
  return Ok();
}

}  // namespace

void AddDiskCommands(CLI::App& app, Context& context) {
  auto* group = app.add_subcommand("disk", "Layers of disks of virtual machines, as files");
  group->require_subcommand(1);
  const auto flags = std::make_shared<DiskFlags>();
  const auto add = [&](const char* name, const char* text, Result<void> (*run)(const DiskFlags&)) {
    auto* command = group->add_subcommand(name, text);
    command->callback([&context, flags, run] {
      if (auto done = run(*flags); !done.ok()) context.Fail(done.error());
    });
    return command;
  };
  auto* import = add("import", "Make a layer of a disk image", Import);
  import->add_option("--from-raw", flags->raw, "A raw image or a block device");
  import->add_option("--from-qcow2", flags->qcow2, "A qcow2 image (through qemu-img)");
  import->add_option("--parent", flags->layers, "Layers below, oldest first: only what differs");
  import->add_option("--publish", flags->root, "Also copy it to this shared root");
  import->add_option("OUT", flags->out, "The layer to make")->required();
  add("info", "What layers say", Info)->add_option("LAYER", flags->layers, "Layers")->required();
  auto* collapse = add("collapse", "Make one layer of consecutive ones", Collapse);
  collapse->add_option("OUT", flags->out, "The layer to make")->required();
  collapse->add_option("LAYER", flags->layers, "Layers, oldest first")->required();
  auto* to_raw = add("export", "Write the disk of a chain to a raw image", Export);
  to_raw->add_option("OUT", flags->out, "The image to make")->required();
  to_raw->add_option("LAYER", flags->layers, "Layers, oldest first")->required();
  auto* verify = add("verify", "Read layers through and check them", Verify);
  verify->add_option("--root", flags->root, "LAYER are ids of layers published there");
  verify->add_option("LAYER", flags->layers, "Layers")->required();
}

}  // namespace dsec::cli
