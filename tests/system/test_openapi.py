# SPDX-License-Identifier: Apache-2.0
"""Drives every route of api/openapi.yaml against a real node. Each request body and reply is held against its schema, and
every parameter and field of a request that the description names must have been sent and accepted."""

import base64
import contextlib
import functools
import hashlib
import http.client
import io
import itertools
import json
import pathlib
import tarfile
import time
import urllib.parse

import jsonschema
import pytest
import yaml

import support
from support import BASE, MIB, ROOT

METHODS = ("get", "post", "put", "delete")
JSON, NDJSON, BYTES, TAR = "application/json", "application/x-ndjson", "application/octet-stream", "application/x-tar"
UNKNOWN_ID = "sb-nowhere-01h00000000000000000000000"


def _close(schema, parts_of_others=False):
    """Forbids members of replies that the description does not name. Clients ignore them; the description must know them."""
    if isinstance(schema, dict):
        if "properties" in schema and "unevaluatedProperties" not in schema and not parts_of_others:
            schema.setdefault("additionalProperties", False)
        for key, value in schema.items():
            _close(value if key != "properties" else list(value.values()), key == "allOf")
    elif isinstance(schema, list):
        for value in schema:
            _close(value, parts_of_others)


def _load():
    document = yaml.safe_load((ROOT / "api" / "openapi.yaml").read_text(encoding="utf-8"))
    schemas = document["components"]["schemas"]
    composed = {part["$ref"].rsplit("/", 1)[1] for schema in schemas.values() for part in schema.get("allOf", [])}
    for name, schema in schemas.items():
        _close(schema, name in composed)
    return document


DOCUMENT = _load()
RESOLVER = jsonschema.RefResolver("", DOCUMENT)


def deref(value):
    """What a possible $ref means."""
    while "$ref" in value:
        value = RESOLVER.resolve(value["$ref"])[1]
    return value


def _operations():
    found = {}
    for path, item in DOCUMENT["paths"].items():
        for method in METHODS:
            if method in item:
                operation = dict(item[method], path=path, method=method.upper())
                operation["parameters"] = [deref(p) for p in item.get("parameters", []) + item[method].get("parameters", [])]
                found[operation["operationId"]] = operation
    return found


OPERATIONS = _operations()


def check(schema, value, where):
    """Fails with the innermost reason when a value is not what the schema says."""
    validator = jsonschema.Draft202012Validator(schema, resolver=RESOLVER)
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    assert error is None, f"{where}: {error.message} at {list(error.absolute_path)} of {json.dumps(value)[:1500]}"


def fields_of(schema):
    """Names of the members of a request, with those of member objects as `limits.pids`."""
    schema = deref(schema)
    names = set()
    for part in [schema] + [deref(p) for p in schema.get("allOf", [])]:
        for name, value in part.get("properties", {}).items():
            names |= {name} | {f"{name}.{inner}" for inner in fields_of(value)}
    return names


def fields_in(schema, body):
    """Those of them that a body has."""
    names = fields_of(schema)
    present = set()
    for name in names:
        value = body
        for step in name.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            present.add(name)
    return present


class Api:
    """Calls by operationId. What was accepted is noted in `seen`: parameters and fields by operation."""

    def __init__(self, node):
        self.node = node
        self.seen = {name: set() for name in OPERATIONS}

    @contextlib.contextmanager
    def open(self, name, /, *, body=None, headers=(), key=True, **parameters):
        """One request; gives the response before its body is read."""
        operation = OPERATIONS[name]
        named = {p["name"]: p for p in operation["parameters"]}
        path, query = operation["path"], []
        fields = dict(headers, **({"Authorization": f"Bearer {self.node.key}"} if key else {}))
        for parameter, value in parameters.items():
            place = named.get(parameter, {"in": "query"})["in"]
            if place == "path":
                path = path.replace("{" + parameter + "}", urllib.parse.quote(value, safe=""))
            elif place == "header":
                fields[parameter] = value
            else:
                query += [(parameter, v) for v in (value if isinstance(value, list) else [value])]
        if query:
            path += "?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        if isinstance(body, dict):
            check(operation["requestBody"]["content"][JSON]["schema"], body, f"request of {name}")
            body, fields["Content-Type"] = json.dumps(body).encode("utf-8"), JSON
        with contextlib.closing(http.client.HTTPConnection(self.node.url.split("//")[1], timeout=60)) as connection:
            connection.request(operation["method"], path, body=body, headers=fields)
            yield connection.getresponse()

    def call(self, name, /, *, status=200, until=None, **request):
        """One request with its whole reply, which must be as described: JSON, list of records, bytes, or None for 204.
        Of a stream that does not end by itself, `until` says which record is the last wanted."""
        with self.open(name, **request) as response:
            described = OPERATIONS[name]["responses"].get(str(response.status))
            described = deref(described or OPERATIONS[name]["responses"].get("default") or {})
            where = f"{response.status} of {name}"
            assert described, f"{where} is not described: {response.read(2000)}"
            assert response.headers["X-Request-Id"], where
            body = self._body(response, described.get("content"), where, until)
            assert response.status == status, f"{where}: {body}"
        if status < 300:
            self._note(name, request)
            for header in described.get("headers", {}):
                assert header in response.headers, f"{where}: no header {header}"
        return body

    def _body(self, response, content, where, until):
        if content is None:
            assert response.read() == b"", where
            return None
        kind = response.headers["Content-Type"].split(";")[0]
        assert kind in content, f"{where}: {kind} is not one of {sorted(content)}"
        schema = content[kind].get("schema")
        if kind == NDJSON:
            records = []
            for line in response:
                records.append(json.loads(line))
                check(schema, records[-1], where)
                if until and until(records[-1]):
                    break
            return records
        data = response.read()
        if kind == JSON:
            data = json.loads(data)
            check(schema, data, where)
        return data

    def _note(self, name, request):
        operation = OPERATIONS[name]
        described = {p["name"] for p in operation["parameters"]}
        self.seen[name] |= described & request.keys()
        if isinstance(request.get("body"), dict):
            self.seen[name] |= fields_in(operation["requestBody"]["content"][JSON]["schema"], request["body"])

    def sandbox(self, **fields):
        """A sandbox that is told apart by its request_id."""
        body = {"request_id": f"openapi-{time.monotonic_ns()}", "base": BASE, "limits": {"memory_bytes": 64 * MIB}, **fields}
        return self.call("CreateSandbox", body=body, status=201)

    def started(self, box, *argv, **fields):
        """A detached command that has its process; its op_id."""
        body = {"argv": list(argv), "detached": True, **fields}
        op = self.call("Exec", id=box["id"], body=body, status=202)["op_id"]
        support.wait_until(lambda: self.call("GetExec", id=box["id"], op=op)["pid"] > 0, 10, "it starts")
        return op


