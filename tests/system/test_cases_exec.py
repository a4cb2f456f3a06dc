# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: exec, sessions, timeouts."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from libdsec import Exited, Killed, Signaled, SpawnError, Timeout, errors
from support import DSEC, ROOT, args, pause, sandbox, wait_until


@pytest.mark.parametrize("tty", [False, True])
def test_case_001_background_child_keeps_stdout_open(shared, tty):
    started = time.monotonic()
    if tty:
        process = shared.pty(["sh", "-c", "sleep 300 & echo ok"])
        result = process.wait()
    else:
        result = shared.run_shell("sleep 300 & echo ok", timeout=10)
    assert result.end == Exited(0) and result.stdout.strip() == b"ok"
    assert time.monotonic() - started < 2


def test_case_001_late_output_is_not_mixed_into_another_exec(shared):
    assert shared.run_shell("(sleep 1.5; echo late) & echo ok").stdout == b"ok\n"
    assert shared.run_shell("sleep 2; echo next").stdout == b"next\n"


def test_case_002_daemonised_server_outlives_its_exec(client):
    with sandbox(client) as box:
        started = time.monotonic()
        result = box.run_shell(
            'setsid nohup sh -c "while :; do date >> /tmp/beat; sleep 0.2; done" >/dev/null 2>&1 &', timeout=1)
        assert result.ok and time.monotonic() - started < 1
        pause(3)
        first = box.files.stat("/tmp/beat").size
        wait_until(lambda: box.files.stat("/tmp/beat").size > first, 3, "the beat goes on past 3 x the timeout")
        detached = box.start(["sleep", "30"])
        assert detached.status()["running"]


def test_case_003_timeout_kills_the_whole_tree_and_nothing_else(shared):
    other = shared.start(["sleep", "600"])
    started = time.monotonic()
    result = shared.run_shell(
        "setsid sh -c 'trap : TERM; while :; do echo x >> /tmp/g; sleep 0.2; done' & (nohup sleep 999 &) ; while :; do :; done",
        timeout=2)
    assert result.end == Timeout(2000)
    assert 2.0 <= time.monotonic() - started < 5
    size = shared.files.stat("/tmp/g").size
    pause(1)
    assert shared.files.stat("/tmp/g").size == size
    assert b"sleep 999" not in shared.run_shell("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done").stdout
    assert other.status()["running"]
    other.cancel()


def test_case_004_timeout_is_prompt_and_nothing_happens_afterwards(shared):
    started = time.monotonic()
    assert shared.run_shell("sleep 4; touch /tmp/late", timeout=1).end == Timeout(1000)
    assert time.monotonic() - started < 1.5
    process = shared.start(script="sleep 4; touch /tmp/late")
    started = time.monotonic()
    process.cancel()
    assert process.wait().end == Killed("cancel")
    assert time.monotonic() - started < 1
    pause(4)
    assert not shared.files.exists("/tmp/late")


CLIENT = """
import sys
sys.path.insert(0, {sdk!r})
from libdsec.sync import DSecClient
box = DSecClient({url!r}, {key!r}).open().get({box!r})
print("go", flush=True)
box.run_shell("echo up > /tmp/up-{mark}; sleep {seconds}; touch /tmp/a-{mark}", on_disconnect={rule!r}, op_id="case5-{mark}")
"""


def test_case_005_client_dies_while_attached(node, shared):
    detached = shared.start(script="sleep 4; touch /tmp/b")
    # The disconnect grace is 5 s: the one would outlive the test, the other outlives the grace.
    for mark, rule, seconds in (("kill", "kill", 60), ("keep", "keep", 7)):
        code = CLIENT.format(sdk=str(ROOT / "sdk" / "python"), url=node.url, key=node.key, box=shared.id, mark=mark, rule=rule,
                             seconds=seconds)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        wait_until(lambda: shared.files.exists(f"/tmp/up-{mark}"), 10, "the attached command runs")
        child.kill()
        child.wait()
        child.stdout.close()
    wait_until(lambda: not shared.attach("case5-kill").status()["running"], 10, "the attached exec is killed")
    assert shared.attach("case5-kill").wait().end == Killed("disconnect")
    assert shared.attach("case5-keep").wait().end == Exited(0)
    assert detached.wait().end == Exited(0)
    assert not shared.files.exists("/tmp/a-kill") and shared.files.exists("/tmp/a-keep") and shared.files.exists("/tmp/b")


