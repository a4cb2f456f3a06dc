#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks and writes build/bench/figures.jsonl, one figure a line:
{"name", "value", "unit", "baseline", "ratio", "detail"}.

Every figure stands beside a baseline that was measured in the same run, because the machine may be shared. Values are
medians. `--only name,...` runs some; `--live N` sets the size of the large population (3,200), `--soak N` the number of calls
of the soak (100,000); `--images`, `--tasks` and `--runs` are the scale of the bursts (64, 256, 1). The bursts download 1.5 GB and
keep some 16 GB below build/bench, so they run only when they are named.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python")]

import burst  # noqa: E402


def percentile(values, share):
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Figures:
    """Collects figures, prints them and writes them as JSON lines."""

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="ascii")

    def add(self, name, value, unit, baseline=None, ratio=None, **detail):
        if ratio is None and baseline:
            ratio = value / baseline
        record = {
            "name": name,
            "value": round(value, 4),
            "unit": unit,
            "baseline": None if baseline is None else round(baseline, 4),
            "ratio": None if ratio is None else round(ratio, 4),
            "detail": detail,
        }
        line = json.dumps(record)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def floor_ms(build, runs=300, concurrency=1):
    """Median milliseconds of the raw kernel floor (see bench/floor)."""
    output = subprocess.check_output([build / "bin" / "dsec-floor", "--runs", str(runs), "--concurrency", str(concurrency)])
    return json.loads(output.decode().splitlines()[-1])


def spawn_ms(program, runs=200):
    """Median milliseconds of fork + exec + wait of a program."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        os.waitpid(os.posix_spawn(program, [program], {}), 0)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def runc_ms(runs=20):
    """Median milliseconds of `runc run` of a static program in a bundle without network set-up."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-runc-"))
    try:
        source = folder / "true.c"
        source.write_text("int main(void) { return 0; }\n", encoding="ascii")
        (folder / "rootfs").mkdir()
        subprocess.run(["clang-19", "-static", "-O1", "-o", folder / "rootfs" / "true", source], check=True)
        subprocess.run(["runc", "spec"], cwd=folder, check=True)
        spec = json.loads((folder / "config.json").read_text())
        spec["process"]["args"] = ["/true"]
        spec["process"]["terminal"] = False
        (folder / "config.json").write_text(json.dumps(spec))
        times = []
        for number in range(runs):
            started = time.perf_counter()
            subprocess.run(["runc", "run", "--bundle", folder, f"dsec-bench-{os.getpid()}-{number}"], check=True,
                           stdin=subprocess.DEVNULL)
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    finally:
        shutil.rmtree(folder)


def bwrap_ms(runs=50):
    """Median milliseconds of bwrap with all namespaces around /bin/true."""
    command = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--proc", "/proc", "--dev", "/dev", "/bin/true"]
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def mem_available_mib():
    """MemAvailable of the host in MiB."""
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no MemAvailable")


async def make_many(client, args, count):
    """Makes sandboxes in batches; raises on the first failure."""
    boxes = []
    while len(boxes) < count:
        async for item in client.run_many(args, min(400, count - len(boxes)), timeout=300):
            if isinstance(item, Exception):
                raise item
            boxes.append(item)
    return boxes


async def end_all(client, labels):
    async for record in client.delete_by_label(labels):
        if record["type"] == "error":
            raise RuntimeError(record)


async def create_times(client, args, runs, gap=0.02):
    """Milliseconds inside the edge of `runs` creations, one at a time; returns (totals, {phase: values})."""
    totals, phases = [], {}
    for _ in range(runs):
        box = await client.run_container(args)
        times = {p["phase"]: p["micros"] / 1e3 for p in box.info["phases"]}
        totals.append(sum(times.values()))
        for name, value in times.items():
            phases.setdefault(name, []).append(value)
        await box.stop()
        await asyncio.sleep(gap)
    return totals, phases


def sync_exec_times(node, box_id, runs):
    """Milliseconds of `runs` commands, one at a time, through the synchronous SDK."""
    times = []
    with node.client() as client:
        box = client.get(box_id)
        for _ in range(runs):
            started = time.perf_counter()
            box.exec(["/bin/true"])
            times.append((time.perf_counter() - started) * 1e3)
    return times


def sync_first_command_times(node, args, runs):
    """Milliseconds of create + first command, one at a time, through the synchronous SDK."""
    times = []
    with node.client() as client:
        for _ in range(runs):
            started = time.perf_counter()
            box = client.run_container(args)
            box.exec(["/bin/true"])
            times.append((time.perf_counter() - started) * 1e3)
            box.stop()
            time.sleep(0.02)
    return times


