// SPDX-License-Identifier: Apache-2.0
// iam whoami, project, principal, key, grant, role, audit.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "http/target.h"

namespace dsec::cli {
namespace {

using http::PercentEncode;
using nlohmann::json;

struct IamFlags {
  std::string name, project, kind = "person", description, role, expires, key_id, principal;
  std::vector<std::string> rights, limits;
  bool disabled = false;
  uint64_t count = 50;
};

// "live=10", "memory=4g", "starts=100" as the API's limits.
Result<json> Limits(const std::vector<std::string>& words) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"live", "live"},           {"creating", "creating"}, {"cpu", "cpu_millis"},
      {"memory", "memory_bytes"}, {"disk", "disk_bytes"},   {"starts", "starts_per_second"}};
  json limits = json::object();
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    bool known = false;
    for (const auto& [name, field] : kNames) {
      if (equals == std::string::npos || word.substr(0, equals) != name) continue;
      known = true;
      const std::string text = word.substr(equals + 1);
      if (name == "cpu") {
        char* end = nullptr;
        const double cores = std::strtod(text.c_str(), &end);
        if (text.empty() || *end != '\0' || cores < 0 || cores > 1e9) known = false;
        limits[std::string(field)] = static_cast<uint64_t>(cores * 1000 + 0.5);
      } else {
        DSEC_TRY(limits[std::string(field)], ParseSize(text, "--limit"));
      }
    }
    if (!known) {
      return Error(Code::kInvalidArgument, "cli.value",
                   fmt::format("--limit: {} is not NAME=VALUE with live, creating, cpu (cores), "
                               "memory, disk or starts",
                               word));
    }
  }
  return limits;
}

Result<json> Call(Connection& api, std::string_view method, const std::string& target,
                  const json& body = nullptr) {
  DSEC_TRY(const Reply reply, api.Call(method, target, body.is_null() ? "" : body.dump()));
  if (reply.body.empty()) return json();
  json parsed = json::parse(reply.body, nullptr, false);
  if (parsed.is_discarded())
    return Error(Code::kInternal, "client.protocol", "the reply is not JSON");
  return parsed;
}

// All pages of a list.
Result<json> Every(Connection& api, const std::string& target, const std::string& key) {
  json all = json::array();
  std::string token;
  do {
    DSEC_TRY(json page, Call(api, "GET",
                             target + "?page_size=1000" +
                                 (token.empty() ? "" : "&page_token=" + PercentEncode(token))));
    for (json& item : page[key]) all.push_back(std::move(item));
    token = page.value("next_page_token", "");
  } while (!token.empty());
  return all;
}

std::string Words(const json& list) {
  if (list.is_null()) return "-";
  std::string text;
  for (const json& item : list) text += (text.empty() ? "" : " ") + item.get<std::string>();
  return text.empty() ? "(none)" : text;
}

std::string When(const json& object, const char* key) {
  const auto at = object.value(key, int64_t{0});
  if (at == 0) return "-";
  const int64_t now = UnixMillis(Clock::System().Wall());
  return at > now ? "in " + ShowAge(at - now) : ShowAge(now - at) + " ago";
}

// A value beside what it is compared with: "3 of 10", "3".
std::string Of(const json& project, const char* key, bool bytes) {
  const auto show = [&](uint64_t value) { return bytes ? ShowSize(value) : std::to_string(value); };
  const json limits = project.value("effective_limits", json::object());
  std::string text;
  if (project.contains("used")) text = show(project["used"].value(key, uint64_t{0}));
  if (limits.contains(key))
    text += (text.empty() ? "" : " of ") + show(limits.value(key, uint64_t{0}));
  return text.empty() ? "-" : text;
}

void ShowProjects(const json& list) {
  std::vector<std::vector<std::string>> rows;
  for (const json& item : list) {
    rows.push_back({item.value("project", ""), Of(item, "live", false), Of(item, "creating", false),
                    Of(item, "cpu_millis", false), Of(item, "memory_bytes", true),
                    Of(item, "disk_bytes", true), Of(item, "starts_per_second", false),
                    item.value("description", "")});
  }
  std::fputs(Table({"PROJECT", "LIVE", "CREATING", "CPU MILLIS", "MEMORY", "DISK", "STARTS/S",
                    "DESCRIPTION"},
                   rows)
                 .c_str(),
             stdout);
}