@pytest.fixture(scope="module")
def api(node):
    return Api(node)


@pytest.fixture(scope="module")
def box(api):
    """One sandbox for all drivers that do not end it."""
    made = api.sandbox(labels={"suite": "openapi"}, name="openapi")
    yield made
    api.call("DeleteSandbox", id=made["id"])


DRIVERS = {}


def drives(function):
    """Registers the driver of the operation that its name says: drive_get_node drives GetNode."""
    DRIVERS["".join(word.capitalize() for word in function.__name__.split("_")[1:])] = function
    return function


def is_type(*types):
    return lambda record: record["type"] in types


def bounded(count):
    """Ends a stream at its record number `count`."""
    numbers = itertools.count(1)
    return lambda _: next(numbers) == count


# --- node and layers ---


@drives
def drive_health(api, _):
    assert api.call("Health", key=False) == {"status": "ok"}


@drives
def drive_metrics(api, _):
    assert b"dsec_api_requests_total" in api.call("Metrics")


@drives
def drive_get_node(api, _):
    assert api.call("GetNode")["live"] >= 1


@drives
def drive_node_events(api, box):
    events = api.call("NodeEvents", after=0)
    assert [e["node_seq"] for e in events] == sorted(e["node_seq"] for e in events)
    last = events[-1]["node_seq"]
    api.call("RenewSandbox", id=box["id"], body={"ttl_ms": 600_000})
    assert api.call("NodeEvents", after=last, follow="true", until=is_type("renewed"))[-1]["node_seq"] > last


@drives
def drive_list_layers(api, _):
    found = api.call("ListLayers", kind="base", prefix=BASE.split(":")[0])["layers"]
    assert any(BASE in layer["names"] for layer in found)
    every = api.call("ListLayers")["layers"]
    page = api.call("ListLayers", page_size=1)
    assert page["layers"] == every[:1] and page["next_page_token"] == every[0]["id"]
    assert api.call("ListLayers", page_token=page["next_page_token"])["layers"] == every[1:]
    assert api.call("ListLayers", label="no=such")["layers"] == []
    assert api.call("ListLayers", kind="nothing", status=400)["error"]["field"] == "kind"


@drives
def drive_get_layer(api, _):
    layer = api.call("GetLayer", ref=BASE)
    assert api.call("GetLayer", ref=layer["id"]) == layer
    assert api.call("GetLayer", ref="no:such", status=404)["error"]["reason"] == "layer.not_found"


@drives
def drive_delete_layer(api, _):
    source = api.node.folder / "openapi-layer"
    source.mkdir()
    (source / "file").write_text("x", encoding="ascii")
    made = api.node.cli("layer", "build", "--layers", api.node.layers, "--kind", "workspace", "--name", "openapi:1",
                        "--from-dir", source)
    assert made.returncode == 0, made.stderr
    user = api.sandbox(workspace="openapi:1")
    batch = {"request_id": "openapi-workspace", "count": 1, "sandbox": {"base": BASE, "workspace": "openapi:1"}}
    other = api.call("BatchCreateSandboxes", body=batch)[0]["sandbox"]
    assert user["workspace"] == "openapi:1" and len(user["layer_ids"]) == 2
    for ref in ("openapi:1", user["layer_ids"][1]):
        assert api.call("DeleteLayer", ref=ref, status=409)["error"]["reason"] == "layer.in_use"
    for box in (user, other):
        api.call("DeleteSandbox", id=box["id"])
    api.call("DeleteLayer", ref="openapi:1", status=204)
    api.call("GetLayer", ref="openapi:1", status=404)


@drives
def drive_collect_layers(api, _):
    folder = api.node.folder / "openapi-unnamed"
    folder.mkdir()
    (folder / "file").write_text("of no name", encoding="ascii")
    made = api.node.cli("layer", "build", "--layers", api.node.layers, "--kind", "workspace", "--from-dir", folder, "--json")
    unnamed = json.loads(made.stdout)["id"]
    body = {"unnamed_for_ms": 0, "grace_ms": 0, "dry_run": True, "timeout_ms": 60000}
    would = api.call("CollectLayers", body=body)
    assert unnamed in would["removed"] and would["dry_run"] and would["removed_bytes"] > 0
    done = api.call("CollectLayers")
    assert unnamed not in done["removed"] and done["young"] >= 1 and not done["dry_run"]
    for field, value in (("grace_ms", -1), ("timeout_ms", 0), ("unnamed_for_ms", 10**15), ("dry_run", 1)):
        # Not by its schema: the check of requests would stop it.
        status, _, reply = api.node.curl("POST", "/v1/layers:collect", {field: value})
        assert status == 400 and reply["error"]["field"] == field
    api.call("DeleteLayer", ref=unnamed, status=204)


@drives
def drive_list_layer_nodes(api, box):
    nodes = {item["node"]: item for item in api.call("ListLayerNodes")["nodes"]}
    assert nodes[api.node.node_id]["layers"] >= len(box["layer_ids"])


@drives
def drive_forget_layer_node(api, _):
    folder = pathlib.Path(api.node.layers) / "nodes"
    lease = json.loads((folder / f"{api.node.node_id}.json").read_text(encoding="ascii"))
    (folder / "openapigone.json").write_text(
        json.dumps(dict(lease, node="openapigone"), sort_keys=True, separators=(",", ":")), encoding="ascii")
    assert "openapigone" in {item["node"] for item in api.call("ListLayerNodes")["nodes"]}
    api.call("ForgetLayerNode", node="openapigone", status=204)
    assert "openapigone" not in {item["node"] for item in api.call("ListLayerNodes")["nodes"]}
    assert api.call("ForgetLayerNode", node="openapinobody", status=404)["error"]["reason"] == "layer.no_lease"
    for path in folder.glob("openapigone*"):
        path.unlink()


