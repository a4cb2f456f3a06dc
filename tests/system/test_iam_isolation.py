# SPDX-License-Identifier: Apache-2.0
"""Isolation between projects on every route that api/openapi.yaml describes: a route that nobody thought of here fails."""

import contextlib
import json
import time
import types

import pytest
from libdsec.sync import DSecClient

import support
from support import BASE, MIB
from test_openapi import OPERATIONS, UNKNOWN_ID, Api

SANDBOX = {name for name, operation in OPERATIONS.items() if "/v1/sandboxes/{id}" in operation["path"]}
# What each parameter of those routes is given, where it must be given.
VALUES = {"op": "entrypoint", "name": "session", "path": "/etc/passwd", "offset": 0}


class KeyApi(Api):
    """The routes with one key."""

    def __init__(self, node, key):
        super().__init__(types.SimpleNamespace(url=node.url, key=key, folder=node.folder, layers=node.layers, cli=node.cli))

    def ask(self, name, /, **request):
        """(status, body) of one request, whatever it is. Only the first lines of a stream."""
        with self.open(name, **request) as response:
            kind = (response.headers["Content-Type"] or "").split(";")[0]
            if kind == "application/x-ndjson":
                return response.status, [json.loads(response.readline() or "null")]
            data = response.read()
            return response.status, json.loads(data) if kind == "application/json" and data else data


@pytest.fixture(scope="module")
def world(node):
    """Two tenants, red and blue, each with a sandbox; keys of several kinds."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(node.client())
        made = types.SimpleNamespace(node=node, root=root, keys={}, boxes={}, ids={})
        for color in ("red", "blue"):
            root.iam.put_project(f"root/{color}")
            root.iam.put_principal(f"{color}.dev", project=f"root/{color}")
            root.iam.grant(f"{color}.dev", f"root/{color}", role="developer")
            key = root.iam.make_key(f"{color}.dev")
            made.keys[color], made.ids[color] = key["secret"], key["key"]["key_id"]
            client = stack.enter_context(DSecClient(node.url, key["secret"]))
            args = support.args(memory_limit_mb=64, labels={"suite": "isolation"}, entrypoint=["sleep", "6000"])
            made.boxes[color] = client.run_container(args)
        root.iam.put_principal("red.narrow", project="root/red")
        root.iam.grant("red.narrow", "root/red", rights=["layer.read"])
        made.keys["narrow"] = root.iam.make_key("red.narrow")["secret"]
        ends = int(time.time() * 1000) + 1
        made.keys["expired"] = root.iam.make_key("red.dev", expires_unix_ms=ends + 500)["secret"]
        revoked = root.iam.make_key("red.dev")
        root.iam.revoke_key(revoked["key"]["key_id"])
        made.keys["revoked"] = revoked["secret"]
        made.keys["invalid"] = made.keys["red"][:-1] + ("0" if made.keys["red"][-1] != "0" else "1")
        support.wait_until(lambda: time.time() * 1000 > ends + 500, 10, "the key has expired")
        made.api = {name: KeyApi(node, key) for name, key in made.keys.items()}
        made.api["root"] = KeyApi(node, node.key)
        yield made
        for box in made.boxes.values():
            root.delete(box.id)


def given(name, box_id):
    """The parameters that a route of a sandbox must have."""
    values = {p["name"]: VALUES.get(p["name"], "1") for p in OPERATIONS[name]["parameters"] if p.get("required")}
    values["id"] = box_id
    return values


@pytest.mark.parametrize("name", sorted(SANDBOX))
def test_case_148_foreign_sandbox_is_as_one_that_never_was(world, name):
    """Another tenant's key: 404, word for word as for an id that never existed; so the id alone is worth nothing."""
    box = world.boxes["red"].id
    status, reply = world.api["blue"].ask(name, **given(name, box))
    assert (status, reply["error"]["reason"]) == (404, "sandbox.not_found"), reply
    _, unknown = world.api["blue"].ask(name, **given(name, UNKNOWN_ID))
    for each in (reply, unknown):
        each["error"].pop("request_id")
    assert json.dumps(reply).replace(box, "ID") == json.dumps(unknown).replace(UNKNOWN_ID, "ID")