@pytest.mark.vm
def test_case_006_partial_output_survives_a_timeout(shared):
    result = shared.run_shell("for i in 1 2 3; do echo $i; echo e$i >&2; done; sleep 60", timeout=1)
    assert result.end == Timeout(1000)
    assert result.stdout == b"1\n2\n3\n" and result.stderr == b"e1\ne2\ne3\n"


@pytest.mark.vm
def test_case_007_commands_that_read_stdin_see_eof(node, shared):
    started = time.monotonic()
    assert shared.run_shell("cat; echo done").stdout == b"done\n"
    assert time.monotonic() - started < 1
    reader, writer = os.pipe()  # an open pipe that nobody writes to
    try:
        env = dict(os.environ, DSEC_URL=node.url, DSEC_API_KEY=node.key)
        done = subprocess.run([DSEC, "exec", shared.id, "--", "echo", "hi"], stdin=reader, env=env, capture_output=True,
                              timeout=10)
        assert done.returncode == 0 and done.stdout == b"hi\n"
        started = time.monotonic()
        done = subprocess.run([DSEC, "exec", "--timeout", "3", shared.id, "--", "sleep", "60"], stdin=reader, env=env,
                              capture_output=True, timeout=20)
        assert done.returncode != 0 and 2.5 < time.monotonic() - started < 8
    finally:
        os.close(reader)
        os.close(writer)


def test_case_008_large_and_half_closed_stdin(shared):
    data = os.urandom(64 << 20)
    process = shared.start(["sha256sum"], stdin_open=True)
    process.write(data)
    process.close_stdin()
    assert process.wait().stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    process = shared.start(["true"], stdin_open=True)
    try:
        process.write(data)
    except errors.ConflictError as error:
        assert error.reason.startswith("exec.")
    assert process.wait().end == Exited(0)
    process = shared.start(["cat"], stdin_open=True)
    process.write(b"a\n")
    process.close_stdin()
    result = process.wait()
    assert result.end == Exited(0) and result.stdout == b"a\n"


AWKWARD = (
    "cat <<'EOF'\n$HOME `x` \"q\" 'r' \\ \\\\\nEOF\n"
    "printf '%s' \"a'b\\\"c\\$d\\`e\" ; echo\r\n"
    ": " + "x" * 20480 + "\n"
    "printf '%s\\n' \"it's \\\"quoted\\\"\"\n"
    "echo end # trailing comment without newline"
)


@pytest.mark.vm
def test_case_009_awkward_script_text_arrives_exact(shared):
    direct = shared.run_shell(AWKWARD)
    in_session = shared.session("awkward").run(AWKWARD)
    expected = subprocess.run(["bash"], input=AWKWARD.encode(), capture_output=True).stdout
    assert direct.ok and direct.stdout == expected
    assert in_session.ok and in_session.stdout == expected
    shared.session("awkward").close()


@pytest.mark.parametrize("script", ["cat <<EOF\nabc", "'", "if true; then", "(", "echo $((", 'echo "', "}"])
@pytest.mark.vm
def test_case_010_malformed_script_does_not_wedge_a_session(shared, script):
    session = shared.session("wedge")
    session.run("cd /tmp; export KEEP=1")
    started = time.monotonic()
    session.run(script, timeout=20)
    assert time.monotonic() - started < 5
    assert session.run("echo alive; pwd; echo $KEEP").stdout == b"alive\n/tmp\n1\n"


@pytest.mark.vm
def test_case_012_timeout_inside_a_session_keeps_the_session(shared):
    session = shared.session("keeps")
    session.run("cd /tmp; export A=1; f(){ echo f; }")
    assert session.run("sleep 100", timeout=1).end == Timeout(1000)
    assert session.run("pwd; echo $A; f").stdout == b"/tmp\n1\nf\n"
    session.close()


HOSTILE_SETTINGS = [
    "PS1='$(exit 7)'; PS2='> '; PROMPT_COMMAND='exit 3'",
    "stty -echo 2>/dev/null",
    "printf() { command echo spoofed; }; echo() { :; }; exit() { :; }",
    "alias printf=false; alias echo=false; shopt -s expand_aliases",
    "trap 'true' DEBUG",
    "set -u",
    "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-",
    "IFS=x; PATH=/usr/bin:/bin",
]