// Runs a command that needs the API; what it returns is printed as JSON or by `show`.
template <typename Ask, typename Show>
void Run(Context& context, const Ask& ask, const Show& show) {
  const auto api = context.Open();
  if (api == nullptr) return;
  Result<json> answer = ask(*api);
  if (!answer.ok()) return context.Fail(answer.error());
  if (answer->is_null()) return;
  if (context.json) return PrintJson(*answer);
  show(*answer);
}

void ShowKeys(const json& list) {
  std::vector<std::vector<std::string>> rows;
  for (const json& key : list) {
    const bool revoked = key.value("revoked_unix_ms", int64_t{0}) != 0;
    rows.push_back({key.value("key_id", ""), key.value("principal", ""),
                    revoked ? "revoked" : "good", When(key, "expires_unix_ms"),
                    key.value("project", ""), Words(key["rights"]), key.value("made_by", ""),
                    key.value("description", "")});
  }
  std::fputs(
      Table({"KEY", "PRINCIPAL", "STATE", "EXPIRES", "PROJECT", "RIGHTS", "MADE BY", "DESCRIPTION"},
            rows)
          .c_str(),
      stdout);
}

void ShowPrincipals(const json& list) {
  std::vector<std::vector<std::string>> rows;
  for (const json& item : list) {
    rows.push_back({item.value("principal", ""), item.value("kind", ""), item.value("project", ""),
                    item.value("disabled", false) ? "disabled" : "enabled",
                    item.value("description", "")});
  }
  std::fputs(Table({"PRINCIPAL", "KIND", "PROJECT", "STATE", "DESCRIPTION"}, rows).c_str(), stdout);
}

void ShowGrants(const json& list) {
  std::vector<std::vector<std::string>> rows;
  for (const json& item : list) {
    rows.push_back({item.value("project", ""), item.value("principal", ""), item.value("role", ""),
                    item.value("granted_by", ""), Words(item["effective_rights"])});
  }
  std::fputs(
      Table({"PROJECT", "PRINCIPAL", "ROLE", "GRANTED BY", "EFFECTIVE RIGHTS"}, rows).c_str(),
      stdout);
}

json One(json item) { return json::array({std::move(item)}); }

std::string ProjectTarget(const std::string& project) {
  return "/v1/iam/projects/" + PercentEncode(project);
}
std::string PrincipalTarget(const std::string& id) {
  return "/v1/iam/principals/" + PercentEncode(id);
}

void AddProjects(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  CLI::App* project = iam.add_subcommand("project", "Projects and their limits");
  project->require_subcommand(1);
  project->add_subcommand("ls", "List projects")->callback([&context] {
    Run(
        context, [](Connection& api) { return Every(api, "/v1/iam/projects", "projects"); },
        ShowProjects);
  });
  CLI::App* show = project->add_subcommand("show", "A project with what it uses");
  show->add_option("project", flags->name, "root/NAME/...")->required();
  show->callback([&context, flags] {
    Run(
        context, [&](Connection& api) { return Call(api, "GET", ProjectTarget(flags->name)); },
        [](const json& item) { ShowProjects(One(item)); });
  });
  CLI::App* set = project->add_subcommand("set", "Make a project, or give it new limits");
  set->add_option("project", flags->name, "root/NAME/...")->required();
  set->add_option("--limit", flags->limits,
                  "live=, creating=, cpu=CORES, memory=, disk=, starts= (repeat); others have none")
      ->allow_extra_args(false);
  set->add_option("--right", flags->rights, "Ceiling: nobody below has more (repeat)")
      ->allow_extra_args(false);
  set->add_option("--description", flags->description, "One line");
  set->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) -> Result<json> {
          json body = {{"description", flags->description}};
          DSEC_TRY(body["limits"], Limits(flags->limits));
          if (!flags->rights.empty()) body["rights"] = flags->rights;
          return Call(api, "PUT", ProjectTarget(flags->name), body);
        },
        [](const json& item) { ShowProjects(One(item)); });
  });
  CLI::App* remove = project->add_subcommand("rm", "Remove an empty project");
  remove->add_option("project", flags->name, "root/NAME/...")->required();
  remove->callback([&context, flags] {
    Run(
        context, [&](Connection& api) { return Call(api, "DELETE", ProjectTarget(flags->name)); },
        [](const json&) {});
  });
}