# --- sandboxes ---

FULL = {
    "base": BASE, "project": "root", "toolkits": [], "backend": "container",
    "limits": {"memory_bytes": 64 * MIB, "cpu_millis": 500, "pids": 64, "disk_bytes": 64 * MIB, "disk_inodes": 1 << 20,
               "shm_bytes": MIB, "open_files": 256, "output_bytes": MIB},
    "network": {"mode": "none"}, "ttl_ms": 600_000, "idle_ms": 600_000,
    "ttl_policy": {"wait_for_exec": True, "max_extension_ms": 1000},
    "env": {"A": "a"}, "env_b64": {"B": "gIE="}, "workdir": "/tmp", "user": "root", "hostname": "box",
    "record_first_touch": True, "labels": {"suite": "openapi-full"}, "entrypoint": ["sleep", "600"], "timeout_ms": 30_000, "capacity_wait_ms": 1000,
}


@drives
def drive_create_sandbox(api, box):
    layer = api.call("GetLayer", ref=BASE)
    assert box["layer_ids"] == [layer["id"]] and box["state"] == "running"
    body = dict(FULL, request_id="openapi-create", name="openapi-create")
    made = api.call("CreateSandbox", body=body, status=201)
    assert api.call("CreateSandbox", body=body)["id"] == made["id"]
    for field in ("ttl_ms", "idle_ms", "ttl_policy", "workdir", "user", "hostname", "labels", "entrypoint", "limits", "network"):
        assert made[field] == FULL[field], field
    assert made["env_keys"] == ["A", "B"] and made["name"] == "openapi-create" and made["termination"] is None
    result = api.call("Exec", id=made["id"], body={"argv": ["printenv", "B"], "stream": False})
    assert result["stdout"]["data_b64"] == "gIEK"
    ended = api.call("DeleteSandbox", id=made["id"])
    assert ended["termination"]["cause"] == "user_stop" and ended["usage"]["memory_peak_bytes"] >= 0
    assert api.call("CreateSandbox", body=dict(body, user="nobody"), status=409)["error"]["reason"] == "create.request_id_reused"
    last = api.sandbox(entrypoint_b64=["c2xlZXA=", "NjAw"])
    assert last["entrypoint"] == ["sleep", "600"]
    api.call("DeleteSandbox", id=last["id"])
    missing = {"request_id": "openapi-missing", "base": BASE, "workspace": "no:such"}
    assert api.call("CreateSandbox", body=missing, status=404)["error"]["reason"] == "layer.not_found"


@drives
def drive_list_sandboxes(api, box):
    page = api.call("ListSandboxes", state=["running", "stopping"], label=["suite=openapi"], name="openapi",
                    include_ended="true", page_size=1, project="root")
    assert [s["id"] for s in page["sandboxes"]] == [box["id"]]
    other = api.sandbox(labels={"suite": "openapi"})
    pages = functools.partial(api.call, "ListSandboxes", label="suite=openapi", page_size=1)
    first = pages()
    second = pages(page_token=first["next_page_token"])
    assert [s["id"] for page in (first, second) for s in page["sandboxes"]] == [box["id"], other["id"]]
    api.call("DeleteSandbox", id=other["id"])
    assert api.call("ListSandboxes", page_token="?", status=400)["error"]["field"] == "page_token"


@drives
def drive_batch_create_sandboxes(api, _):
    body = {"request_id": "openapi-batch", "count": 3, "sandbox": FULL}
    *items, done = api.call("BatchCreateSandboxes", body=body)
    assert done == {"type": "done", "ready": 3, "failed": 0} and {i["index"] for i in items} == {0, 1, 2}
    body = {"request_id": "openapi-named", "count": 2, "sandbox": {"base": BASE, "name": "openapi-batch", "labels": FULL["labels"]}}
    assert api.call("BatchCreateSandboxes", body=body)[-1] == {"type": "done", "ready": 1, "failed": 1}
    single = {"base": BASE, "entrypoint_b64": ["c2xlZXA=", "NjAw"], "labels": FULL["labels"]}
    assert api.call("BatchCreateSandboxes", body={"request_id": "openapi-b64", "count": 1, "sandbox": single})[-1]["ready"] == 1


@drives
def drive_delete_sandboxes(api, _):
    first, second = api.sandbox(labels={"suite": "openapi-end"}), api.sandbox(labels={"suite": "openapi-end"})
    records = api.call("DeleteSandboxes", body={"ids": [first["id"], UNKNOWN_ID]})
    assert sorted(r["type"] for r in records) == ["deleted", "done", "error"]
    records = api.call("DeleteSandboxes", body={"labels": {"suite": "openapi-end"}, "grace_ms": 10})
    assert [r.get("id") for r in records] == [second["id"], None]
    api.call("DeleteSandboxes", body={"labels": FULL["labels"]})


@drives
def drive_get_sandbox(api, box):
    assert api.call("GetSandbox", id=box["id"])["id"] == box["id"]
    for unknown in (UNKNOWN_ID, "anything at/all"):
        assert api.call("GetSandbox", id=unknown, status=404)["error"]["reason"] == "sandbox.not_found"


@drives
def drive_delete_sandbox(api, _):
    made = api.sandbox()
    assert api.call("DeleteSandbox", id=made["id"], grace_ms=10, wait="false")["state"] in ("stopping", "stopped")
    assert api.call("DeleteSandbox", id=made["id"])["state"] == "stopped"
    gone = api.call("Exec", id=made["id"], body={"argv": ["true"]}, status=410)["error"]
    assert gone["reason"] == "sandbox.ended.user_stop" and gone["details"]["termination"]["cause"] == "user_stop"


@drives
def drive_renew_sandbox(api, box):
    renewed = api.call("RenewSandbox", id=box["id"], body={"ttl_ms": 600_000, "idle_ms": 300_000})
    assert (renewed["ttl_ms"], renewed["idle_ms"]) == (600_000, 300_000)


