# SPDX-License-Identifier: Apache-2.0
"""FnCall through its doors on a real node: SDK, command line, SandboxFusion's clients, artefacts from step to step."""

import asyncio
import base64
import json
import urllib.error
import urllib.request

import pytest

import libdsec
import support
from libdsec import DSecFnCallArgs, FnFile, FnLimits, FnVerdict, errors, function

pytestmark = pytest.mark.usefixtures("languages")

C = "#include <stdio.h>\nint main(int argc, char** argv) {\n  printf(\"%d\\n\", argc);\n  return 0;\n}\n"


def test_compile_here_run_there(client):
    made = client.call(DSecFnCallArgs(type="c", code=C, compile_only=True, keep_artifacts=True)).check()
    program = made.files["main"]
    assert program.artifact.startswith("sha256:") and made.run is None
    ran = client.call(DSecFnCallArgs(type="bash", code="./prog a b", files=[FnFile("prog", artifact=program.artifact, mode=0o755)]))
    assert ran.check().text == "3\n"
    assert client.get_artifact(program.artifact)[:4] == b"\x7fELF"
    data = b"\0bytes\xff"
    digest = client.put_artifact(data)
    assert client.get_artifact(digest) == data


def test_compile_is_cached_by_content(client):
    code = C.replace("argc);", "argc + 40);")
    first, second = (client.call(DSecFnCallArgs(type="c", code=code)).check() for _ in range(2))
    assert not first.compile.cached and second.compile.cached and first.text == second.text == "41\n"
    other = client.call(DSecFnCallArgs(type="c", code=code + "\n")).check()
    assert not other.compile.cached


def test_op_id_runs_once(client):
    args = DSecFnCallArgs(type="bash", code="cat /proc/sys/kernel/random/uuid", op_id="once")
    first, again = client.call(args), client.call(args)
    assert first.text == again.text and again.existed and not first.existed
    assert client.fn_result("once").text == first.text
    with pytest.raises(errors.ConflictError):
        client.call(DSecFnCallArgs(type="bash", code="true", op_id="once"))
    with pytest.raises(errors.NotFoundError):
        client.fn_result("never")


def test_types_are_data(client):
    client.put_fn_type("shout", {"environment": {"base": support.LANGUAGES}, "source": "text",
                                 "run": {"argv": ["/usr/bin/tr", "a-z", "A-Z"]}})
    assert client.call(DSecFnCallArgs(type="shout", stdin="quiet")).check().text == "QUIET"
    assert "shout" in {t["name"] for t in client.fn_types()} and client.fn_pools()
    client.delete_fn_type("shout")
    with pytest.raises(errors.NotFoundError):
        client.call(DSecFnCallArgs(type="shout"))


def test_functions(client):
    @client.function(limits=FnLimits(wall=20))
    def score(code, cases):
        scope = {}
        exec(code, scope)
        return sum(scope["f"](given) == wanted for given, wanted in cases) / len(cases)

    assert score("def f(x): return x * 2", [[1, 2], [2, 4], [3, 7]]) == pytest.approx(2 / 3)
    with pytest.raises(ZeroDivisionError):
        score("def f(x): return x", [])
    with pytest.raises(SyntaxError):
        score("def f(", [[1, 1]])
    values = dict(score.map([["def f(x): return x", [[i, i]]] for i in range(20)] + [["def f(", [[1, 1]]]]))
    assert [values[i] for i in range(20)] == [1.0] * 20 and isinstance(values[20], SyntaxError)

    @client.function(limits=FnLimits(wall=1))
    def hang():
        while True:
            pass

    with pytest.raises(errors.CallError) as caught:
        hang()
    assert caught.value.result.verdict is FnVerdict.TIME_LIMIT


def test_asynchronous_twin(node):
    @function
    def double(x):
        return x * 2

    async def main():
        async with libdsec.DSecClient(node.url, node.key) as client:
            calls = [double.call_args(i) for i in range(50)]
            return {index: double.value(result) async for index, result in client.call_many(calls, concurrency=16, batch=20)}

    assert asyncio.run(main()) == {i: 2 * i for i in range(50)}


