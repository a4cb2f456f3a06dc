// SPDX-License-Identifier: Apache-2.0
// create, run, ps, rm, renew, stats, top, events, doctor.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.h"
#include "base/id.h"
#include "cli/commands.h"
#include "cli/exec_session.h"
#include "cli/output.h"
#include "http/target.h"

namespace dsec::cli {
namespace {

using http::PercentEncode;
using nlohmann::json;

// KEY=VALUE words into an object. kInvalidArgument names the flag.
Result<json> Pairs(const std::vector<std::string>& words, std::string_view flag) {
  json out = json::object();
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos) {
      return Error(Code::kInvalidArgument, "cli.value",
                   fmt::format("{}: {} is not KEY=VALUE", flag, word));
    }
    out[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return out;
}

Result<json> ParseReply(const Reply& reply) {
  json parsed = json::parse(reply.body, nullptr, false);
  if (parsed.is_discarded()) {
    return Error(Code::kInternal, "client.protocol", "the reply is not JSON");
  }
  return parsed;
}

Result<json> CallJson(Connection& api, std::string_view method, std::string_view target,
                      std::string_view body = {}) {
  DSEC_TRY(const Reply reply, api.Call(method, target, body));
  return ParseReply(reply);
}

std::string Layers(const json& box) {
  std::string text = box.value("base", "");
  if (const std::string workspace = box.value("workspace", ""); !workspace.empty()) {
    text += " + " + workspace;
  }
  for (const auto& toolkit : box.value("toolkits", json::array())) {
    text += " + " + toolkit.get<std::string>();
  }
  return text;
}

// All pages of a list.
Result<json> ListAll(Connection& api, const std::vector<std::string>& labels, bool ended) {
  json all = json::array();
  std::string token;
  do {
    std::string target = "/v1/sandboxes?page_size=1000";
    if (ended) target += "&include_ended=true";
    for (const std::string& label : labels) target += "&label=" + PercentEncode(label);
    if (!token.empty()) target += "&page_token=" + PercentEncode(token);
    DSEC_TRY(const json page, CallJson(api, "GET", target));
    for (const auto& box : page.at("sandboxes")) all.push_back(box);
    const auto next = page.find("next_page_token");
    token = next != page.end() && next->is_string() ? next->get<std::string>() : "";
  } while (!token.empty());
  return all;
}

void Create(Context& context, const CreateFlags& flags) {
  auto api = context.Open();
  if (!api) return;
  auto body = flags.ToJson();
  if (!body.ok()) return context.Fail(body.error());
  auto box = CallJson(*api, "POST", "/v1/sandboxes", *body);
  if (!box.ok()) return context.Fail(box.error());
  std::puts(context.json ? box->dump(2).c_str() : box->value("id", "").c_str());
}

void Run(Context& context, CreateFlags create, const ExecFlags& exec) {
  auto api = context.Open();
  if (!api) return;
  // A sandbox that this process is killed away from ends by itself.
  if (create.ttl.empty() && create.idle.empty()) create.idle = "60";
  auto body = create.ToJson();
  if (!body.ok()) return context.Fail(body.error());
  // From here on a signal ends the create or the command, and then the sandbox.
  const BlockedSignals blocked;
  Result<json> box = json();
  {
    const SignalThread interrupts([&api](int signal) {
      if (signal != SIGWINCH) api->Abort();  // the platform ends what nobody has claimed
    });
    box = CallJson(*api, "POST", "/v1/sandboxes", *body);
  }
  if (!box.ok()) {
    context.Fail(box.error());
    if (box.error().code() == Code::kCancelled) context.exit_code = kExitCancelled;
    return;
  }
  const std::string id = box->value("id", "");
  context.exit_code = RunExec(context, *api, id, exec);
  auto fresh = context.Open();  // the first connection may have been left by a signal
  if (!fresh) return;
  auto ended = fresh->Call("DELETE", "/v1/sandboxes/" + PercentEncode(id));
  if (!ended.ok()) context.Fail(ended.error());
}

void Ps(Context& context, const std::vector<std::string>& labels, bool all) {
  auto api = context.Open();
  if (!api) return;
  auto boxes = ListAll(*api, labels, all);
  if (!boxes.ok()) return context.Fail(boxes.error());
  if (context.json) {
    std::puts(json{{"sandboxes", *boxes}}.dump(2).c_str());
    return;
  }
  std::vector<std::vector<std::string>> rows;
  const int64_t now = UnixMillis(Clock::System().Wall());
  for (const auto& box : *boxes) {
    std::string state = box.value("state", "");
    if (box.contains("termination") && box["termination"].is_object()) {
      state += " (" + box["termination"].value("cause", "") + ")";
    }
    rows.push_back({box.value("id", ""), box.value("name", ""), state,
                    ShowAge(now - box.value("created_unix_ms", int64_t{0})), Layers(box)});
  }
  std::fputs(Table({"ID", "NAME", "STATE", "AGE", "LAYERS"}, rows).c_str(), stdout);
}

void Remove(Context& context, const std::vector<std::string>& ids,
            const std::vector<std::string>& labels, const std::string& grace) {
  auto api = context.Open();
  if (!api) return;
  json body = json::object();
  auto pairs = Pairs(labels, "--label");
  if (!pairs.ok()) return context.Fail(pairs.error());
  if (!ids.empty()) body["ids"] = ids;
  if (!labels.empty()) body["labels"] = *pairs;
  if (body.empty()) {
    return context.Fail(
        Error(Code::kInvalidArgument, "cli.value", "name sandboxes or give --label"));
  }
  if (!grace.empty()) {
    auto millis = ParseMillis(grace, "--grace");
    if (!millis.ok()) return context.Fail(millis.error());
    body["grace_ms"] = *millis;
  }
  auto done = api->Stream("POST", "/v1/sandboxes:delete", body.dump(), [&](std::string_view line) {
    const json record = json::parse(line, nullptr, false);
    if (!record.is_object() || record.value("type", "") == "done") return true;
    if (context.json) {
      std::puts(std::string(line).c_str());
    } else if (record.value("type", "") == "deleted") {
      std::puts(record.value("id", "").c_str());
    }
    if (record.value("type", "") == "error") {
      context.exit_code = kExitPlatform;
      if (!context.json) {
        std::fprintf(stderr, "dsec: %s: %s\n", record.value("id", "").c_str(),
                     record.value("error", json::object()).value("message", "").c_str());
      }
    }
    return true;
  });
  if (!done.ok()) context.Fail(done.error());
}

void Renew(Context& context, const std::string& id, const std::string& ttl,
           const std::string& idle) {
  auto api = context.Open();
  if (!api) return;
  json body = json::object();
  for (const auto& [text, key, flag] :
       {std::tuple{&ttl, "ttl_ms", "--ttl"}, std::tuple{&idle, "idle_ms", "--idle"}}) {
    if (text->empty()) continue;
    auto millis = ParseMillis(*text, flag);
    if (!millis.ok()) return context.Fail(millis.error());
    body[key] = *millis;
  }
  auto box = CallJson(*api, "POST", "/v1/sandboxes/" + PercentEncode(id) + "/renew", body.dump());
  if (!box.ok()) return context.Fail(box.error());
  if (context.json) std::puts(box->dump(2).c_str());
}

void Stats(Context& context, const std::string& id) {
  auto api = context.Open();
  if (!api) return;
  auto stats = CallJson(*api, "GET", "/v1/sandboxes/" + PercentEncode(id) + "/stats");
  if (!stats.ok()) return context.Fail(stats.error());
  if (context.json) {
    std::puts(stats->dump(2).c_str());
    return;
  }
  const json usage = stats->value("usage", json::object());
  const json limits = stats->value("limits", json::object());
  const auto number = [](const json& from, const char* key) {
    return from.value(key, uint64_t{0});
  };
  std::fputs(
      Table(
          {"RESOURCE", "USED", "LIMIT"},
          {{"cpu time",
            fmt::format("{:.2f} s", static_cast<double>(number(usage, "cpu_usec")) / 1e6),
            fmt::format("{:.2f} cores", static_cast<double>(number(limits, "cpu_millis")) / 1e3)},
           {"throttled",
            fmt::format("{:.2f} s", static_cast<double>(number(usage, "throttled_usec")) / 1e6),
            ""},
           {"memory", ShowSize(number(usage, "memory_bytes")),
            ShowSize(number(limits, "memory_bytes"))},
           {"memory peak", ShowSize(number(usage, "memory_peak_bytes")), ""},
           {"processes", std::to_string(number(usage, "pids")),
            std::to_string(number(limits, "pids"))},
           {"disk", ShowSize(number(usage, "disk_bytes")), ShowSize(number(limits, "disk_bytes"))},
           {"inodes", std::to_string(number(usage, "disk_inodes")),
            std::to_string(number(limits, "disk_inodes"))},
           {"oom kills", std::to_string(number(usage, "oom_kills")), ""}})
          .c_str(),
      stdout);
}

// One screen of `top`.
Result<std::string> TopScreen(Connection& api) {
  DSEC_TRY(const json node, CallJson(api, "GET", "/v1/node"));
  DSEC_TRY(const json boxes, ListAll(api, {}, false));
  std::string text = fmt::format(
      "node {}  live {}/{}  memory available {}  scratch free {}  psi memory {:.1f} cpu {:.1f}\n",
      node.value("node_id", ""), node.value("live", uint64_t{0}),
      node.value("capacity", uint64_t{0}),
      ShowSize(node.value("memory_available_bytes", uint64_t{0})),
      ShowSize(node.value("scratch_free_bytes", uint64_t{0})),
      node.value("psi_memory_some_avg10", 0.0), node.value("psi_cpu_some_avg10", 0.0));
  std::vector<std::pair<uint64_t, std::vector<std::string>>> rows;
  size_t left = 50;
  for (const auto& box : boxes) {
    if (left-- == 0) break;
    auto stats =
        CallJson(api, "GET", "/v1/sandboxes/" + PercentEncode(box.value("id", "")) + "/stats");
    if (!stats.ok()) continue;  // ended meanwhile
    const json usage = stats->value("usage", json::object());
    const uint64_t memory = usage.value("memory_bytes", uint64_t{0});
    rows.push_back(
        {memory,
         {box.value("id", ""), box.value("state", ""), ShowSize(memory),
          fmt::format("{:.1f}", static_cast<double>(usage.value("cpu_usec", uint64_t{0})) / 1e6),
          std::to_string(usage.value("pids", uint64_t{0})),
          ShowSize(usage.value("disk_bytes", uint64_t{0}))}});
  }
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::vector<std::string>> cells;
  for (auto& row : rows) cells.push_back(std::move(row.second));
  text += Table({"ID", "STATE", "MEMORY", "CPU s", "PIDS", "DISK"}, cells);
  if (boxes.size() > 50) text += fmt::format("... and {} more\n", boxes.size() - 50);
  return text;
}

void Top(Context& context, bool once) {
  auto api = context.Open();
  if (!api) return;
  for (;;) {
    auto screen = TopScreen(*api);
    if (!screen.ok()) return context.Fail(screen.error());
    if (once || isatty(STDOUT_FILENO) == 0) {
      std::fputs(screen->c_str(), stdout);
      return;
    }
    std::fputs("\x1b[H\x1b[2J", stdout);
    std::fputs(screen->c_str(), stdout);
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::seconds(2));  // the refresh rate of a screen
  }
}

void Events(Context& context, const std::string& id, uint64_t after, bool follow) {
  auto api = context.Open();
  if (!api) return;
  std::string target = id.empty() ? "/v1/events" : "/v1/sandboxes/" + PercentEncode(id) + "/events";
  target += fmt::format("?after={}&follow={}", after, follow);
  auto done = api->Stream("GET", target, "", [&](std::string_view line) {
    const json event = json::parse(line, nullptr, false);
    if (context.json || !event.is_object()) {
      std::puts(std::string(line).c_str());
    } else {
      std::string detail = event.value("detail", "");
      if (event.contains("termination") && event["termination"].is_object()) {
        detail = event["termination"].value("cause", "") + " " +
                 event["termination"].value("message", "");
      }
      std::printf("%6llu  %s  %-14s %-10s %s\n",
                  static_cast<unsigned long long>(event.value("seq", uint64_t{0})),
                  event.value("sandbox_id", "").c_str(), event.value("type", "").c_str(),
                  event.value("state", "").c_str(), detail.c_str());
    }
    std::fflush(stdout);
    return true;
  });
  if (!done.ok()) context.Fail(done.error());
}

void Doctor(Context& context) {
  auto api = context.Open();
  if (!api) return;
  auto node = CallJson(*api, "GET", "/v1/node");
  if (!node.ok()) return context.Fail(node.error());
  const auto capabilities = node->value("capabilities", json::array());
  if (context.json) {
    std::puts(node->dump(2).c_str());
    return;
  }
  std::vector<std::vector<std::string>> rows;
  for (const auto& row : capabilities) {
    rows.push_back({row.value("name", ""), row.value("ok", false) ? "yes" : "NO",
                    row.value("used", ""), row.value("detail", "")});
  }
  std::fputs(Table({"MECHANISM", "OK", "USED", "DETAIL"}, rows).c_str(), stdout);
}

}  // namespace