@drives
def drive_pack_sandbox(api, box):
    user = api.sandbox()
    api.call("Exec", id=user["id"], body={"script": "mkdir /work && echo answer > /work/f && echo h > /root/.bash_history",
                                          "stream": False})
    body = {"kind": "workspace", "name": "openapi-pack:1", "labels": {"suite": "openapi"}, "scrub": ["*.o"], "default_scrub": True,
            "canary_paths": ["*.pem"], "canary_contents": ["sk-live"], "timeout_ms": 60_000}
    records = api.call("PackSandbox", id=user["id"], body=body)
    assert {r["type"] for r in records[:-1]} <= {"progress", "keepalive"} and records[0]["type"] == "progress"
    packed = records[-1]
    assert packed["type"] == "layer" and packed["frozen_us"] > 0 and packed["scrubbed"] >= 1
    layer = api.call("GetLayer", ref="openapi-pack:1")
    assert layer == packed["layer"] and layer["labels"]["dsec.pack.sandbox"] == user["id"]
    assert layer["labels"]["dsec.pack.parents"] == ",".join(user["layer_ids"])
    assert layer["labels"]["dsec.pack.principal"] == "key:" + hashlib.sha256(api.node.key.encode()).hexdigest()[:12]
    other = api.sandbox(workspace="openapi-pack:1")
    shown = api.call("Exec", id=other["id"], body={"script": "cat /work/f; ls -A /root | grep history", "stream": False})
    assert shown["stdout"]["data"] == "answer\n"
    for fields, reason in (({"canary_paths": ["/work/f"]}, "pack.canary"),
                           ({"canary_contents_b64": [base64.b64encode(b"answer").decode()]}, "pack.canary")):
        assert api.call("PackSandbox", id=user["id"], body=fields)[-1]["error"]["reason"] == reason
    for fields, field in (({"scrub": ["a/b"]}, "scrub[0]"), ({"labels": {"dsec.x": "y"}}, "labels.dsec.x"), ({"name": "N"}, "name")):
        assert api.call("PackSandbox", id=user["id"], body=fields, status=400)["error"]["field"] == field
    for made in (user, other):
        api.call("DeleteSandbox", id=made["id"])
    assert api.call("PackSandbox", id=user["id"], body={}, status=410)["error"]["reason"] == "sandbox.ended.user_stop"
    assert api.call("PackSandbox", id=UNKNOWN_ID, body={}, status=404)["error"]["reason"] == "sandbox.not_found"
    api.call("DeleteLayer", ref="openapi-pack:1", status=204)


@drives
def drive_first_touch(api, box):
    made = api.sandbox(record_first_touch=True)
    api.call("Exec", id=made["id"], body={"script": "cat /bin/sh > /dev/null", "stream": False})
    touched = api.call("FirstTouch", id=made["id"], body={"save": True, "merge": True, "stop": True})
    [layer] = touched["layers"]
    assert layer["id"] == made["layer_ids"][0] and layer["saved"] and layer["parts"] > 0
    assert layer["saved_bytes"] >= layer["bytes"] > 0 and touched["stopped"] and touched["lost"] == 0
    api.call("DeleteSandbox", id=made["id"])
    assert api.call("FirstTouch", id=box["id"], body={}, status=409)["error"]["reason"] == "trace.not_recording"


@drives
def drive_get_stats(api, box):
    stats = api.call("GetStats", id=box["id"])
    assert stats["usage"]["memory_bytes"] > 0 and stats["limits"]["memory_bytes"] == 64 * MIB


@drives
def drive_sandbox_events(api, _):
    made = api.sandbox()
    with api.node.client() as client:
        client.get(made["id"]).exec(["true"])
    api.call("DeleteSandbox", id=made["id"])
    events = api.call("SandboxEvents", id=made["id"], after=0, follow="true")
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1)) and events[-1]["type"] == "ended"
    assert [e["type"] for e in events].count("exec_started") == 1
    # There is nothing to wait for after the end: neither silence nor a flood of keepalives.
    past = api.call("SandboxEvents", id=made["id"], after=events[-1]["seq"], follow="true", until=bounded(3))
    assert len(past) < 3 and all(e["type"] == "keepalive" for e in past)


# --- exec ---


@drives
def drive_exec(api, box):
    run = functools.partial(api.call, "Exec", id=box["id"])
    body = {"op_id": "openapi:exec", "argv": ["sh", "-c", "cat; echo err >&2"], "cwd": "/tmp", "env": {"A": "1"}, "user": "root",
            "stdin": "in", "stdin_open": False, "timeout_ms": 10_000, "output_bytes": 65_536, "merged": False, "group_kill": False,
            "on_disconnect": "keep", "detached": False, "stream": True}
    records = run(body=body)
    assert [r["type"] for r in records if r["type"] != "keepalive"] == ["started", "stdout", "stderr", "exit"]
    assert run(body=body)[0]["known"] is True
    assert run(body=dict(body, merged=True), status=409)["error"]["reason"] == "exec.op_id_reused"
    whole = run(body={"script": "echo $0; false", "shell": "/bin/sh", "stream": False})
    assert whole["result"]["exit_code"] == 1 and whole["stdout"]["total"] > 0
    whole = run(body={"script_b64": "cHdkOyBlY2hvICRYOyBjYXQ=", "cwd_b64": "L3RtcA==", "env_b64": {"X": "WQ=="}, "stdin_b64": "eg==",
                      "shell_b64": "L2Jpbi9zaA==", "stream": False})
    assert whole["stdout"]["data"] == "/tmp\nY\nz"
    assert run(body={"argv_b64": ["dHJ1ZQ=="], "stream": False})["result"]["kind"] == "exited"
    assert run(body={"script": "X=1", "session": "openapi", "stream": False})["result"]["exit_code"] == 0
    assert run(body={"argv": ["stty", "size"], "tty": {"rows": 11, "cols": 22}, "stream": False})["stdout"]["data"].strip() == "11 22"
    assert run(body={"argv": ["true"], "detached": True}, status=202)["running"] in (True, False)
    assert run(body={"argv": ["sleep", "60"], "timeout_ms": 50, "stream": False})["result"]["kind"] == "timeout"
    assert run(body={"argv": ["sh", "-c", "kill -9 $$"], "stream": False})["result"]["signal"] == 9
    spawn = run(body={"argv": ["/nothing"], "stream": False})["result"]
    assert spawn["kind"] == "spawn_error" and spawn["errno_name"] == "ENOENT"
    loud = run(body={"argv": ["head", "-c", "300000", "/dev/zero"], "output_bytes": 65_536, "stream": False})["stdout"]
    assert loud["total"] == 300_000 and loud["dropped"] > 0 and loud["hole_at"] > 0


