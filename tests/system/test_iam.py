# SPDX-License-Identifier: Apache-2.0
"""IAM on a real node: delegation that only narrows, keys that end, and the same model for people and agents in SDK and CLI."""

import asyncio
import json
import threading
import time

import libdsec
import pytest
from libdsec import errors
from libdsec.sync import DSecClient

import support
from support import BASE, MIB

SMALL = dict(container_image=BASE, memory_limit_mb=64, cpu_cores_limit=0.5, disk_limit_mb=64)


@pytest.fixture(scope="module")
def root(node):
    """The client of the root key."""
    with node.client() as client:
        yield client


class World:
    """Projects, principals and their clients for one test, by names of its own."""

    def __init__(self, node, root, name):
        self.node, self.root, self.name = node, root, name
        self.project = f"root/{name}"
        self.clients = []
        root.iam.put_project(self.project)

    def principal(self, who, *, role=None, rights=None, project=None, kind="person"):
        """A new principal with a grant in the project and an own key; gives its id."""
        project = project or self.project
        name = f"{self.name}.{who}"
        self.root.iam.put_principal(name, project=project, kind=kind)
        self.root.iam.grant(name, project, role=role, rights=rights)
        return name

    def client(self, secret):
        made = DSecClient(self.node.url, secret).open()
        self.clients.append(made)
        return made

    def member(self, who, **grant):
        """The client of a new principal."""
        return self.client(self.root.iam.make_key(self.principal(who, **grant))["secret"])

    def close(self):
        for client in self.clients:
            client.close()


@pytest.fixture()
def world(node, root, request):
    made = World(node, root, request.node.name.replace("test_", "").replace("_", "-")[:36].strip("-"))
    yield made
    made.close()


def refused(kind, reason, call, *words, **options):
    """Asserts that a call raises that kind with that reason; gives the exception."""
    with pytest.raises(kind) as caught:
        call(*words, **options)
    assert caught.value.reason == reason, caught.value
    return caught.value


def test_root_key_goes_on_as_it_was(node, root):
    """The key file of a node needs nothing of IAM: it has every right, at the root."""
    me = root.iam.whoami()
    assert (me["principal"], me["key_id"], me["project"]) == ("root", "root", "root")
    assert len(me["rights"]) == 16
    with support.sandbox(root) as box:
        assert box.info["project"] == "root"
        assert box.exec(["true"]).exit_code == 0


def test_delegation_only_narrows(world):
    lead = world.member("lead", role="manager")
    below = f"{world.project}/job"
    lead.iam.put_project(below, limits={"live": 3})
    agent = f"{world.name}.agent"
    lead.iam.put_principal(agent, project=below, kind="agent")
    lead.iam.grant(agent, below, role="agent")
    bot = world.client(lead.iam.make_key(agent)["secret"])
    assert bot.iam.whoami()["project"] == below
    with bot.run_container(libdsec.DSecContainerRunArgs(**SMALL)) as box:
        assert box.info["project"] == below
        assert box.exec(["true"]).exit_code == 0
    # The agent hands on nothing: it has no right to; the lead not more than it has, and not above its project.
    refused(errors.PermissionDeniedError, "auth.forbidden", bot.iam.grant, agent, below, role="agent")
    refused(errors.PermissionDeniedError, "iam.rights_exceed", lead.iam.grant, agent, below, role="owner")
    refused(errors.NotFoundError, "iam.project_not_found", lead.iam.grant, agent, "root", role="agent")
    refused(errors.NotFoundError, "iam.project_not_found", lead.iam.put_project, world.project, limits={})
    error = refused(errors.PermissionDeniedError, "iam.rights_exceed", lead.iam.grant, agent, below, rights=["node.read"])
    assert error.field == "rights" and "node.read" in str(error)
    # What the lead loses, the agent loses, in the same moment.
    world.root.iam.grant(f"{world.name}.lead", world.project, rights=["sandbox.read"])
    refused(errors.PermissionDeniedError, "auth.forbidden", bot.run_container, libdsec.DSecContainerRunArgs(**SMALL))
    assert next(world.root.iam.grants(below))["effective_rights"] == ["sandbox.read"]