void CreateFlags::AddTo(CLI::App& command) {
  command.add_option("base", base, "Base layer, name:tag or id")->required();
  command.add_option("--backend", backend, "container (the default) or microvm");
  command.add_option("--workspace", workspace, "Workspace layer");
  command.add_option("--toolkit", toolkits, "Toolkit layer; repeat, bottom to top");
  command.add_option("--memory", memory, "Memory limit, e.g. 512m");
  command.add_option("--cpus", cpus, "Cores, e.g. 0.5");
  command.add_option("--pids", pids, "Processes and threads");
  command.add_option("--disk", disk, "Writable layer, e.g. 1g");
  command.add_option("--inodes", inodes, "Files of the writable layer");
  command.add_option("--shm", shm, "/dev/shm");
  command.add_option("--open-files", open_files, "Descriptors of one process");
  command.add_option("--ttl", ttl, "Lifetime, e.g. 2h");
  command.add_option("--idle", idle, "End after so long without activity");
  command.add_option("--env,-e", env, "KEY=VALUE for every command; repeat");
  command.add_option("--label,-l", labels, "KEY=VALUE; repeat");
  command.add_option("--user,-u", user, "User of commands");
  command.add_option("--workdir,-w", workdir, "Working folder of commands");
  command.add_option("--hostname", hostname, "Host name inside");
  command.add_flag("--record-first-touch", record_first_touch,
                   "Record what it reads first of its layers (layer trace save)");
  command.add_option("--name", name, "Unique name");
  command.add_option("--project", project, "root/NAME/... that it belongs to (the key's own)");
  command.add_option("--wait", wait, "How long to wait for capacity and start")
      ->capture_default_str();
}