@drives
def drive_list_execs(api, box):
    op = api.started(box, "sleep", "60", op_id="openapi:listed")
    assert [e["running"] for e in api.call("ListExecs", id=box["id"])["execs"] if e["op_id"] == op] == [True]
    api.call("CancelExec", id=box["id"], op=op, status=204)


@drives
def drive_get_exec(api, box):
    op = api.started(box, "sh", "-c", "exit 3")
    status = support.wait_until(lambda: (s := api.call("GetExec", id=box["id"], op=op))["running"] is False and s, 10, "it ends")
    assert status["result"]["exit_code"] == 3 and status["on_disconnect"] == "keep"
    assert api.call("GetExec", id=box["id"], op="none", status=404)["error"]["reason"] == "exec.not_found"


@drives
def drive_attach_exec(api, box):
    op = api.started(box, "sh", "-c", "echo abc; echo def >&2; read x", stdin_open=True)
    attach = functools.partial(api.call, "AttachExec", id=box["id"], op=op)
    support.wait_until(lambda: attach(follow="false")[-1]["stderr_offset"] == 4, 10, "its output")
    now = attach(follow="false", stdout_offset=1, stderr_offset=4)
    assert [r["type"] for r in now] == ["started", "stdout", "more"] and now[1]["offset"] == 1
    api.call("WriteStdin", id=box["id"], op=op, offset=0, eof="true", body=b"go\n")
    assert attach()[-1]["type"] == "exit"


@drives
def drive_write_stdin(api, box):
    op = api.started(box, "cat", stdin_open=True)
    write = functools.partial(api.call, "WriteStdin", id=box["id"], op=op)
    assert write(offset=0, body=b"abc") == {"accepted": 3, "closed": False}
    assert write(offset=9, body=b"x", status=409)["error"]["reason"] == "exec.stdin_gap"
    assert write(offset=1, eof="true", body=b"bcd")["accepted"] == 4
    records = api.call("AttachExec", id=box["id"], op=op)
    output = b"".join(base64.b64decode(r["data_b64"]) for r in records if r["type"] == "stdout")
    assert output == b"abcd" and records[-1]["stdout"]["total"] == 4


@drives
def drive_signal_exec(api, box):
    op = api.started(box, "sleep", "60")
    api.call("SignalExec", id=box["id"], op=op, body={"signal": 18}, status=204)
    api.call("SignalExec", id=box["id"], op=op, body={"signal": "SIGTERM", "tree": True}, status=204)
    assert api.call("AttachExec", id=box["id"], op=op)[-1]["result"]["signal"] == 15


@drives
def drive_resize_exec(api, box):
    op = api.started(box, "sh", "-c", "read x; stty size", tty={"rows": 10, "cols": 10}, stdin_open=True)
    api.call("ResizeExec", id=box["id"], op=op, body={"rows": 33, "cols": 44}, status=204)
    api.call("WriteStdin", id=box["id"], op=op, offset=0, body=b"\n")
    records = api.call("AttachExec", id=box["id"], op=op)
    output = b"".join(base64.b64decode(r["data_b64"]) for r in records if r["type"] == "stdout")
    assert records[-1]["result"]["exit_code"] == 0 and b"33 44" in output


@drives
def drive_cancel_exec(api, box):
    op = api.started(box, "sleep", "60")
    api.call("CancelExec", id=box["id"], op=op, body={"grace_ms": 100}, status=204)
    result = api.call("AttachExec", id=box["id"], op=op)[-1]["result"]
    assert (result["kind"], result["killed_by"]) == ("killed", "cancel")


@drives
def drive_ack_exec(api, box):
    op = api.started(box, "true")
    api.call("AttachExec", id=box["id"], op=op)
    api.call("AckExec", id=box["id"], op=op, body={}, status=204)


@drives
def drive_list_sessions(api, box):
    api.call("Exec", id=box["id"], body={"script": "true", "session": "listed", "stream": False})
    found = {s["name"]: s for s in api.call("ListSessions", id=box["id"])["sessions"]}
    assert found["listed"]["execs"] == 1 and found["listed"]["busy"] is False


@drives
def drive_close_session(api, box):
    api.call("Exec", id=box["id"], body={"script": "true", "session": "closed:1", "stream": False})
    api.call("CloseSession", id=box["id"], name="closed:1", status=204)
    assert "closed:1" not in [s["name"] for s in api.call("ListSessions", id=box["id"])["sessions"]]


# --- files ---


def write(api, box, path, data=b"0123456789", **parameters):
    return api.call("WriteFile", id=box["id"], path=path, body=data, **parameters)


@drives
def drive_write_file(api, box):
    stat = write(api, box, "/tmp/w/a/file", mode="0640", user="1:2", parents="true")
    assert (stat["mode"], stat["uid"], stat["gid"], stat["size"]) == ("0640", 1, 2, 10)
    assert api.call("WriteFile", id=box["id"], path="/tmp/none/file", parents="false", body=b"", status=404)
    assert api.call("WriteFile", id=box["id"], path="/tmp/x", mode="755", body=b"", status=400)["error"]["field"] == "mode"


@drives
def drive_read_file(api, box):
    write(api, box, "/tmp/read")
    read = functools.partial(api.call, "ReadFile", id=box["id"], path="/tmp/read")
    assert read(max_bytes=10) == b"0123456789"
    for text, data in (("bytes=2-4", b"234"), ("bytes=8-", b"89"), ("bytes=-3", b"789")):
        assert read(Range=text, status=206) == data
    assert read(Range="bytes=10-", status=416)["error"]["reason"] == "file.range"
    assert read(Range="bytes=0-1,3-4", status=400)["error"]["field"] == "Range"
    assert read(max_bytes=9, status=413)["error"]["reason"] == "file.too_large"


@drives
def drive_remove_file(api, box):
    write(api, box, "/tmp/gone/file")
    api.call("RemoveFile", id=box["id"], path="/tmp/gone", status=409)
    api.call("RemoveFile", id=box["id"], path="/tmp/gone", recursive="true", status=204)
    assert "details" in api.call("RemoveFile", id=box["id"], path="/tmp/gone", status=404)["error"]