def phase_medians(phases):
    return {name: round(statistics.median(values), 3) for name, values in phases.items()}


async def bench_create(figures, build, node, client, args, wanted):
    from support import args as make_args

    await create_times(client, args, 20)
    if "create_ready" in wanted:
        floor = floor_ms(build)
        totals, phases = await create_times(client, args, 150)
        figures.add("create_ready", statistics.median(totals), "ms", floor["median_ms"],
                    p99_ms=percentile(totals, 0.99), phases_ms=phase_medians(phases))
    if "create_first_command" in wanted:
        times = sync_first_command_times(node, args, 200)
        figures.add("create_first_command", statistics.median(times), "ms", runc_ms(), p99_ms=percentile(times, 0.99),
                    bwrap_ms=bwrap_ms())
    if "exec_round_trip" in wanted:
        box = await client.run_container(args)
        asynchronous = []
        for _ in range(1000):
            started = time.perf_counter()
            await box.exec(["/bin/true"])
            asynchronous.append((time.perf_counter() - started) * 1e3)
        times = sync_exec_times(node, box.id, 1000)
        await box.stop()
        figures.add("exec_round_trip", statistics.median(times), "ms", spawn_ms("/bin/true"), p50_ms=statistics.median(times),
                    p99_ms=percentile(times, 0.99), async_p50_ms=statistics.median(asynchronous),
                    async_p99_ms=percentile(asynchronous, 0.99))
    if "create_rate" in wanted:
        floor = floor_ms(build, runs=600, concurrency=2)
        small = make_args(memory_limit_mb=128, labels={"bench": "rate"})
        rates = []
        for _ in range(3):
            started = time.perf_counter()
            await make_many(client, small, 320)
            rates.append(320 / (time.perf_counter() - started))
            await end_all(client, {"bench": "rate"})
        figures.add("create_rate", statistics.median(rates), "1/s", floor["per_second"], all_rates=rates)


async def bench_live(figures, node, client, args, wanted, live):
    from support import args as make_args

    small = make_args(memory_limit_mb=128, labels={"bench": "live"})
    totals_100 = totals_3000 = None
    await make_many(client, small, 100)
    if "create_growth" in wanted:
        totals_100, phases_100 = await create_times(client, args, 100)
    await asyncio.sleep(1)
    before = mem_available_mib()
    boxes = await make_many(client, small, live - 100)
    await asyncio.sleep(2)
    after = mem_available_mib()
    if "create_growth" in wanted:
        totals_3000, phases_3000 = await create_times(client, args, 100)
        figures.add("create_growth", statistics.median(totals_3000) / statistics.median(totals_100), "ratio",
                    at_100_ms=statistics.median(totals_100), at_live_ms=statistics.median(totals_3000), live=live,
                    phases_at_100_ms=phase_medians(phases_100), phases_at_live_ms=phase_medians(phases_3000))
    if "live_memory" in wanted:
        figures.add("live_memory", (before - after) / (live - 100), "MiB", 0.66, edge_rss_mib=node.rss_kib() / 1024,
                    edge_fds=node.fds())
    everyone = [box async for box in client.list(labels={"bench": "live"}, page_size=1000)]
    started = time.perf_counter()
    limit = asyncio.Semaphore(32)

    async def ask(box):
        async with limit:
            return (await box.exec(["/bin/true"])).ok

    answers = await asyncio.gather(*(ask(box) for box in everyone))
    if "live_sandboxes" in wanted:
        figures.add("live_sandboxes", sum(answers), "sandboxes", asked=len(everyone),
                    seconds_to_ask_all=time.perf_counter() - started)
    del boxes
    await end_all(client, {"bench": "live"})


def bench_fncall_trivial(figures, build):
    """One trivial native call inside the backend, the worker waiting; the binary is part of the build."""
    output = subprocess.check_output([build / "bin" / "sandbox_fncall_bench", "300", "4", "10"])
    measured = json.loads(output.decode().splitlines()[-1])
    figures.add("fncall_trivial", measured["median_ms"], "ms", floor_ms(build)["median_ms"], p99_ms=measured["p99_ms"],
                per_second=measured["per_second"], workers=measured["workers"])


def bench_placement(figures, build, wanted):
    """What placement_bench prints (src/placement): the program makes its clusters itself, on virtual time."""
    for line in subprocess.check_output([build / "bin" / "placement_bench"]).splitlines():
        figure = json.loads(line)
        if figure["name"] in wanted:
            figures.add(figure["name"], figure["value"], figure["unit"], figure["baseline"], figure["ratio"], **figure["detail"])