Result<std::string> CreateFlags::ToJson() const {
  json body = {{"request_id", "cli-" + NewUlid(Clock::System())}, {"base", base}};
  json limits = json::object();
  for (const auto& [text, key, flag] :
       {std::tuple{&memory, "memory_bytes", "--memory"}, std::tuple{&disk, "disk_bytes", "--disk"},
        std::tuple{&shm, "shm_bytes", "--shm"}}) {
    if (text->empty()) continue;
    DSEC_TRY(limits[key], ParseSize(*text, flag));
  }
  for (const auto& [value, key] : {std::pair{pids, "pids"}, std::pair{inodes, "disk_inodes"},
                                   std::pair{open_files, "open_files"}}) {
    if (value != 0) limits[key] = value;
  }
  if (cpus < 0 || cpus > 1e6) {
    return Error(Code::kInvalidArgument, "cli.value", "--cpus: must be from 0 to 1000000");
  }
  if (cpus != 0) limits["cpu_millis"] = static_cast<uint64_t>(cpus * 1000 + 0.5);
  if (!limits.empty()) body["limits"] = limits;
  for (const auto& [text, key, flag] :
       {std::tuple{&ttl, "ttl_ms", "--ttl"}, std::tuple{&idle, "idle_ms", "--idle"},
        std::tuple{&wait, "timeout_ms", "--wait"}}) {
    if (text->empty()) continue;
    DSEC_TRY(body[key], ParseMillis(*text, flag));
  }
  for (const auto& [text, key] :
       {std::pair{&backend, "backend"}, std::pair{&workspace, "workspace"},
        std::pair{&user, "user"}, std::pair{&workdir, "workdir"}, std::pair{&hostname, "hostname"},
        std::pair{&name, "name"}, std::pair{&project, "project"}}) {
    if (!text->empty()) body[key] = *text;
  }
  if (record_first_touch) body["record_first_touch"] = true;
  if (!toolkits.empty()) body["toolkits"] = toolkits;
  if (!env.empty()) {
    DSEC_TRY(body["env"], Pairs(env, "--env"));
  }
  if (!labels.empty()) {
    DSEC_TRY(body["labels"], Pairs(labels, "--label"));
  }
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

void AddSandboxCommands(CLI::App& app, Context& context) {
  auto create_flags = std::make_shared<CreateFlags>();
  auto* create = app.add_subcommand("create", "Make a sandbox and print its id");
  create_flags->AddTo(*create);
  create->callback([&context, create_flags] { Create(context, *create_flags); });

  auto run_flags = std::make_shared<CreateFlags>();
  auto run_exec = std::make_shared<ExecFlags>();
  auto* run = app.add_subcommand("run", "Make a sandbox, run one command in it, remove it");
  run_flags->AddTo(*run);
  run->add_option("command", run_exec->command, "Program and arguments, after --")->required();
  run->add_flag("-i,--interactive", run_exec->stdin_open, "Send this process's standard input");
  run->add_flag("-t,--tty", run_exec->tty, "Run on a terminal");
  run->add_option("--timeout", run_exec->timeout, "Time limit of the command");
  run->callback([&context, run_flags, run_exec] { Run(context, *run_flags, *run_exec); });

  auto labels = std::make_shared<std::vector<std::string>>();
  auto all = std::make_shared<bool>(false);
  auto* ps = app.add_subcommand("ps", "List sandboxes");
  ps->add_option("--label,-l", *labels, "KEY=VALUE; repeat");
  ps->add_flag("--all,-a", *all, "Ended ones too");
  ps->callback([&context, labels, all] { Ps(context, *labels, *all); });

  auto ids = std::make_shared<std::vector<std::string>>();
  auto remove_labels = std::make_shared<std::vector<std::string>>();
  auto grace = std::make_shared<std::string>();
  auto* remove = app.add_subcommand("rm", "End sandboxes");
  remove->add_option("id", *ids, "Sandboxes");
  remove->add_option("--label,-l", *remove_labels, "KEY=VALUE; repeat");
  remove->add_option("--grace", *grace, "Time between TERM and KILL");
  remove->callback(
      [&context, ids, remove_labels, grace] { Remove(context, *ids, *remove_labels, *grace); });

  auto id = std::make_shared<std::string>();
  auto ttl = std::make_shared<std::string>();
  auto idle = std::make_shared<std::string>();
  auto* renew = app.add_subcommand("renew", "Set a new lifetime from now, or idle time");
  renew->add_option("id", *id, "Sandbox")->required();
  renew->add_option("--ttl", *ttl, "Lifetime, 0 = none");
  renew->add_option("--idle", *idle, "Idle time, 0 = none");
  renew->callback([&context, id, ttl, idle] { Renew(context, *id, *ttl, *idle); });

  auto* stats = app.add_subcommand("stats", "Usage of a sandbox beside its limits");
  stats->add_option("id", *id, "Sandbox")->required();
  stats->callback([&context, id] { Stats(context, *id); });

  auto once = std::make_shared<bool>(false);
  auto* top = app.add_subcommand("top", "Node and sandboxes, refreshed");
  top->add_flag("--once", *once, "Print once");
  top->callback([&context, once] { Top(context, *once); });

  auto after = std::make_shared<uint64_t>(0);
  auto follow = std::make_shared<bool>(false);
  auto* events = app.add_subcommand("events", "Events of a sandbox, or of all");
  events->add_option("id", *id, "Sandbox");
  events->add_option("--after", *after, "Sequence number to continue after");
  events->add_flag("--follow,-f", *follow, "Wait for more");
  events->callback([&context, id, after, follow] { Events(context, *id, *after, *follow); });

  app.add_subcommand("doctor", "What this node uses, lacks, and what that costs")
      ->callback([&context] { Doctor(context); });
}

}  // namespace dsec::cli