def test_limits_of_a_child_stay_within_its_parent(world):
    world.root.iam.put_project(world.project, limits={"live": 5, "memory_bytes": 1 << 30})
    child = f"{world.project}/child"
    error = refused(errors.InvalidArgumentError, "iam.quota_exceeds_parent", world.root.iam.put_project, child, limits={"live": 6})
    assert error.field == "limits.live" and "6 is above 5" in str(error)
    made = world.root.iam.put_project(child, limits={"live": 5})
    assert made["effective_limits"] == {"live": 5, "memory_bytes": 1 << 30}
    # Lowered afterwards, the tighter one holds.
    world.root.iam.put_project(world.project, limits={"live": 1})
    assert world.root.iam.project(child)["effective_limits"] == {"live": 1}


@pytest.mark.parametrize("method, path, body, reason, field", [
    ("PUT", "/v1/iam/projects/root%2FBad", {}, "iam.project_name", "project"),
    ("PUT", "/v1/iam/projects/root%2Fx", {"limits": {"live": -1}}, "request.out_of_range", "limits.live"),
    ("PUT", "/v1/iam/projects/root%2Fx", {"limits": {"cpus": 1}}, "request.unknown_field", "limits.cpus"),
    ("PUT", "/v1/iam/projects/root%2Fx", {"rights": ["sandbox.fly"]}, "iam.right_unknown", "rights"),
    ("PUT", "/v1/iam/projects/root%2Fx", {"description": "a\nb"}, "iam.text", "description"),
    ("PUT", "/v1/iam/principals/Ann", {"kind": "person", "project": "root"}, "iam.name", "principal"),
    ("PUT", "/v1/iam/principals/x", {"kind": "robot", "project": "root"}, "request.invalid", "kind"),
    ("PUT", "/v1/iam/principals/x", {"kind": "agent"}, "request.missing", "project"),
    ("PUT", "/v1/iam/projects/root/grants/x", {}, "request.missing", "role"),
    ("PUT", "/v1/iam/projects/root/grants/x", {"role": "agent", "rights": []}, "request.contradiction", "rights"),
    ("DELETE", "/v1/iam/keys/zz", None, "request.invalid", "keyid"),
    ("PUT", "/v1/iam/roles/a%20b", {"rights": []}, "iam.name", "role"),
    ("POST", "/v1/sandboxes", {"request_id": "x", "base": BASE, "project": "../x"}, "iam.project_name", "project"),
    ("GET", "/v1/iam/audit?page_size=0", None, "request.out_of_range", "page_size"),
])
def test_bad_input_names_field_and_rule(node, root, method, path, body, reason, field):
    status, _, reply = node.curl(method, path, body)
    assert status == 400, reply
    assert (reply["error"]["reason"], reply["error"]["field"]) == (reason, field)


def test_body_is_bounded(node, root):
    status, _, reply = node.curl("PUT", "/v1/iam/projects/root%2Fx", '{"description":"' + "x" * (2 * MIB) + '"}')
    assert (status, reply["error"]["reason"]) == (413, "request.too_large")


def test_keys_expire_and_are_revoked(world):
    name = world.principal("ann", role="agent")
    ends = int(time.time() * 1000) + 1500
    short = world.root.iam.make_key(name, expires_unix_ms=ends)
    other = world.root.iam.make_key(name, description="kept")
    client = world.client(short["secret"])
    support.wait_until(lambda: time.time() * 1000 > ends, 10, "the key's end")
    refused(errors.UnauthenticatedError, "auth.expired", client.iam.whoami)
    kept = world.client(other["secret"])
    world.root.iam.revoke_key(other["key"]["key_id"])
    refused(errors.UnauthenticatedError, "auth.revoked", kept.iam.whoami)
    world.root.iam.revoke_key(other["key"]["key_id"])
    states = {key["key_id"]: key["revoked_unix_ms"] > 0 for key in world.root.iam.keys(name)}
    assert states == {short["key"]["key_id"]: False, other["key"]["key_id"]: True}
    third = world.client(world.root.iam.make_key(name)["secret"])
    world.root.iam.put_principal(name, project=world.project, disabled=True)
    refused(errors.UnauthenticatedError, "auth.disabled", third.iam.whoami)
    world.root.iam.delete_principal(name)
    refused(errors.UnauthenticatedError, "auth.invalid", third.iam.whoami)


def test_secret_is_nowhere_on_disk(world):
    made = world.root.iam.make_key(world.principal("ann", role="agent"))
    secret = made["secret"].rsplit("_", 1)[1].encode("ascii")
    world.client(made["secret"])
    for path in [*world.node.state.glob("*.db*"), world.node.log]:
        assert secret not in path.read_bytes(), path
    assert secret not in json.dumps(list(world.root.iam.keys(made["key"]["principal"]))).encode("ascii")