def test_command_line(node, tmp_path):
    source = tmp_path / "a.c"
    source.write_text(C.replace("return 0", "return 7"))
    done = node.cli("fn", "run", str(source), "--", "x", "--y")
    assert (done.returncode, done.stdout) == (7, b"3\n") and b"WRONG_EXIT exit 7" in done.stderr
    (tmp_path / "b.py").write_text("import sys\nprint(sys.stdin.read()[::-1], end='')\n")
    (tmp_path / "in").write_bytes(b"abc")
    done = node.cli("fn", "run", str(tmp_path / "b.py"), "--stdin", str(tmp_path / "in"), "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"cba", b"")
    done = node.cli("fn", "run", "-", "--type", "bash", "-l", "wall=500ms", input=b"sleep 60")
    assert done.returncode == 124 and b"TIME_LIMIT (wall)" in done.stderr
    (tmp_path / "bad.cpp").write_text("int main() { return x; }")
    done = node.cli("fn", "run", str(tmp_path / "bad.cpp"))
    assert done.returncode == 126 and b"COMPILE_ERROR" in done.stderr and b"was not declared" in done.stderr
    done = node.cli("fn", "run", "-", "--type", "bash", "--json", input=b"kill -SEGV $$")
    assert done.returncode == 139 and json.loads(done.stdout)["verdict"] == "SIGNALED"
    assert b"python3" in node.cli("fn", "types").stdout and b"sha256:" in node.cli("fn", "pools").stdout
    assert node.cli("fn", "run", str(source), "--type", "no-such").returncode == 125


def fusion(node, path, body, user="key"):
    """As a client that was given http://key:KEY@host/run_code."""
    request = urllib.request.Request(node.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    pair = f"{user}:{node.key}".encode()
    request.add_header("Authorization", "Basic " + base64.b64encode(pair).decode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("language, code", [
    ("python", "print(input())"), ("cpp", "#include <iostream>\nint main() { std::string s; std::cin >> s; std::cout << s << std::endl; }"),
    ("nodejs", "console.log(require('fs').readFileSync(0, 'utf8').trim());"), ("bash", "cat; echo"),
    ("go", 'package main\n\nimport "fmt"\n\nfunc main() {\n\tvar s string\n\tfmt.Scan(&s)\n\tfmt.Println(s)\n}\n'),
    ("java", "import java.util.Scanner;\npublic class Main { public static void main(String[] a) { System.out.println(new Scanner(System.in).next()); } }"),
])
def test_run_code_of_each_language(node, language, code):
    body = {"code": code, "language": language, "stdin": "word", "compile_timeout": 30, "run_timeout": 30, "memory_limit_MB": 1024,
            "files": {}, "fetch_files": []}
    status, reply = fusion(node, "/run_code", body)
    assert (status, reply["status"], reply["run_result"]["status"], reply["run_result"]["return_code"]) == (200, "Success", "Finished", 0)
    assert reply["run_result"]["stdout"] == "word\n"
    assert (reply["compile_result"] is None) == (language in ("python", "nodejs", "bash"))


def test_run_code_tells_failures_apart(node):
    def run(code, language="python", **more):
        return fusion(node, "/run_code", {"code": code, "language": language, **more})[1]

    assert run("raise SystemExit(3)")["run_result"]["return_code"] == 3
    late = run("while True: pass", run_timeout=0.7)
    assert late["status"] == "Failed" and late["run_result"]["status"] == "TimeLimitExceeded"
    memory = run("x = b'x' * (1 << 30)\nx += x\n", memory_limit_MB=64)
    assert memory["status"] == "Failed" and memory["run_result"]["return_code"] == -9
    broken = run("int main() { return x; }", "cpp")
    assert broken["status"] == "Failed" and broken["compile_result"]["return_code"] == 1 and broken["run_result"] is None
    assert fusion(node, "/run_code", {"code": "", "language": "cobol"})[0] == 422


def test_submit_judges_a_completion(node):
    completion = "It doubles.\n```python\nprint(2 * int(input()))\n```\n"
    tests = [{"input": {"stdin": str(i)}, "output": {"stdout": str(2 * i)}} for i in range(6)]
    config = {"language": "python", "dataset_type": "CommonOJDataset", "provided_data": {"id": 1, "content": "", "test": tests}}
    status, reply = fusion(node, "/submit", {"dataset": "x", "id": 1, "completion": completion, "config": config})
    assert status == 200 and reply["accepted"] and len(reply["tests"]) == 6
    tests[2]["output"]["stdout"] = "5"
    status, reply = fusion(node, "/submit", {"dataset": "x", "id": 1, "completion": completion, "config": config})
    assert status == 200 and not reply["accepted"]