def bench_cluster(figures, build, wanted):
    """Whole clusters on virtual time, and one apiserver's way of a create in real time (src/router)."""
    commands = {"apiserver_rate": ["cluster_rate"], "node_death_detection": ["cluster_sim", "nodes", "1", "300"],
                "placement_imbalance_whole": ["cluster_sim", "burst"], "cluster_sim_unit": ["cluster_sim", "unit"],
                "cluster_sim_wide": ["cluster_sim", "wide"], "cluster_sim_faults": ["cluster_sim", "faults", "1", "400"]}
    for name in [name for name in commands if name in wanted]:
        program, *args = commands[name]
        for line in subprocess.check_output([build / "bin" / program, *args]).splitlines():
            figure = json.loads(line)
            figures.add(name, figure["value"], figure["unit"], figure["baseline"], figure["ratio"], **figure["detail"])


def limited_spawn_rate(program, runs=2000, concurrency=2):
    """Runs of a program a second by fork + exec with rlimits only, in so many processes."""
    limits = [(resource.RLIMIT_CPU, 10), (resource.RLIMIT_FSIZE, 1 << 28), (resource.RLIMIT_NOFILE, 4096)]
    pids = []
    started = time.perf_counter()
    for _ in range(concurrency):
        pid = os.fork()
        if pid == 0:
            for _ in range(runs // concurrency):
                child = os.fork()
                if child == 0:
                    for which, value in limits:
                        resource.setrlimit(which, (value, value))
                    os.execv(program, [program])
                os.waitpid(child, 0)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return runs / (time.perf_counter() - started)


def bare_ms(command, runs, cwd=None):
    """Median milliseconds of a command outside of any sandbox."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=cwd)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


async def run_calls(client, calls, concurrency):
    """Runs calls to OK; returns how many a second."""
    started = time.perf_counter()
    count = 0
    async for index, result in client.call_many(calls, concurrency=concurrency):
        if isinstance(result, Exception) or not result.ok:
            raise RuntimeError(f"call {index}: {result!r}")
        count += 1
    return count / (time.perf_counter() - started)


async def call_times(client, call, runs, gap):
    """Milliseconds of `runs` calls, one at a time through the SDK, with a pause in which the worker prepares the next."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        result = await client.call(call())
        times.append((time.perf_counter() - started) * 1e3)
        if not result.ok:
            raise RuntimeError(repr(result))
        await asyncio.sleep(gap)
    return times


CPP = b"""#include <bits/stdc++.h>
int main() { std::map<int, int> m; for (int i = 0; i < 1000; i++) m[i * 7 % 1000] = i; std::cout << m.size() << std::endl; }
"""


def build_native_layer(build, layers):
    """A toolkit layer with the program of `fncall_trivial`: static, does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "bench", "native")
        program.parent.mkdir()
        shutil.copy(build / "bin" / "dsec-call-guest", program)
        program.chmod(0o755)
        for path in (program, program.parent, folder):
            os.utime(path, (0, 0))  # the same layer each time
        subprocess.run([build / "bin" / "dsec", "layer", "build", "--layers", layers, "--kind", "toolkit", "--name",
                        "bench-native:1", "--from-dir", folder], check=True, stdout=subprocess.DEVNULL)


CLUSTER = {"apiserver_rate", "node_death_detection", "placement_imbalance_whole", "cluster_sim_unit", "cluster_sim_wide",
           "cluster_sim_faults"}
FNCALL = {"fncall_rate", "fncall_python_warm", "fncall_python_warm_rate", "fncall_cpp", "fncall_soak"}


async def bench_fncall(figures, node, client, wanted, soak, build):
    from libdsec import DSecFnCallArgs
    from support import BASE

    await client.put_fn_type("bench-native", {"environment": {"base": BASE, "toolkits": ["bench-native:1"]},
                                              "run": {"argv": ["/bench/native"]}, "pool": {"min": 1, "max": 8}})

    def trivial(count):
        return (DSecFnCallArgs(type="bench-native") for _ in range(count))

    await run_calls(client, trivial(200), 8)
    if "fncall_rate" in wanted:
        await run_calls(client, trivial(3000), 64)  # the pool grows to its size
        rates = [await run_calls(client, trivial(3000), 64) for _ in range(5)]
        figures.add("fncall_rate", statistics.median(rates), "1/s", limited_spawn_rate(str(build / "bin" / "dsec-call-guest")), all_rates=rates)
    if "fncall_python_warm" in wanted:
        warm = lambda: DSecFnCallArgs(type="python_warm", code="print(1)")
        await call_times(client, warm, 5, 0.1)
        times = await call_times(client, warm, 100, 0.1)
        figures.add("fncall_python_warm", statistics.median(times), "ms",
                    bare_ms(["/usr/bin/python3", "-c", "print(1)"], 50), p99_ms=percentile(times, 0.99))
    if "fncall_python_warm_rate" in wanted:
        batch = lambda count: (DSecFnCallArgs(type="python_warm", code="print(1)") for _ in range(count))
        await run_calls(client, batch(200), 16)
        rates = {many: [await run_calls(client, batch(1000), many) for _ in range(3)] for many in (16, 64)}
        figures.add("fncall_python_warm_rate", statistics.median(rates[64]), "1/s", rates=rates)
    if "fncall_cpp" in wanted:
        number = iter(range(1000))
        # A comment of its own, so that no compile is answered from the cache.
        source = lambda: DSecFnCallArgs(type="cpp", code=CPP + b"// %d %d\n" % (os.getpid(), next(number)))
        await call_times(client, source, 3, 0)
        times = await call_times(client, source, 20, 0)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "main.cpp").write_bytes(CPP)
            script = "g++ -O2 -std=gnu++20 -pthread -pipe -o main main.cpp && ./main"
            bare = bare_ms(["/bin/sh", "-c", script], 20, cwd=folder)
        figures.add("fncall_cpp", statistics.median(times), "ms", bare, p99_ms=percentile(times, 0.99))
    if "fncall_soak" in wanted:
        # The results of the last 10,000 calls are kept (fn_ops_kept): they are to be there from the start.
        await run_calls(client, trivial(12_000), 64)
        before = node_growth(node)
        await run_calls(client, trivial(soak // 2), 64)
        middle = node_growth(node)
        rate = await run_calls(client, trivial(soak - soak // 2), 64)
        after = node_growth(node)
        pools = (await client.fn_pools()) if hasattr(client, "fn_pools") else []
        figures.add("fncall_soak", soak, "calls", per_second=rate, before=before, middle=middle, after=after,
                    growth={key: after[key] - before[key] for key in before},
                    replaced=sum(int(pool.get("replaced", 0)) for pool in pools))


async def bench_layers(figures, build, wanted):
    """What concerns a layer store of its own: creates from many layers, pages of a large catalogue."""
    import catalogue
    import support
    from libdsec import DSecClient

    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    store = support.build_layers(folder / "layers")
    toolkits = [f"bench-{n}:1" for n in range(15)]
    for name in toolkits:
        tree = folder / "tree"
        (tree / "opt" / name.split(":")[0]).mkdir(parents=True)
        subprocess.run([build / "bin" / "dsec", "layer", "build", "--layers", store, "--kind", "toolkit", "--name", name,
                        "--from-dir", tree], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.rmtree(tree)
    node = support.Node(folder, store, f"bench{os.getpid()}l").start()
    try:
        async with DSecClient(node.url, node.key) as client:
            if "create_many_layers" in wanted:
                counts = (1, 4, 16)
                times = {count: [] for count in counts}
                for _ in range(4):  # in turns, so that all see the same machine
                    for count in counts:
                        args = support.args(toolkits=toolkits[: count - 1])
                        totals, _ = await create_times(client, args, 50)
                        times[count] += totals
                one, four, sixteen = (statistics.median(times[count]) for count in counts)
                figures.add("create_many_layers", sixteen / one, "ratio", ratio_of_4=four / one, ms_of_1=one, ms_of_4=four, ms_of_16=sixteen)
        if "catalogue_page" in wanted:
            catalogue.bench_catalogue(figures, node)
    finally:
        node.stop()
        node.purge()
        shutil.rmtree(folder, ignore_errors=True)


def node_growth(node):
    """What must not grow with the number of calls."""
    status = pathlib.Path(f"/proc/{node.process.pid}/status").read_text(encoding="ascii")
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    mounts = len(pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    return {"rss_mib": node.rss_kib() / 1024, "fds": node.fds(), "threads": threads, "mounts": mounts}


async def bench_adoption(figures, node):
    from libdsec import DSecClient
    from support import args as make_args

    async with DSecClient(node.url, node.key) as client:
        await make_many(client, make_args(memory_limit_mb=128, labels={"bench": "adopt"}), 1000)
        ids = [box.id async for box in client.list(labels={"bench": "adopt"}, page_size=1000)]
    node.kill()
    started = time.perf_counter()
    node.start(seconds=120)
    ready = time.perf_counter() - started
    async with DSecClient(node.url, node.key) as client:
        limit = asyncio.Semaphore(32)

        async def ask(box_id):
            async with limit:
                await client._transport.call("GET", f"/v1/sandboxes/{box_id}/exec")

        await asyncio.gather(*(ask(box_id) for box_id in ids))
        figures.add("edge_adoption", time.perf_counter() - started, "s", seconds_to_ready=ready, sandboxes=len(ids))
        await end_all(client, {"bench": "adopt"})


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--only", default="")
    parser.add_argument("--live", type=int, default=3200)
    parser.add_argument("--soak", type=int, default=100_000)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "figures.jsonl")
    burst.add_arguments(parser)
    arguments = parser.parse_args()
    os.environ["DSEC_BUILD"] = str(arguments.build.resolve())
    import pack_diff
    import support
    from libdsec import DSecClient

    names = ["create_ready", "create_first_command", "exec_round_trip", "create_rate", "create_growth", "live_memory",
             "live_sandboxes", "edge_adoption", "fncall_trivial", "fncall_rate", "fncall_python_warm", "fncall_python_warm_rate",
             "fncall_cpp", "fncall_soak", "layer_build", "layer_compress", "create_many_layers", "catalogue_page", "pack_diff",
              "placement_rate", "placement_imbalance", "iam_check", "microvm_ready", *sorted(CLUSTER)]
    wanted = set(filter(None, arguments.only.split(","))) or set(names)
    named = [*names, *burst.FIGURES, "prefetch_first_command"]
    unknown = wanted - set(named)
    if unknown:
        sys.exit(f"unknown figures: {', '.join(sorted(unknown))}; there are {', '.join(named)}")
    random.seed(1)
    layers = support.build_layers(support.BUILD / "test-layers")
    if wanted & {"fncall_python_warm", "fncall_python_warm_rate", "fncall_cpp"}:
        support.build_languages(layers)
    if wanted & FNCALL:
        build_native_layer(arguments.build, layers)
    folder = tempfile.mkdtemp(prefix="dsec-bench-")
    node = support.Node(folder, layers, f"bench{os.getpid()}", capacity=4000).start()
    figures = Figures(arguments.out)
    args = support.args()
    try:
        async with DSecClient(node.url, node.key) as client:
            if wanted & {"create_ready", "create_first_command", "exec_round_trip", "create_rate"}:
                await bench_create(figures, arguments.build, node, client, args, wanted)
            if wanted & {"create_growth", "live_memory", "live_sandboxes"}:
                await bench_live(figures, node, client, args, wanted, arguments.live)
            if wanted & FNCALL:
                await bench_fncall(figures, node, client, wanted, arguments.soak, arguments.build)
            if "pack_diff" in wanted:
                await pack_diff.bench_pack_diff(figures, node, client)
        if "fncall_trivial" in wanted:
            bench_fncall_trivial(figures, arguments.build)
        if wanted & {"placement_rate", "placement_imbalance"}:
            bench_placement(figures, arguments.build, wanted)
        if wanted & CLUSTER:
            bench_cluster(figures, arguments.build, wanted)
        if "iam_check" in wanted:
            import iam

            figure = iam.run(count=400, width=4, projects=200, keys=1000)
            figures.add(figure["name"], figure["value"], figure["unit"], figure["baseline"], **figure["detail"])
        for name in sorted(wanted & {"layer_build", "layer_compress"}):
            import layers as layer_benchmark

            figure = layer_benchmark.FIGURES[name](arguments.build.resolve())
            figures.add(figure["name"], figure["value"], figure["unit"], figure["baseline"], **figure["detail"])
        if wanted & {"create_many_layers", "catalogue_page"}:
            await bench_layers(figures, arguments.build, wanted)
        if "edge_adoption" in wanted:
            await bench_adoption(figures, node)
    finally:
        node.stop()
        node.purge()
        shutil.rmtree(folder, ignore_errors=True)
    if "microvm_ready" in wanted:
        import microvm

        await asyncio.to_thread(microvm.bench_microvm, figures, arguments.build.resolve(), layers)
    if wanted & set(burst.FIGURES):  # on nodes of their own, with nothing else on the machine
        await burst.bench_bursts(figures, arguments.build.resolve(), wanted, arguments.images, arguments.tasks, arguments.runs)
    if "prefetch_first_command" in wanted:  # the same
        import prefetch

        figure = await asyncio.to_thread(prefetch.measure, arguments.build.resolve(), 5, 2)
        figures.add(figure["name"], figure["value"], figure["unit"], figure["baseline"], figure["ratio"], **figure["detail"])


if __name__ == "__main__":
    asyncio.run(main())
