// SPDX-License-Identifier: Apache-2.0
#include "apiserver/access.h"

#include <array>

namespace dsec::apiserver {
namespace {

using iam::Right;
constexpr auto kNoRight = std::nullopt;

constexpr Access kTable[] = {
    {"GET /healthz", Scope::kOpen, kNoRight},
    {"GET /metrics", Scope::kRoot, Right::kNodeRead},
    {"GET /v1/node", Scope::kAny, kNoRight},
    {"GET /v1/events", Scope::kRoot, Right::kNodeRead},
    // sandboxes
    {"POST /v1/sandboxes", Scope::kProject, Right::kSandboxCreate, Audit::kAfter},
    {"GET /v1/sandboxes", Scope::kProject, Right::kSandboxRead},
    {"POST /v1/sandboxes:batch", Scope::kProject, Right::kSandboxCreate, Audit::kAfter},
    {"POST /v1/sandboxes:delete", Scope::kProject, Right::kSandboxDelete, Audit::kAfter},
    {"GET /v1/sandboxes/{id}", Scope::kSandbox, Right::kSandboxRead},
    {"DELETE /v1/sandboxes/{id}", Scope::kSandbox, Right::kSandboxDelete, Audit::kAfter},
    {"POST /v1/sandboxes/{id}/renew", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"POST /v1/sandboxes/{id}/pack", Scope::kSandbox, Right::kSandboxPack, Audit::kAfter},
    {"POST /v1/sandboxes/{id}/first-touch", Scope::kSandbox, Right::kSandboxPack, Audit::kAfter},
    {"GET /v1/sandboxes/{id}/stats", Scope::kSandbox, Right::kSandboxRead},
    {"GET /v1/sandboxes/{id}/events", Scope::kSandbox, Right::kSandboxRead},
    {"POST /v1/sandboxes/{id}/exec", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"GET /v1/sandboxes/{id}/exec", Scope::kSandbox, Right::kSandboxUse},
    {"GET /v1/sandboxes/{id}/exec/{op}", Scope::kSandbox, Right::kSandboxUse},
    {"GET /v1/sandboxes/{id}/exec/{op}/stream", Scope::kSandbox, Right::kSandboxUse},
    {"POST /v1/sandboxes/{id}/exec/{op}/stdin", Scope::kSandbox, Right::kSandboxUse},
    {"POST /v1/sandboxes/{id}/exec/{op}/signal", Scope::kSandbox, Right::kSandboxUse,
     Audit::kAfter},
    {"POST /v1/sandboxes/{id}/exec/{op}/resize", Scope::kSandbox, Right::kSandboxUse},
    {"POST /v1/sandboxes/{id}/exec/{op}/cancel", Scope::kSandbox, Right::kSandboxUse,
     Audit::kAfter},
    {"POST /v1/sandboxes/{id}/exec/{op}/ack", Scope::kSandbox, Right::kSandboxUse},
    {"GET /v1/sandboxes/{id}/sessions", Scope::kSandbox, Right::kSandboxUse},
    {"DELETE /v1/sandboxes/{id}/sessions/{name}", Scope::kSandbox, Right::kSandboxUse,
     Audit::kAfter},
    {"GET /v1/sandboxes/{id}/files", Scope::kSandbox, Right::kSandboxUse},
    {"PUT /v1/sandboxes/{id}/files", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"DELETE /v1/sandboxes/{id}/files", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"GET /v1/sandboxes/{id}/files/stat", Scope::kSandbox, Right::kSandboxUse},
    {"GET /v1/sandboxes/{id}/files/list", Scope::kSandbox, Right::kSandboxUse},
    {"POST /v1/sandboxes/{id}/files/mkdir", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"POST /v1/sandboxes/{id}/files/move", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"POST /v1/sandboxes/{id}/files/chmod", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    {"GET /v1/sandboxes/{id}/files/watch", Scope::kSandbox, Right::kSandboxUse},
    {"GET /v1/sandboxes/{id}/archive", Scope::kSandbox, Right::kSandboxUse},
    {"PUT /v1/sandboxes/{id}/archive", Scope::kSandbox, Right::kSandboxUse, Audit::kAfter},
    // layers: a catalogue that all share
    {"GET /v1/layers", Scope::kAny, Right::kLayerRead},
    {"GET /v1/layers/{ref}", Scope::kAny, Right::kLayerRead},
    {"DELETE /v1/layers/{ref}", Scope::kRoot, Right::kLayerManage, Audit::kAfter},
    {"POST /v1/layers:collect", Scope::kRoot, Right::kLayerManage, Audit::kAfter},
    {"GET /v1/layer_nodes", Scope::kRoot, Right::kLayerManage},
    {"DELETE /v1/layer_nodes/{node}", Scope::kRoot, Right::kLayerManage, Audit::kAfter},
    // FnCall
    {"POST /v1/fn/call", Scope::kProject, Right::kFnCall, Audit::kAfter},
    {"POST /v1/fn/calls", Scope::kProject, Right::kFnCall, Audit::kAfter},
    {"GET /v1/fn/calls/{op}", Scope::kProject, Right::kFnCall},
    {"GET /v1/fn/types", Scope::kAny, Right::kFnCall},
    {"PUT /v1/fn/types/{name}", Scope::kRoot, Right::kFnManage, Audit::kAfter},
    {"DELETE /v1/fn/types/{name}", Scope::kRoot, Right::kFnManage, Audit::kAfter},
    {"PUT /v1/fn/artifacts", Scope::kAny, Right::kFnCall, Audit::kAfter},
    {"GET /v1/fn/artifacts/{digest}", Scope::kAny, Right::kFnCall},
    {"GET /v1/fn/pools", Scope::kRoot, Right::kNodeRead},
    {"POST /run_code", Scope::kProject, Right::kFnCall, Audit::kAfter},
    {"POST /submit", Scope::kProject, Right::kFnCall, Audit::kAfter},
    {"GET /v1/ping", Scope::kAny, kNoRight},
    // IAM: where a change needs what is asked by iam::Admin
    {"GET /v1/iam/whoami", Scope::kAny, kNoRight},
    {"GET /v1/iam/projects", Scope::kProject, Right::kIamRead},
    {"GET /v1/iam/projects/{project}", Scope::kProject, Right::kIamRead},
    {"PUT /v1/iam/projects/{project}", Scope::kProject, Right::kProjectManage, Audit::kAround},
    {"DELETE /v1/iam/projects/{project}", Scope::kProject, Right::kProjectManage, Audit::kAround},
    {"GET /v1/iam/projects/{project}/grants", Scope::kProject, Right::kIamRead},
    {"PUT /v1/iam/projects/{project}/grants/{principal}", Scope::kProject, Right::kGrantManage,
     Audit::kAround},
    {"DELETE /v1/iam/projects/{project}/grants/{principal}", Scope::kProject, Right::kGrantManage,
     Audit::kAround},
    {"GET /v1/iam/principals", Scope::kProject, Right::kIamRead},
    {"GET /v1/iam/principals/{principal}", Scope::kProject, Right::kIamRead},
    {"PUT /v1/iam/principals/{principal}", Scope::kProject, Right::kPrincipalManage,
     Audit::kAround},
    {"DELETE /v1/iam/principals/{principal}", Scope::kProject, Right::kPrincipalManage,
     Audit::kAround},
    {"GET /v1/iam/principals/{principal}/keys", Scope::kProject, Right::kIamRead},
    {"POST /v1/iam/principals/{principal}/keys", Scope::kProject, Right::kPrincipalManage,
     Audit::kAround},
    {"DELETE /v1/iam/keys/{keyid}", Scope::kProject, Right::kPrincipalManage, Audit::kAround},
    {"GET /v1/iam/roles", Scope::kAny, kNoRight},
    {"PUT /v1/iam/roles/{role}", Scope::kRoot, Right::kRoleManage, Audit::kAround},
    {"DELETE /v1/iam/roles/{role}", Scope::kRoot, Right::kRoleManage, Audit::kAround},
    {"GET /v1/iam/audit", Scope::kProject, Right::kAuditRead},
};

// Only the root principal has every right, so this is nobody else's.
constexpr Access kUnknown = {"", Scope::kRoot, std::nullopt, Audit::kAfter};

}  // namespace

std::span<const Access> AccessTable() { return kTable; }

const Access& AccessOf(std::string_view method, std::string_view pattern) {
  for (const Access& row : kTable) {
    if (row.route.size() == method.size() + 1 + pattern.size() && row.route.starts_with(method) &&
        row.route[method.size()] == ' ' && row.route.ends_with(pattern)) {
      return row;
    }
  }
  return kUnknown;
}

}  // namespace dsec::apiserver