@pytest.mark.parametrize("setting", HOSTILE_SETTINGS)
@pytest.mark.vm
def test_case_013_completion_and_exit_code_are_out_of_band(shared, setting):
    session = shared.session("hostile")
    session.run(setting)
    assert session.run("sh -c 'command exit 5'", timeout=10).end == Exited(5)
    assert session.run("command cat /etc/hostname >/dev/null; false", timeout=10).end == Exited(1)
    data = session.run("head -c 1048576 /dev/urandom", timeout=10)
    assert data.end == Exited(0) and data.stdout_total == 1048576
    session.close()


@pytest.mark.vm
def test_case_013_debug_trap_that_exits_is_told_apart(shared):
    session = shared.session("trap")
    session.run("trap 'exit 9' DEBUG", timeout=5)
    result = session.run("echo x", timeout=5)
    assert result.end == Exited(9)
    assert session.run("echo again", timeout=5).stdout == b"again\n"
    session.close()


@pytest.mark.parametrize(
    "script,end",
    [("true", Exited(0)), ("exit 255", Exited(255)), ("exit 137", Exited(137)), ("kill -9 $$", Signaled(9)),
     ("kill -SEGV $$", Signaled(11))],
)
@pytest.mark.vm
def test_case_014_ends_are_not_ambiguous(shared, script, end):
    assert shared.run_shell(script).end == end


@pytest.mark.vm
def test_case_014_spawn_errors_are_typed(shared):
    shared.files.write("/tmp/plain", "x", mode=0o644)
    shared.files.write("/tmp/badinterp", "#!/no/such/interpreter\n", mode=0o755)
    for argv, number in ((["/no/such"], errno.ENOENT), (["no-such-program"], errno.ENOENT), (["/tmp"], errno.EACCES),
                         (["/tmp/plain"], errno.EACCES), (["/tmp/badinterp"], errno.ENOENT)):
        end = shared.exec(argv).end
        assert isinstance(end, SpawnError) and end.errno == number, (argv, end)


@pytest.mark.vm
def test_case_014_unknown_sandbox_is_not_found(client):
    with pytest.raises(errors.NotFoundError):
        client.get("sb-nowhere-01h00000000000000000000000")


@pytest.mark.vm
def test_case_014_false_is_never_zero(shared):
    script = "n=0; for i in $(seq 300); do false && n=$((n+1)); done; exit $n"
    assert shared.run_shell(script).end == Exited(0)
    assert all(shared.exec(["false"]).end == Exited(1) for _ in range(200))


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.vm
def test_case_015_bad_working_folder(shared, tty):
    shared.files.write("/tmp/afile", "x")
    shared.files.mkdir("/tmp/secret", mode=0o700)
    options = {"tty": (24, 80)} if tty else {}
    for cwd, user in (("/no/such", None), ("/tmp/afile", None), ("/tmp/secret", "1000")):
        end = shared.start(["echo", "hi"], cwd=cwd, user=user, **options).wait().end
        assert isinstance(end, SpawnError) and end.step == "cwd", (cwd, end)
    shared.files.mkdir("/tmp/only-inside")
    result = shared.start(["pwd"], cwd="/tmp/only-inside", **options).wait()
    assert result.end == Exited(0) and result.stdout.strip() == b"/tmp/only-inside"


@pytest.mark.vm
def test_case_016_very_large_script_argument_and_environment(shared):
    script = "echo start\n" + "#" + "x" * (1 << 20) + "\necho end\n"
    assert shared.run_shell(script).stdout == b"start\nend\n"
    result = shared.exec(["sh", "-c", 'echo ${#1}', "sh", "x" * 131071])
    assert result.stdout == b"131071\n"
    for argv, env in ((["echo", "x" * 131072], None), (["echo", "x" * MIB], None), (["true"], {"A": "x" * MIB}),
                      (["echo"] + ["x" * 100000] * 31, None)):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            shared.exec(argv, env=env)
        assert caught.value.reason == "exec.too_long", caught.value


MIB = 1 << 20


@pytest.mark.vm
def test_case_017_environment_values_are_exact(shared):
    env = {"NEWLINE": "a\nb", "EQUALS": "a=b", "EMPTY": "", "BYTES": b"\xff\xfe"}
    env.update({f"V{i}": str(i) for i in range(3000)})
    got = dict(item.split(b"=", 1) for item in shared.exec(["env", "-0"], env=env, output_bytes=MIB).stdout.split(b"\0") if item)
    for key, value in env.items():
        assert got[key.encode()] == (value if isinstance(value, bytes) else value.encode())