@drives
def drive_stat_file(api, box):
    api.call("Exec", id=box["id"], body={"script": "ln -sfn /tmp /tmp/link; mkfifo -m 600 /tmp/fifo; touch $'/tmp/\\xff'"})
    stat = functools.partial(api.call, "StatFile", id=box["id"])
    assert stat(path="/tmp/link")["type"] == "dir"
    assert stat(path="/tmp/link", follow="false")["target"] == "/tmp"
    assert [stat(path=p)["type"] for p in ("/tmp/fifo", "/dev/null")] == ["fifo", "char"]
    assert stat(path=b"/tmp/\xff")["name_b64"] == "/w=="


@drives
def drive_list_files(api, box):
    for name in ("a", "b", "c"):
        write(api, box, f"/tmp/list/{name}")
    page = api.call("ListFiles", id=box["id"], path="/tmp/list", page_size=2)
    assert [e["name"] for e in page["entries"]] == ["a", "b"]
    rest = api.call("ListFiles", id=box["id"], path="/tmp/list", after=page["next_after"])
    assert [e["name"] for e in rest["entries"]] == ["c"] and rest["next_after"] == ""


@drives
def drive_make_folder(api, box):
    make = functools.partial(api.call, "MakeFolder", id=box["id"])
    make(body={"path": "/tmp/made/in", "mode": "0700", "parents": True, "user": "3"}, status=204)
    make(body={"path_b64": "L3RtcC9tYWRlL2I2NA=="}, status=204)
    stat = api.call("StatFile", id=box["id"], path="/tmp/made/in")
    assert (stat["mode"], stat["uid"]) == ("0700", 3)
    assert api.call("StatFile", id=box["id"], path="/tmp/made/b64")["mode"] == "0755"


@drives
def drive_move_file(api, box):
    write(api, box, "/tmp/from"), write(api, box, "/tmp/to")
    move = functools.partial(api.call, "MoveFile", id=box["id"])
    move(body={"from": "/tmp/from", "to": "/tmp/to"}, status=409)
    move(body={"from": "/tmp/from", "to": "/tmp/to", "overwrite": True}, status=204)
    move(body={"from_b64": "L3RtcC90bw==", "to_b64": "L3RtcC90bzI="}, status=204)
    api.call("StatFile", id=box["id"], path="/tmp/to2")


@drives
def drive_change_mode(api, box):
    write(api, box, "/tmp/ch")
    api.call("ChangeMode", id=box["id"], body={"path": "/tmp/ch", "mode": "04711", "user": "5:6"}, status=204)
    stat = api.call("StatFile", id=box["id"], path="/tmp/ch")
    assert (stat["mode"], stat["uid"], stat["gid"]) == ("04711", 5, 6)
    api.call("ChangeMode", id=box["id"], body={"path_b64": "L3RtcC9jaA==", "mode": "0600"}, status=204)


@drives
def drive_watch_files(api, box):
    write(api, box, "/tmp/watch/below/first")
    with api.open("WatchFiles", id=box["id"], path="/tmp/watch", recursive="true") as response:
        assert response.status == 200 and response.headers["Content-Type"] == NDJSON
        write(api, box, "/tmp/watch/below/second")
        seen = set()
        while "/tmp/watch/below/second" not in seen:
            record = json.loads(response.readline())
            check(OPERATIONS["WatchFiles"]["responses"]["200"]["content"][NDJSON]["schema"], record, "WatchFiles")
            seen.add(record.get("path"))
    api._note("WatchFiles", {"id": 1, "path": 1, "recursive": 1})
    api.call("WatchFiles", id=box["id"], path="/nothing", status=404)


@drives
def drive_get_archive(api, box):
    write(api, box, "/tmp/tar/in/file")
    with tarfile.open(fileobj=io.BytesIO(api.call("GetArchive", id=box["id"], path="/tmp/tar"))) as tar:
        assert "in/file" in [name.removeprefix("./") for name in tar.getnames()]


@drives
def drive_put_archive(api, box):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo("put/file")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    api.call("MakeFolder", id=box["id"], body={"path": "/tmp/into"}, status=204)
    reply = api.call("PutArchive", id=box["id"], path="/tmp/into", user="7:8", body=data.getvalue())
    assert reply["entries"] == 1 and api.call("StatFile", id=box["id"], path="/tmp/into/put/file")["uid"] == 7
    api.call("PutArchive", id=box["id"], path="/tmp/into", body=b"not a tar file" * 100, status=400)


# --- FnCall ---

FN_TYPE = {"aliases": ["oa"], "description": "sh", "environment": {"base": BASE}, "source": "main.sh",
           "compile": {"argv": ["/bin/cp", "{source}", "made"], "env": {"A": "a"}, "limits": {"wall_ms": 20_000}, "artifacts": ["made"]},
           "run": {"argv": ["/bin/sh", "made", "{args}"], "env": {"A": "a"}, "limits": {"wall_ms": 20_000}},
           "pool": {"min": 0, "max": 4, "idle_ms": 60_000}}
FN_LIMITS = {"wall_ms": 20_000, "cpu_ms": 20_000, "memory_bytes": 64 * MIB, "processes": 32, "output_bytes": 4096,
             "file_bytes": MIB, "disk_bytes": 8 * MIB, "disk_inodes": 1024}


@pytest.fixture(scope="module", autouse=True)
def fn_type(api):
    source = api.node.folder / "openapi-fn"
    source.mkdir()
    (source / "given").write_text("x", encoding="ascii")
    made = api.node.cli("layer", "build", "--layers", api.node.layers, "--kind", "workspace", "--name", "openapi:fn", "--from-dir", source)
    assert made.returncode == 0, made.stderr
    api.call("PutFnType", name="openapi", body=FN_TYPE)