def test_revoked_key_ends_its_streams(world):
    """A stream that is open looks at its key again with each wait."""
    made = world.root.iam.make_key(world.principal("ann", role="agent"))
    client = world.client(made["secret"])
    box = client.run_container(libdsec.DSecContainerRunArgs(**SMALL))
    outcome = []

    def follow():
        try:
            outcome.append(box.exec(["sleep", "60"]))
        except errors.DSecError as error:
            outcome.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    support.wait_until(lambda: any(e["type"] == "exec_started" for e in world.root.get(box.id).events()), 10, "the command runs")
    started = time.monotonic()
    world.root.iam.revoke_key(made["key"]["key_id"])
    thread.join(30)
    assert time.monotonic() - started < 15 and isinstance(outcome[0], errors.UnauthenticatedError), outcome
    assert outcome[0].reason == "auth.revoked"
    world.root.delete(box.id)


def test_narrow_key_makes_no_wider_one(world):
    below = f"{world.project}/job"
    world.root.iam.put_project(below)
    name = world.principal("ann", role="manager")
    ends = int(time.time() * 1000) + 600_000
    narrow = world.client(world.root.iam.make_key(name, project=below, rights=["sandbox.read", "principal.manage"], expires_unix_ms=ends)["secret"])
    assert narrow.iam.whoami()["rights"] == ["sandbox.read", "principal.manage"]
    for wider in (dict(project=world.project), dict(rights=["sandbox.use"])):
        refused(errors.PermissionDeniedError, "iam.rights_exceed", narrow.iam.make_key, name, **wider)
    refused(errors.PermissionDeniedError, "iam.expiry", narrow.iam.make_key, name, expires_unix_ms=ends + 1)
    again = narrow.iam.make_key(name)["key"]
    assert (again["project"], again["rights"], again["expires_unix_ms"]) == (below, ["sandbox.read", "principal.manage"], ends)


def test_request_ids_and_names_are_the_projects_own(world):
    """Two tenants that happen to use the same request_id and name neither see nor disturb each other."""
    other = World(world.node, world.root, world.name + "2")
    try:
        args = libdsec.DSecContainerRunArgs(**SMALL, name="same")
        one = world.member("ann", role="agent").run_container(args, request_id="same")
        two = other.member("bob", role="agent").run_container(args, request_id="same")
        assert one.id != two.id and (one.info["project"], two.info["project"]) == (world.project, other.project)
        world.root.delete(one.id), world.root.delete(two.id)
    finally:
        other.close()


def test_layer_names_belong_to_the_project(world):
    member = world.member("ann", role="developer")
    with member.run_container(libdsec.DSecContainerRunArgs(**SMALL)) as box:
        box.run_shell("echo x > /tmp/../root/x")
        error = refused(errors.PermissionDeniedError, "auth.forbidden", box.pack_diff, BASE)
        assert error.field == "name"
        packed = box.pack_diff(f"{world.name}/layer:1", default_scrub=False)
        assert f"{world.name}/layer:1" in packed["layer"]["names"]
    refused(errors.PermissionDeniedError, "auth.forbidden", member._transport.call, "DELETE", f"/v1/layers/{world.name}%2Flayer:1")
    world.root._transport.call("DELETE", f"/v1/layers/{world.name}%2Flayer:1")


def test_audit_tells_who_did_what_with_which_key(world):
    made = world.root.iam.make_key(world.principal("ann", role="agent"))
    client, key_id = world.client(made["secret"]), made["key"]["key_id"]
    box = client.run_container(libdsec.DSecContainerRunArgs(**SMALL))
    box.stop()
    refused(errors.PermissionDeniedError, "auth.forbidden", client._transport.call, "GET", "/metrics")

    def records():
        return list(reversed(list(world.root.iam.audit(key_id=key_id))))

    seen = [(r["action"], r["project"], r["outcome"]) for r in records()]
    assert seen == [("POST /v1/sandboxes", world.project, "ok"), ("DELETE /v1/sandboxes/{id}", world.project, "ok"),
                    ("GET /metrics", "", "auth.forbidden")]
    assert [r["object"] for r in records()][1] == box.id
    assert {r["principal"] for r in records()} == {made["key"]["principal"]}
    # A change of IAM is there before it is made and after it.
    mine = [r for r in world.root.iam.audit(project=world.project) if r["action"].startswith("POST /v1/iam/principals")]
    assert [r["outcome"] for r in mine] == ["ok", "begun"] and mine[0]["request_id"] == mine[1]["request_id"]
    status, _, _ = world.node.curl("GET", "/v1/node", headers={"Authorization": "Bearer nobody"})
    assert status == 401
    first = next(r for r in world.root.iam.audit() if r["outcome"] == "auth.invalid")
    assert (first["principal"], first["key_id"], first["status"]) == ("", "", 401)
    assert made["secret"] not in json.dumps(list(world.root.iam.audit()))
    # A tenant's auditor sees its own project and nothing else.
    auditor = world.member("eve", rights=["audit.read"])
    assert {r["project"].split("/")[1] for r in auditor.iam.audit()} == {world.name}


