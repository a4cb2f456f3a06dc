// SPDX-License-Identifier: Apache-2.0
// layer trace save (through the API of a node), show and rm (on the layer store itself).
#include "cli/trace_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "http/target.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct TraceFlags {
  std::string sandbox, ref;
  bool merge = false, stop = false;
};

uint64_t Number(const json& object, const char* key) { return object.value(key, uint64_t{0}); }

Result<void> Save(const TraceFlags& flags, bool as_json, Connection& api) {
  const json body = {{"save", true}, {"merge", flags.merge}, {"stop", flags.stop}};
  DSEC_TRY(const Reply answer,
           api.Call("POST", "/v1/sandboxes/" + http::PercentEncode(flags.sandbox) + "/first-touch",
                    body.dump()));
  const json reply = json::parse(answer.body, nullptr, false);
  if (!reply.is_object())
    return Error(Code::kUnavailable, "client.connection", "the reply is not a JSON object");
  if (as_json) {
    PrintJson(reply);
    return Ok();
  }
  for (const json& layer : reply.value("layers", json::array())) {
    std::printf("%s  %s\n", layer.value("id", "").c_str(),
                layer.value("saved", false)
                    ? fmt::format("{} in {} parts", ShowSize(Number(layer, "saved_bytes")),
                                  Number(layer, "saved_parts"))
                          .c_str()
                    : "nothing read");
  }
  if (Number(reply, "lost") > 0)
    std::fprintf(stderr, "%llu reads were not recorded\n",
                 static_cast<unsigned long long>(Number(reply, "lost")));
  if (reply.value("truncated", false))
    std::fputs("there was more than a trace holds; its beginning was saved\n", stderr);
  return Ok();
}

Result<void> Show(const TraceFlags& flags, bool as_json, const StoreOpener& open) {
  DSEC_TRY(const auto store, open());
  DSEC_TRY(const auto trace, store->FindTrace(flags.ref));
  if (!trace) {
    return Error(Code::kNotFound, "layer.no_trace",
                 fmt::format("{} has no trace of first reads", flags.ref));
  }
  if (!as_json) {
    std::fputs(trace->Lines().c_str(), stdout);
    return Ok();
  }
  json parts = json::array();
  for (const image::FirstTouch& part : trace->parts) {
    // Names of files need not be UTF-8.
    parts.push_back({{"path", part.path}, {"offset", part.offset}, {"length", part.length}});
  }
  PrintJson({{"parts", std::move(parts)}, {"bytes", trace->bytes()}});
  return Ok();
}

Result<void> Remove(const TraceFlags& flags, const StoreOpener& open) {
  DSEC_TRY(const auto store, open());
  DSEC_TRY(const bool removed, store->RemoveTrace(flags.ref));
  if (removed) return Ok();
  return Error(Code::kNotFound, "layer.no_trace",
               fmt::format("{} has no trace of first reads", flags.ref));
}

}  // namespace

void AddTraceCommands(CLI::App& layer, Context& context, StoreOpener open) {
  const auto flags = std::make_shared<TraceFlags>();
  CLI::App* trace = layer.add_subcommand(
      "trace", "What sandboxes read first of layers: nodes read it ahead when they mount them");
  trace->require_subcommand(1);
  trace->fallthrough();

  CLI::App* save = trace->add_subcommand(
      "save", "Put what a sandbox made with --record-first-touch has read beside its layers");
  save->add_option("sandbox", flags->sandbox, "Its id")->required();
  save->add_flag("--merge", flags->merge, "Behind what is there, not in its place");
  save->add_flag("--stop", flags->stop, "Record nothing after this");
  save->callback([flags, &context] {
    const auto api = context.Open();
    if (api == nullptr) return;
    if (auto done = Save(*flags, context.json, *api); !done.ok()) context.Fail(done.error());
  });

  CLI::App* show =
      trace->add_subcommand("show", "Print the lines that `layer build --first-touch` takes");
  show->add_option("ref", flags->ref, "NAME:TAG or id")->required();
  show->callback([flags, open, &context] {
    if (auto done = Show(*flags, context.json, open); !done.ok()) context.Fail(done.error());
  });

  CLI::App* remove = trace->add_subcommand("rm", "Remove the trace of a layer");
  remove->add_option("ref", flags->ref, "NAME:TAG or id")->required();
  remove->callback([flags, open = std::move(open), &context] {
    if (auto done = Remove(*flags, open); !done.ok()) context.Fail(done.error());
  });
}

}  // namespace dsec::cli