@drives
def drive_fn_call(api, _):
    artifact = api.call("PutArtifact", body=b"kept")["artifact"]
    files = [{"path": "a", "content": "text", "mode": "0600"}, {"path": "b", "content_b64": "/w=="}, {"path": "c", "artifact": artifact}]
    body = {"op_id": "openapi-fn", "type": "oa", "code": 'cat a b c; cat; printf "$1$E$F" >&2; cp b out; exit 3', "files": files,
            "stdin": "in", "args": ["arg"], "limits": FN_LIMITS, "compile_limits": FN_LIMITS, "fetch": ["out", "none"],
            "keep_artifacts": True, "compile_only": False, "gpu": {"count": 0}, "env": {"E": "e"},
            "env_b64": {"F": "gA=="}, "environment": {"base": BASE, "workspace": "openapi:fn", "toolkits": []}}
    result = api.call("FnCall", body=body)
    assert (result["verdict"], result["run"]["exit_code"], result["missing"]) == ("WRONG_EXIT", 3, ["none"])
    assert base64.b64decode(result["run"]["stdout"]["data_b64"]) == b"text\xffkeptin"
    assert base64.b64decode(result["run"]["stderr"]["data_b64"]) == b"arge\x80"
    assert api.call("GetArtifact", digest=result["files"][0]["artifact"]) == b"\xff"
    assert api.call("FnCall", body=body)["existed"] is True
    assert api.call("FnCall", body=dict(body, stdin="other"), status=409)["error"]["reason"] == "fn.op_id_reused"
    other = api.call("FnCall", body={"type": "openapi", "code_b64": "Y2F0", "stdin_b64": "gA=="})
    assert other["run"]["stdout"]["data_b64"] == "gA=="
    compiled = api.call("FnCall", body={"type": "openapi", "code": "true", "compile_only": True})
    assert compiled["files"][0]["path"] == "made" and "run" not in compiled
    assert api.call("FnCall", body={"type": "nothing"}, status=404)["error"]["reason"] == "fn.type_not_found"


@drives
def drive_fn_calls(api, _):
    calls = [{"type": "openapi", "code": f"echo {i}"} for i in range(5)] + [{"type": "nothing"}]
    records = api.call("FnCalls", body={"calls": calls, "concurrency": 2})
    assert records[-1] == {"type": "done", "ok": 5, "failed": 1}
    outputs = {r["index"]: r["result"]["run"]["stdout"]["data"] for r in records if r["type"] == "result"}
    assert outputs == {i: f"{i}\n" for i in range(5)}


@drives
def drive_get_fn_result(api, _):
    api.call("FnCall", body={"op_id": "openapi-result", "type": "openapi", "code": "true"})
    assert api.call("GetFnResult", op="openapi-result", wait_ms=20_000)["verdict"] == "OK"
    assert api.call("GetFnResult", op="openapi-nobody", status=404)["error"]["reason"] == "fn.op_not_found"


@drives
def drive_list_fn_types(api, _):
    assert {"openapi", "bash", "c"} <= {t["name"] for t in api.call("ListFnTypes")["types"]}


@drives
def drive_put_fn_type(api, _):
    warm = {"kind": "python", "argv": ["/usr/bin/python3"], "imports": ["json"]}
    body = dict(FN_TYPE, name="openapi.warm", aliases=[], warm=warm, environment={"base": BASE, "workspace": "openapi:fn", "toolkits": []},
                compile=dict(FN_TYPE["compile"], limits=FN_LIMITS), run=dict(FN_TYPE["run"], limits=FN_LIMITS))
    kept = api.call("PutFnType", name="openapi.warm", body=body)
    assert kept["warm"] == warm and kept["compile"]["artifacts"] == ["made"]
    assert api.call("PutFnType", name="openapi.bad", body={"source": "../x"}, status=400)["error"]["field"]


@drives
def drive_delete_fn_type(api, _):
    api.call("PutFnType", name="openapi.gone", body=dict(FN_TYPE, aliases=[]))
    api.call("DeleteFnType", name="openapi.gone", status=204)
    api.call("DeleteFnType", name="openapi.gone", status=404)


@drives
def drive_put_artifact(api, _):
    assert api.call("PutArtifact", body=b"bytes")["artifact"].startswith("sha256:")


@drives
def drive_get_artifact(api, _):
    data = bytes(range(256))
    assert api.call("GetArtifact", digest=api.call("PutArtifact", body=data)["artifact"]) == data
    assert api.call("GetArtifact", digest="sha256:" + "0" * 64, status=404)["error"]["reason"] == "artifact.not_found"


@drives
def drive_list_fn_pools(api, _):
    api.call("FnCall", body={"type": "openapi", "code": "true"})
    assert any(pool["calls"] >= 1 for pool in api.call("ListFnPools")["pools"])


@drives
def drive_run_code(api, _):
    body = {"language": "openapi", "code": 'cat in; printf "$1"; cat; cp in out', "compile_timeout": 20, "run_timeout": 20.5,
            "memory_limit_MB": 64, "stdin": "std", "files": {"in": "aW4=", "none": None}, "fetch_files": ["out"], "args": ["arg"]}
    result = api.call("RunCode", body=body)
    assert (result["status"], result["run_result"]["stdout"], result["files"]) == ("Success", "inargstd", {"out": "aW4="})
    late = api.call("RunCode", body={"language": "openapi", "code": "sleep 60", "run_timeout": 0.5})
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert api.call("RunCode", body={"language": "cobol", "code": ""}, status=422)["detail"][0]["loc"][0] == "body"


@drives
def drive_submit(api, _):
    tests = [{"input": {"stdin": str(i)}, "output": {"stdout": f"{i}{i}\n"}} for i in range(4)]
    config = {"language": "openapi", "dataset_type": "CommonOJDataset", "compile_timeout": 20, "run_timeout": 20, "memory_limit_MB": 64,
              "provided_data": {"test": tests}, "extra": {"run_all_cases": True}}
    body = {"dataset": "d", "id": 1, "completion": "Here:\n```openapi\nread x; echo $x$x\n```", "config": config}
    result = api.call("Submit", body=body)
    assert result["accepted"] and [t["passed"] for t in result["tests"]] == [True] * 4


@drives
def drive_ping(api, _):
    assert api.call("Ping") == "pong"


# --- IAM ---

PROJECT, RIGHTS = "root/openapi", ["sandbox.read", "sandbox.create"]
QUOTA = {"live": 10, "creating": 5, "cpu_millis": 10_000, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30, "starts_per_second": 100}


@pytest.fixture(scope="module", autouse=True)
def iam_objects(api):
    api.call("PutProject", project=PROJECT, body={})
    api.call("PutPrincipal", principal="openapi", body={"kind": "agent", "project": PROJECT})


def pages(api, name, key, **parameters):
    """A list taken page by page is the whole list."""
    every = api.call(name, page_size=1000, **parameters)[key]
    first = api.call(name, page_size=1, **parameters)
    rest = api.call(name, page_token=first["next_page_token"], page_size=1000, **parameters)[key] if first["next_page_token"] else []
    assert first[key] + rest == every
    return every