@pytest.mark.parametrize("key", ["", "A=B", "A\nB", "A\0B"])
@pytest.mark.vm
def test_case_017_bad_keys_are_refused(shared, key):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        shared.exec(["true"], env={key: "x"})
    assert "env" in caught.value.field


@pytest.mark.vm
def test_case_017_shell_text_in_a_key_is_only_a_key(shared):
    shared.exec(["true"], env={"A; touch /PWNED #": "x"})
    assert not shared.files.exists("/PWNED") and not os.path.exists("/PWNED")


def test_case_018_secrets_do_not_leak(node, shared):
    process = shared.start(script="read x; sleep 1; : canary3-dsec", env={"SECRET": "canary1-dsec"}, stdin_open=True)
    process.write("canary2-dsec\n")
    listing = b""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            listing += pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
    inside = shared.run_shell("cat /proc/*/cmdline", user="1000").stdout
    process.close_stdin()
    process.wait()
    log = node.log.read_bytes()
    for canary in (b"canary1-dsec", b"canary2-dsec", b"canary3-dsec"):
        assert canary not in listing and canary not in log and canary not in inside, canary


def test_case_019_many_execs_at_once(shared):
    def one(number):
        result = shared.run_shell(f"echo {number}; exit $(({number}%256))")
        return result.stdout == f"{number}\n".encode() and result.end == Exited(number % 256)

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert all(pool.map(one, range(200)))
        started = time.monotonic()
        assert all(r.ok for r in pool.map(lambda _: shared.exec(["sleep", "2"]), range(64)))
        assert time.monotonic() - started < 6


def test_case_020_silent_long_command_counts_as_activity_and_keeps_the_connection(client):
    with sandbox(client, ttl_running_stop=4) as box:
        result = box.run_shell("sleep 8; echo done")
        assert result.end == Exited(0) and result.stdout == b"done\n"


def test_case_020_keepalives_flow(node, shared):
    import http.client
    import json

    connection = http.client.HTTPConnection(node.url.split("//")[1], timeout=9)
    connection.request("POST", f"/v1/sandboxes/{shared.id}/exec", body=json.dumps({"argv": ["sleep", "8"]}),
                       headers={"Authorization": f"Bearer {node.key}", "Content-Type": "application/json"})
    kinds = []
    response = connection.getresponse()
    while True:
        line = response.readline()
        if not line:
            break
        kinds.append(json.loads(line)["type"])
    connection.close()
    assert "keepalive" in kinds and kinds[-1] == "exit"


def test_case_022_graceful_stop_with_bounded_escalation(client):
    box = client.run_container(args())
    box.start(script="trap '' TERM; sh -c 'trap \"\" TERM; sleep 1000' & wait; sleep 1000")
    wait_until(lambda: b"sleep" in box.run_shell("cat /proc/*/comm").stdout, 5, "both run")
    started = time.monotonic()
    box.stop(grace=3)
    assert 2.5 < time.monotonic() - started < 6


def test_case_022_stop_during_an_exec_ends_it_typed(client):
    box = client.run_container(args())
    results = []
    runner = threading.Thread(target=lambda: results.append(box.run_shell("echo up > /tmp/up; sleep 100")))
    runner.start()
    wait_until(lambda: box.files.exists("/tmp/up"), 5, "the command runs")
    box.stop()
    runner.join(10)
    assert results and results[0].end.__class__.__name__ in ("SandboxEnded", "Killed"), results


def test_case_023_error_says_which_limit_fired(client):
    with sandbox(client, ttl=5) as box:
        assert box.run_shell("sleep 60", timeout=1).end == Timeout(1000)
        end = box.run_shell("sleep 60").end
        assert end.__class__.__name__ == "SandboxEnded" and end.cause == "ttl"
        with pytest.raises(errors.SandboxEndedError) as caught:
            box.run_shell("true")
        assert caught.value.termination["cause"] == "ttl" and caught.value.termination["limit"] == 5000


def test_case_025_first_command_right_after_ready(client):
    for _ in range(60):
        with sandbox(client) as box:
            assert box.run_shell("echo hi", timeout=2).stdout == b"hi\n"
            box.files.write("/tmp/x", b"1")