@pytest.mark.parametrize("name", sorted(SANDBOX))
def test_case_148_own_project_without_the_right_is_403(world, name):
    status, reply = world.api["narrow"].ask(name, **given(name, world.boxes["red"].id))
    assert (status, reply["error"]["reason"]) == (403, "auth.forbidden"), reply
    assert "red.narrow has no right sandbox." in reply["error"]["message"]


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"Health"}))
def test_case_148_no_expired_revoked_or_wrong_key_is_401(world, name):
    values = {p["name"]: VALUES.get(p["name"], "1") for p in OPERATIONS[name]["parameters"] if p.get("required")}
    if "id" in values:
        values["id"] = world.boxes["red"].id
    status, reply = world.api["red"].ask(name, key=False, **values)
    assert (status, reply["error"]["reason"]) == (401, "auth.missing")
    for kind in ("expired", "revoked", "invalid"):
        status, reply = world.api[kind].ask(name, **values)
        assert (status, reply["error"]["reason"]) == (401, f"auth.{kind}")


def test_case_148_key_of_an_ended_sandboxs_principal_sees_only_its_end(world):
    """A key is a principal's and not a sandbox's: with the sandbox ends what it can do there, and nothing else begins."""
    status, made = world.api["red"].ask("CreateSandbox", body={"request_id": "gone", "base": BASE, "limits": {"memory_bytes": 64 * MIB}})
    assert status == 201
    assert world.api["red"].ask("DeleteSandbox", id=made["id"])[0] == 200
    assert world.api["red"].ask("GetSandbox", id=made["id"])[0] == 200
    assert world.api["red"].ask("Exec", id=made["id"], body={"argv": ["true"]})[0] == 410
    assert world.api["blue"].ask("GetSandbox", id=made["id"])[0] == 404


def test_case_148_key_survives_a_restart_of_the_daemon(world):
    before = world.api["red"].ask("WhoAmI")
    world.node.kill()
    world.node.start()
    assert world.api["red"].ask("WhoAmI") == before
    status, reply = world.api["blue"].ask("GetSandbox", id=world.boxes["red"].id)
    assert (status, reply["error"]["reason"]) == (404, "sandbox.not_found")


def test_case_148_no_key_is_visible_inside_or_in_logs(world):
    """Neither environment, arguments, /proc, files nor logs show a key, of whatever principal."""
    box = world.root.get(world.boxes["red"].id)
    look = ("cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env; "
            "grep -rIl dsec_ /etc /root /home /tmp /run /var 2>/dev/null; cat /proc/mounts")
    seen = box.run_shell(look, timeout=60).stdout
    seen += world.node.log.read_bytes()
    for path in world.node.state.glob("*.db*"):
        seen += path.read_bytes()
    for name, key in {**world.keys, "root": world.node.key}.items():
        assert key.encode("ascii") not in seen, name
        assert key.rsplit("_", 1)[-1].encode("ascii") not in seen, name


# --- all other routes: what blue, a developer of its own project, gets where red's things are meant ---

FOREIGN = {}


def foreign(*names):
    def register(function):
        for name in names:
            FOREIGN[name] = function
        return function

    return register


def expect(status, reason, answer):
    assert (answer[0], answer[1]["error"]["reason"]) == (status, reason), answer


@foreign("Health", "GetNode", "Ping", "WhoAmI", "ListRoles", "ListLayers", "ListFnTypes")
def _open_to_all(world, name):
    """Nothing of a project is in these."""
    status, reply = world.api["blue"].ask(name)
    assert status == 200 and "root/red" not in json.dumps(reply) and world.boxes["red"].id not in json.dumps(reply)


@foreign("Metrics", "NodeEvents", "ListFnPools")
def _nodes(world, name):
    expect(403, "auth.forbidden", world.api["blue"].ask(name))