void AddPrincipals(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  CLI::App* principal = iam.add_subcommand("principal", "People, services and agents");
  principal->require_subcommand(1);
  principal->add_subcommand("ls", "List principals")->callback([&context] {
    Run(
        context, [](Connection& api) { return Every(api, "/v1/iam/principals", "principals"); },
        ShowPrincipals);
  });
  CLI::App* set = principal->add_subcommand("set", "Make or change a principal");
  set->add_option("principal", flags->name, "Its name")->required();
  set->add_option("--kind", flags->kind, "person, service or agent")->capture_default_str();
  set->add_option("--project", flags->project, "Where it is at home")->required();
  set->add_option("--description", flags->description, "One line");
  set->add_flag("--disabled", flags->disabled,
                "Its keys open nothing, what it granted counts nothing");
  set->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) {
          return Call(api, "PUT", PrincipalTarget(flags->name),
                      {{"kind", flags->kind},
                       {"project", flags->project},
                       {"description", flags->description},
                       {"disabled", flags->disabled}});
        },
        [](const json& item) { ShowPrincipals(One(item)); });
  });
  CLI::App* remove = principal->add_subcommand("rm", "Remove a principal with its keys and grants");
  remove->add_option("principal", flags->name, "Its name")->required();
  remove->callback([&context, flags] {
    Run(
        context, [&](Connection& api) { return Call(api, "DELETE", PrincipalTarget(flags->name)); },
        [](const json&) {});
  });
}

void AddKeys(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  CLI::App* key = iam.add_subcommand("key", "API keys");
  key->require_subcommand(1);
  CLI::App* list = key->add_subcommand("ls", "Keys of a principal");
  list->add_option("principal", flags->name, "Its name")->required();
  list->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) { return Every(api, PrincipalTarget(flags->name) + "/keys", "keys"); },
        ShowKeys);
  });
  CLI::App* make = key->add_subcommand("make", "Make a key; it is shown this once");
  make->add_option("principal", flags->name, "Whose")->required();
  make->add_option("--expires", flags->expires, "After this time, e.g. 12h");
  make->add_option("--project", flags->project, "Reaches only this project and what is below");
  make->add_option("--right", flags->rights, "Has only these of its rights (repeat)")
      ->allow_extra_args(false);
  make->add_option("--description", flags->description, "One line");
  make->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) -> Result<json> {
          json body = {{"description", flags->description}};
          if (!flags->project.empty()) body["project"] = flags->project;
          if (!flags->rights.empty()) body["rights"] = flags->rights;
          if (!flags->expires.empty()) {
            DSEC_TRY(const uint64_t after, ParseMillis(flags->expires, "--expires"));
            body["expires_unix_ms"] =
                UnixMillis(Clock::System().Wall()) + static_cast<int64_t>(after);
          }
          return Call(api, "POST", PrincipalTarget(flags->name) + "/keys", body);
        },
        [](const json& made) { std::puts(made.value("secret", "").c_str()); });
  });
  CLI::App* revoke = key->add_subcommand("revoke", "Revoke a key");
  revoke->add_option("key", flags->key_id, "Its id: the second part of the key")->required();
  revoke->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) {
          return Call(api, "DELETE", "/v1/iam/keys/" + PercentEncode(flags->key_id));
        },
        [](const json&) {});
  });
}

void AddGrants(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  const auto target = [](const IamFlags& of) {
    return ProjectTarget(of.project) + "/grants/" + PercentEncode(of.name);
  };
  CLI::App* grants = iam.add_subcommand("grants", "Who has what in a project");
  grants->add_option("project", flags->project, "root/NAME/...")->required();
  grants->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) {
          return Every(api, ProjectTarget(flags->project) + "/grants", "grants");
        },
        ShowGrants);
  });
  CLI::App* grant = iam.add_subcommand("grant", "Give a principal a role or rights in a project");
  grant->add_option("principal", flags->name, "Who")->required();
  grant->add_option("project", flags->project, "Where, and below")->required();
  grant->add_option("--role", flags->role, "A role (dsec iam role ls)");
  grant->add_option("--right", flags->rights, "Rights in place of a role (repeat)")
      ->allow_extra_args(false);
  grant->callback([&context, flags, target] {
    Run(
        context,
        [&](Connection& api) {
          json body = json::object();
          if (!flags->role.empty()) body["role"] = flags->role;
          if (!flags->rights.empty()) body["rights"] = flags->rights;
          return Call(api, "PUT", target(*flags), body);
        },
        [](const json& item) { ShowGrants(One(item)); });
  });
  CLI::App* revoke = iam.add_subcommand("ungrant", "Take a grant away");
  revoke->add_option("principal", flags->name, "Who")->required();
  revoke->add_option("project", flags->project, "Where")->required();
  revoke->callback([&context, flags, target] {
    Run(
        context, [&](Connection& api) { return Call(api, "DELETE", target(*flags)); },
        [](const json&) {});
  });
}