@drives
def drive_who_am_i(api, _):
    assert api.call("WhoAmI")["principal"] == "root"


@drives
def drive_list_projects(api, _):
    api.call("PutProject", project="root/openapi-list", body={})
    assert {"root", PROJECT} <= {p["project"] for p in pages(api, "ListProjects", "projects")}


@drives
def drive_get_project(api, _):
    assert api.call("GetProject", project=PROJECT)["used"]["live"] == 0


@drives
def drive_put_project(api, _):
    made = api.call("PutProject", project="root/openapi-put", body={"description": "d", "rights": RIGHTS, "limits": QUOTA})
    assert (made["rights"], made["limits"], made["effective_limits"]) == (RIGHTS[::-1], QUOTA, QUOTA)


@drives
def drive_delete_project(api, _):
    api.call("PutProject", project="root/openapi-gone", body={})
    api.call("DeleteProject", project="root/openapi-gone", status=204)
    api.call("DeleteProject", project="root/openapi-gone", status=404)


@drives
def drive_put_grant(api, _):
    put = functools.partial(api.call, "PutGrant", project=PROJECT, principal="openapi")
    assert put(body={"role": "viewer"})["role"] == "viewer"
    assert put(body={"rights": RIGHTS})["effective_rights"] == RIGHTS[::-1]


@drives
def drive_list_grants(api, _):
    api.call("PutPrincipal", principal="openapi.two", body={"kind": "person", "project": PROJECT})
    for principal in ("openapi", "openapi.two"):
        api.call("PutGrant", project=PROJECT, principal=principal, body={"role": "viewer"})
    assert [g["principal"] for g in pages(api, "ListGrants", "grants", project=PROJECT)] == ["openapi", "openapi.two"]


@drives
def drive_delete_grant(api, _):
    api.call("PutGrant", project=PROJECT, principal="openapi", body={"role": "viewer"})
    api.call("DeleteGrant", project=PROJECT, principal="openapi", status=204)
    api.call("DeleteGrant", project=PROJECT, principal="openapi", status=404)


@drives
def drive_list_principals(api, _):
    api.call("PutPrincipal", principal="openapi.list", body={"kind": "person", "project": PROJECT})
    assert {"openapi", "openapi.list"} <= {p["principal"] for p in pages(api, "ListPrincipals", "principals")}


@drives
def drive_get_principal(api, _):
    assert api.call("GetPrincipal", principal="openapi")["kind"] == "agent"


@drives
def drive_put_principal(api, _):
    body = {"kind": "service", "project": PROJECT, "description": "d", "disabled": True}
    made = api.call("PutPrincipal", principal="openapi.put", body=body)
    assert {key: made[key] for key in body} == body


@drives
def drive_delete_principal(api, _):
    api.call("PutPrincipal", principal="openapi.gone", body={"kind": "service", "project": PROJECT})
    api.call("DeletePrincipal", principal="openapi.gone", status=204)
    api.call("GetPrincipal", principal="openapi.gone", status=404)


@drives
def drive_make_key(api, _):
    body = {"description": "d", "project": PROJECT, "rights": RIGHTS, "expires_unix_ms": 1 << 42}
    made = api.call("MakeKey", principal="openapi", body=body, status=201)
    assert made["secret"].startswith("dsec_" + made["key"]["key_id"] + "_")
    assert {key: made["key"][key] for key in body} == dict(body, rights=RIGHTS[::-1])


@drives
def drive_list_keys(api, _):
    for _ in range(2):
        api.call("MakeKey", principal="openapi", body={}, status=201)
    assert len(pages(api, "ListKeys", "keys", principal="openapi")) >= 2


@drives
def drive_revoke_key(api, _):
    key = api.call("MakeKey", principal="openapi", body={}, status=201)["key"]["key_id"]
    for _ in range(2):
        api.call("RevokeKey", keyid=key, status=204)


@drives
def drive_list_roles(api, _):
    assert {"owner", "manager", "developer", "agent", "viewer", "operator"} <= {r["role"] for r in pages(api, "ListRoles", "roles")}


@drives
def drive_put_role(api, _):
    assert api.call("PutRole", role="openapi", body={"rights": RIGHTS, "description": "d"})["built_in"] is False
    assert api.call("PutRole", role="owner", body={"rights": []}, status=409)["error"]["reason"] == "iam.role_built_in"


@drives
def drive_delete_role(api, _):
    api.call("PutRole", role="openapi.gone", body={"rights": []})
    api.call("DeleteRole", role="openapi.gone", status=204)


@drives
def drive_list_audit(api, _):
    api.call("PutRole", role="openapi.audit", body={"rights": []})
    page = api.call("ListAudit", principal="root", key_id="root", project="root", page_size=1)
    assert (page["records"][0]["action"], page["records"][0]["outcome"]) == ("PUT /v1/iam/roles/{role}", "ok")
    older = api.call("ListAudit", page_token=page["next_page_token"])["records"]
    assert older[0]["outcome"] == "begun" and older[0]["seq"] < page["records"][0]["seq"]


# --- the tests ---


@pytest.mark.parametrize("name", OPERATIONS)
def test_route_is_as_described(api, box, name):
    assert name in DRIVERS, f"nothing drives {name}"
    DRIVERS[name](api, box)
    described = {p["name"] for p in OPERATIONS[name]["parameters"]}
    schema = OPERATIONS[name].get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    described |= fields_of(schema) if schema else set()
    described -= {"workspace", "sandbox.workspace"}  # the driver of DeleteLayer has one
    described -= {"gpu.kind", "gpu.shared"}  # only with a count, and there is no GPU
    missing = described - api.seen[name]
    assert not missing, f"never sent with success: {sorted(missing)}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_route_refuses_what_is_not_described(api, box, name):
    values = {p["name"]: "1" for p in OPERATIONS[name]["parameters"] if p.get("required")}
    if "id" in values:
        values["id"] = box["id"]
    if name != "Health":
        assert api.call(name, key=False, status=401, **values)["error"]["reason"] == "auth.missing"
    error = api.call(name, status=400, unknown="1", **values)["error"]
    assert (error["reason"], error["field"]) == ("request.unknown_field", "unknown")