@foreign("GetLayer")
def _layers(world, name):
    assert world.api["blue"].ask(name, ref=BASE)[0] == 200


@foreign("DeleteLayer")
def _no_layers(world, name):
    expect(403, "auth.forbidden", world.api["blue"].ask(name, ref=BASE))


@foreign("CreateSandbox")
def _create(world, name):
    body = {"request_id": "foreign", "base": BASE, "project": "root/red"}
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, body=body))
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, body=dict(body, project="root/nobody")))
    expect(403, "auth.forbidden", world.api["narrow"].ask(name, body=body))


@foreign("BatchCreateSandboxes")
def _batch(world, name):
    body = {"request_id": "foreign", "count": 1, "sandbox": {"base": BASE, "project": "root/red"}}
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, body=body))


@foreign("ListSandboxes")
def _list(world, name):
    ids = [s["id"] for s in world.api["blue"].ask(name, include_ended="true", page_size=1000)[1]["sandboxes"]]
    assert world.boxes["blue"].id in ids and world.boxes["red"].id not in ids
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, project="root/red"))
    assert world.api["blue"].ask(name, label="suite=isolation")[1]["sandboxes"][0]["id"] == world.boxes["blue"].id
    expect(403, "auth.forbidden", world.api["narrow"].ask(name))
    every = [s["id"] for s in world.api["root"].ask(name, label="suite=isolation")[1]["sandboxes"]]
    assert sorted(every) == sorted(box.id for box in world.boxes.values())


@foreign("DeleteSandboxes")
def _delete_many(world, name):
    answer = world.api["blue"].ask(name, body={"ids": [world.boxes["red"].id]})
    assert answer[0] == 200 and answer[1][0]["error"]["reason"] == "sandbox.not_found"
    status, made = world.api["blue"].ask("CreateSandbox", body={"request_id": "bulk", "base": BASE, "labels": {"bulk": "1"}})
    assert status == 201
    status, other = world.api["red"].ask("CreateSandbox", body={"request_id": "bulk", "base": BASE, "labels": {"bulk": "1"}})
    assert status == 201
    assert world.api["blue"].ask(name, body={"labels": {"bulk": "1"}})[1][0]["id"] == made["id"]
    assert world.api["red"].ask("GetSandbox", id=other["id"])[1]["state"] == "running"
    world.api["red"].ask("DeleteSandbox", id=other["id"])


FN_TYPE = {"aliases": [], "description": "sh", "environment": {"base": BASE}, "source": "main.sh", "run": {"argv": ["/bin/sh", "{source}"]}}


@foreign("FnCall", "FnCalls", "GetFnResult", "RunCode", "Submit")
def _calls(world, name):
    """op_ids are the project's own: neither joined nor read by another."""
    assert world.api["root"].ask("PutFnType", name="isolation", body=FN_TYPE)[0] == 200
    for color in ("red", "blue"):
        body = {"op_id": "same", "type": "isolation", "code": f"echo {color}"}
        status, result = world.api[color].ask("FnCall", body=body)
        assert status == 200 and result["run"]["stdout"]["data"] == color + "\n", result
        assert world.api[color].ask("GetFnResult", op="same")[1]["run"]["stdout"]["data"] == color + "\n"
    world.api["red"].ask("FnCall", body={"op_id": "only-red", "type": "isolation", "code": "true"})
    expect(404, "fn.op_not_found", world.api["blue"].ask("GetFnResult", op="only-red"))
    for route, body in {"FnCall": {"type": "isolation", "code": "true"}, "FnCalls": {"calls": [{"type": "isolation", "code": "true"}]},
                        "RunCode": {"language": "isolation", "code": "true"},
                        "Submit": {"dataset": "d", "id": 1, "completion": "", "config": {"language": "isolation", "dataset_type": "CommonOJDataset",
                                                                                      "provided_data": {"test": []}}}}.items():
        assert world.api["narrow"].ask(route, body=body)[0] == 403, route