void AddRoles(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  const auto target = [](const IamFlags& of) { return "/v1/iam/roles/" + PercentEncode(of.name); };
  const auto table = [](const json& list) {
    std::vector<std::vector<std::string>> rows;
    for (const json& item : list) {
      rows.push_back({item.value("role", ""), item.value("built_in", false) ? "built in" : "own",
                      Words(item["rights"]), item.value("description", "")});
    }
    std::fputs(Table({"ROLE", "KIND", "RIGHTS", "DESCRIPTION"}, rows).c_str(), stdout);
  };
  CLI::App* role = iam.add_subcommand("role", "Named sets of rights");
  role->require_subcommand(1);
  role->add_subcommand("ls", "List roles")->callback([&context, table] {
    Run(context, [](Connection& api) { return Every(api, "/v1/iam/roles", "roles"); }, table);
  });
  CLI::App* set = role->add_subcommand("set", "Make or change a role");
  set->add_option("role", flags->name, "Its name")->required();
  set->add_option("--right", flags->rights, "A right (repeat)")
      ->required()
      ->allow_extra_args(false);
  set->add_option("--description", flags->description, "One line");
  set->callback([&context, flags, target, table] {
    Run(
        context,
        [&](Connection& api) {
          return Call(api, "PUT", target(*flags),
                      {{"rights", flags->rights}, {"description", flags->description}});
        },
        [&](const json& item) { table(One(item)); });
  });
  CLI::App* remove = role->add_subcommand("rm", "Remove a role that nobody has");
  remove->add_option("role", flags->name, "Its name")->required();
  remove->callback([&context, flags, target] {
    Run(
        context, [&](Connection& api) { return Call(api, "DELETE", target(*flags)); },
        [](const json&) {});
  });
}

void AddAudit(CLI::App& iam, Context& context) {
  const auto flags = std::make_shared<IamFlags>();
  CLI::App* audit = iam.add_subcommand("audit", "Who did what, the newest first");
  audit->add_option("--principal", flags->principal, "Only of this one");
  audit->add_option("--key", flags->key_id, "Only with the key of this id");
  audit->add_option("--project", flags->project, "Only of this project and below");
  audit->add_option("-n", flags->count, "At most this many (50)")->check(CLI::Range(1, 1000));
  audit->callback([&context, flags] {
    Run(
        context,
        [&](Connection& api) {
          std::string target = fmt::format("/v1/iam/audit?page_size={}", flags->count);
          for (const auto& [name, value] : {std::pair{"principal", flags->principal},
                                            {"key_id", flags->key_id},
                                            {"project", flags->project}}) {
            if (!value.empty()) target += fmt::format("&{}={}", name, PercentEncode(value));
          }
          return Call(api, "GET", target);
        },
        [](const json& page) {
          std::vector<std::vector<std::string>> rows;
          for (const json& item : page["records"]) {
            rows.push_back({When(item, "at_unix_ms"), item.value("principal", ""),
                            item.value("key_id", ""), item.value("action", ""),
                            item.value("object", ""), item.value("project", ""),
                            item.value("outcome", "")});
          }
          std::fputs(
              Table({"WHEN", "PRINCIPAL", "KEY", "ACTION", "OBJECT", "PROJECT", "OUTCOME"}, rows)
                  .c_str(),
              stdout);
        });
  });
}

}  // namespace

void AddIamCommands(CLI::App& app, Context& context) {
  CLI::App* iam = app.add_subcommand("iam", "Projects, people, keys, grants, quotas, audit");
  iam->require_subcommand(1);
  iam->add_subcommand("whoami", "What this key is and may do")->callback([&context] {
    Run(
        context, [](Connection& api) { return Call(api, "GET", "/v1/iam/whoami"); },
        [](const json& me) {
          std::printf("%s with key %s, at home in %s\n", me.value("principal", "").c_str(),
                      me.value("key_id", "").c_str(), me.value("project", "").c_str());
          std::printf("there: %s\n", Words(me["rights"]).c_str());
          for (const json& grant : me["grants"]) {
            std::printf("%s: %s\n", grant.value("project", "").c_str(),
                        Words(grant["rights"]).c_str());
          }
        });
  });
  AddProjects(*iam, context);
  AddPrincipals(*iam, context);
  AddKeys(*iam, context);
  AddGrants(*iam, context);
  AddRoles(*iam, context);
  AddAudit(*iam, context);
}

}  // namespace dsec::cli