def test_cli_does_it_all(world):
    node, name, project = world.node, world.name, world.project

    def cli(*words, ok=True, **options):
        done = node.cli(*words, **options)
        assert (done.returncode == 0) is ok, (words, done.stderr)
        return done.stdout.decode() if ok else done.stderr.decode()

    assert "root with key root" in cli("iam", "whoami")
    assert "2 of 4" not in cli("iam", "project", "set", f"{project}/cli", "--limit", "live=4", "--limit", "memory=1g", "--limit", "cpu=1.5")
    shown = json.loads(cli("iam", "project", "show", f"{project}/cli", "--json"))
    assert shown["limits"] == {"live": 4, "memory_bytes": 1 << 30, "cpu_millis": 1500} and shown["used"]["live"] == 0
    cli("iam", "principal", "set", f"{name}.bot", "--kind", "agent", "--project", f"{project}/cli")
    cli("iam", "role", "set", f"{name}.runner", "--right", "sandbox.create", "--right", "sandbox.delete", "--right", "sandbox.read")
    cli("iam", "grant", f"{name}.bot", f"{project}/cli", "--role", f"{name}.runner")
    assert f"{name}.runner" in cli("iam", "grants", f"{project}/cli")
    key = cli("iam", "key", "make", f"{name}.bot", "--expires", "1h").strip()
    assert key.startswith("dsec_") and f"{name}.bot" in cli("--api-key", key, "iam", "whoami")
    box = cli("--api-key", key, "create", BASE, "--memory", "64m").split()[0]
    assert "1 of 4" in cli("iam", "project", "show", f"{project}/cli")
    assert "auth.forbidden" in cli("--api-key", key, "exec", box, "--", "true", ok=False)
    cli("--api-key", key, "rm", box)
    assert "good" in cli("iam", "key", "ls", f"{name}.bot")
    cli("iam", "key", "revoke", key.split("_")[1])
    assert "auth.revoked" in cli("--api-key", key, "iam", "whoami", ok=False)
    assert "POST /v1/sandboxes" in cli("iam", "audit", "--principal", f"{name}.bot")
    cli("iam", "ungrant", f"{name}.bot", f"{project}/cli"), cli("iam", "role", "rm", f"{name}.runner")
    cli("iam", "principal", "rm", f"{name}.bot"), cli("iam", "project", "rm", f"{project}/cli")
    assert f"{project}/cli" not in cli("iam", "project", "ls")
    assert "live, creating, cpu" in cli("iam", "project", "set", project, "--limit", "pigs=3", ok=False)


def test_async_client_has_the_same_names(world):
    async def work():
        async with libdsec.DSecClient(world.node.url, world.node.key) as client:
            await client.iam.put_role(f"{world.name}.role", ["sandbox.read"])
            assert f"{world.name}.role" in [role["role"] async for role in client.iam.roles()]
            await client.iam.delete_role(f"{world.name}.role")
            assert world.project in [project["project"] async for project in client.iam.projects()]
            assert (await client.iam.project(world.project))["used"]["live"] == 0

    asyncio.run(work())


def test_restart_keeps_projects_keys_and_grants(world):
    secret = world.root.iam.make_key(world.principal("ann", role="agent"))["secret"]
    box = world.client(secret).run_container(libdsec.DSecContainerRunArgs(**SMALL))
    world.node.kill()
    world.node.start()
    client = world.client(secret)
    assert client.get(box.id).info["project"] == world.project
    assert world.root.iam.project(world.project)["used"]["live"] == 1
    client.delete(box.id)
    assert world.root.iam.project(world.project)["used"]["live"] == 0