@foreign("CollectLayers", "ListLayerNodes", "ForgetLayerNode")
def _layer_store(world, name):
    """What concerns the store of all is the root's."""
    request = {"CollectLayers": {"body": {"dry_run": True}}, "ForgetLayerNode": {"node": "nobody"}}.get(name, {})
    for color in ("blue", "narrow"):
        expect(403, "auth.forbidden", world.api[color].ask(name, **request))


@foreign("PutFnType", "DeleteFnType")
def _types(world, name):
    body = {"body": FN_TYPE} if name == "PutFnType" else {}
    expect(403, "auth.forbidden", world.api["blue"].ask(name, name="isolation.foreign", **body))


@foreign("PutArtifact", "GetArtifact")
def _artifacts(world, name):
    """Reached by whoever knows the SHA-256 of the bytes, and by nobody without the right to call."""
    digest = world.api["red"].ask("PutArtifact", body=b"red's")[1]["artifact"]
    assert world.api["blue"].ask("GetArtifact", digest=digest)[0] == 200
    expect(403, "auth.forbidden", world.api["narrow"].ask("GetArtifact", digest=digest))
    expect(403, "auth.forbidden", world.api["narrow"].ask("PutArtifact", body=b"x"))


@foreign("ListProjects", "ListPrincipals")
def _lists(world, name):
    text = json.dumps(world.api["blue"].ask(name)[1])
    assert "blue" in text and "red" not in text


@foreign("GetProject", "ListGrants")
def _projects(world, name):
    for project in ("root/red", "root/nobody", "root"):
        expect(404, "iam.project_not_found", world.api["blue"].ask(name, project=project))
    assert world.api["blue"].ask(name, project="root/blue")[0] == 200


@foreign("PutProject", "DeleteProject")
def _change_projects(world, name):
    body = {"body": {}} if name == "PutProject" else {}
    for project in ("root/red", "root/blue", "root/red/x"):
        expect(404, "iam.project_not_found", world.api["blue"].ask(name, project=project, **body))
    expect(403, "auth.forbidden", world.api["blue"].ask(name, project="root/blue/x", **body))


@foreign("PutGrant", "DeleteGrant")
def _grants(world, name):
    body = {"body": {"role": "viewer"}} if name == "PutGrant" else {}
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, project="root/red", principal="red.dev", **body))
    expect(403, "auth.forbidden", world.api["blue"].ask(name, project="root/blue", principal="red.dev", **body))


@foreign("GetPrincipal", "ListKeys", "MakeKey", "DeletePrincipal")
def _principals(world, name):
    body = {"body": {}} if name == "MakeKey" else {}
    for principal in ("red.dev", "nobody"):
        expect(404, "iam.principal_not_found", world.api["blue"].ask(name, principal=principal, **body))


@foreign("PutPrincipal")
def _put_principal(world, name):
    body = {"kind": "person", "project": "root/red"}
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, principal="red.dev", body=body))
    expect(403, "auth.forbidden", world.api["blue"].ask(name, principal="new", body=dict(body, project="root/blue")))


@foreign("RevokeKey")
def _keys(world, name):
    expect(404, "iam.key_not_found", world.api["blue"].ask(name, keyid=world.ids["red"]))
    assert world.api["red"].ask("WhoAmI")[0] == 200


@foreign("PutRole", "DeleteRole")
def _roles(world, name):
    body = {"body": {"rights": []}} if name == "PutRole" else {}
    expect(403, "auth.forbidden", world.api["blue"].ask(name, role="viewer", **body))


@foreign("ListAudit")
def _audit(world, name):
    expect(403, "auth.forbidden", world.api["blue"].ask(name))
    expect(404, "iam.project_not_found", world.api["blue"].ask(name, project="root/red"))


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - SANDBOX))
def test_foreign_project_on_every_other_route(world, name):
    assert name in FOREIGN, f"nobody has said what another tenant gets from {name}"
    FOREIGN[name](world, name)
