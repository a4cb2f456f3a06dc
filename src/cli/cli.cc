// SPDX-License-Identifier: Apache-2.0
#include "cli/cli.h"

#include <CLI/CLI.hpp>
#include <csignal>

#include "cli/commands.h"
#include "cli/output.h"

namespace dsec::cli {

std::unique_ptr<Connection> Context::Open() {
  auto endpoint = FindEndpoint(url, key);
  if (!endpoint.ok()) {
    Fail(endpoint.error());
    return nullptr;
  }
  return std::make_unique<Connection>(std::move(endpoint).value());
}

void Context::Fail(const Error& error) { exit_code = cli::Fail(error); }

int CliMain(int argc, char** argv, const std::vector<ExtraCommand>& extras) {
  std::signal(SIGPIPE, SIG_IGN);
  for (const ExtraCommand& extra : extras) {
    if (argc > 1 && extra.name == argv[1]) return extra.run(argc - 1, argv + 1);
  }
  Context context;
  CLI::App app("DSec: sandboxes for agents", "dsec");
  app.set_version_flag("--version", "dsec " DSEC_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--url", context.url, "Address of the API (DSEC_URL, http://127.0.0.1:7878)");
  app.add_option("--api-key", context.key,
                 "API key (DSEC_API_KEY, DSEC_API_KEY_FILE, /var/lib/dsec/api_key)");
  app.add_flag("--json", context.json, "Print JSON instead of tables");
  for (const ExtraCommand& extra : extras) app.add_subcommand(extra.name, extra.description);
  app.add_subcommand("version", "Print the version")->callback([] {
    std::puts("dsec " DSEC_VERSION);
  });
  AddSandboxCommands(app, context);
  AddExecCommands(app, context);
  AddCopyCommand(app, context);
  AddLayerCommands(app, context);
  AddDiskCommands(app, context);
  AddFnCommands(app, context);
  AddIamCommands(app, context);
  app.footer(
      "Exit codes: that of the command inside; 124 time limit, 125 platform, 126 cannot start, 127 "
      "no such program, "
      "128+N signal N.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kExitPlatform;
  } catch (
      const std::exception& error) {  // a reply whose fields are not of the types of the contract
    return cli::Fail(Error(Code::kInternal, "client.protocol", error.what()));
  }
  return context.exit_code;
}

}  // namespace dsec::cli
