#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ctest and the Python suites, then prints a table by label and every skip with its reason.

Exit status 1 when a test failed, or when a label that must run on this host ran no test at all.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Every label of style.
CTEST_LABELS = ["lint", "unit", "component", "fuzz", "privileged", "vm"]
PYTEST_SUITES = {
    "sdk": ROOT / "sdk" / "python" / "tests",
    "system": ROOT / "tests" / "system",
    "chaos": ROOT / "tests" / "chaos",
    # The cases marked `vm`, from the same source, on microVMs.
    "vm-cases": ROOT / "tests" / "system",
}
NEED_LAYERS = ("system", "chaos", "vm-cases")
NEED_GUEST = ("vm", "system", "vm-cases")
# A Python test that takes longer hangs.
TEST_SECONDS = 180
# Labels that may be empty in a build: reason.
OPTIONAL = {"fuzz": "fuzz targets are built by the asan preset only"}


class Tally:
    """Counts of one label."""

    def __init__(self):
        self.ran = 0
        self.failed = []
        self.skipped = []


def ctest_labels(build):
    """Returns {ctest name: label} of a build tree."""
    listing = json.loads(
        subprocess.check_output(["ctest", "--test-dir", str(build), "--show-only=json-v1"], text=True)
    )
    labels = {}
    for test in listing["tests"]:
        for prop in test.get("properties", []):
            if prop["name"] == "LABELS":
                labels[test["name"]] = prop["value"][0]
    return labels


def read_junit(path, tally, prefix=""):
    """Adds the test cases of one JUnit or GoogleTest XML file to a tally."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{prefix}{case.get('classname', '')}.{case.get('name', '')}"
        skipped = case.find("skipped")
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        if skipped is not None:
            tally.skipped.append((name, (skipped.get("message") or skipped.text or "no reason").strip()))
        else:
            tally.ran += 1
            if failure is not None:
                tally.failed.append(name)


def run_ctest(build, label, results, jobs):
    """Runs one label and returns its tally."""
    tally = Tally()
    if label in NEED_GUEST and not prepare_guest(build):
        tally.failed = ["the guest image could not be made"]
        return tally
    gtest_dir = results / f"gtest-{label}"
    gtest_dir.mkdir(parents=True)
    environment = dict(os.environ, GTEST_OUTPUT=f"xml:{gtest_dir}/")
    junit = results / f"ctest-{label}.xml"
    command = ["ctest", "--test-dir", str(build), "-L", f"^{label}$", "--output-on-failure", "--no-tests=ignore",
               "--output-junit", str(junit)]
    if label in ("unit", "lint"):
        command += ["-j", str(jobs)]
    code = subprocess.call(command, env=environment)
    files = sorted(gtest_dir.glob("*.xml"))
    for file in files:
        read_junit(file, tally)
    plain = Tally()
    if junit.exists():
        read_junit(junit, plain)
    # Tests that are not GoogleTest binaries count as one each; a binary that died before writing its XML counts too.
    tally.ran += max(0, plain.ran - len(files))
    if code != 0 and not tally.failed:
        tally.failed = plain.failed or [f"ctest exit status {code}"]
    return tally


def prepare_layers(build):
    """Makes the layers of the suites ahead of them, outside of any test's time; False: that failed."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); import support; "
               "support.build_languages(support.build_layers(support.BUILD / 'test-layers'))")
    started = time.monotonic()
    code = subprocess.call(["/usr/bin/python3", "-c", program, str(ROOT / "tests")],
                           env=dict(os.environ, DSEC_BUILD=str(build), PYTHONPATH=str(ROOT / "sdk" / "python"),
                                    PYTHONDONTWRITEBYTECODE="1"))
    print(f"layers of the suites: {time.monotonic() - started:.0f} s", flush=True)
    return code == 0


def prepare_guest(build):
    """Makes kernel and initramfs of microVMs; False: that failed."""
    return subprocess.call(["/usr/bin/python3", str(ROOT / "tools" / "guest" / "build_guest.py"), "--bin",
                            str(build / "bin"), "--out", str(ROOT / "build" / "guest")]) == 0


def run_pytest(name, folder, build, results):
    """Runs one Python suite and returns its tally."""
    tally = Tally()
    if name in NEED_GUEST and not prepare_guest(build):
        tally.failed = ["the guest image could not be made"]
        return tally
    if name in NEED_LAYERS and not prepare_layers(build):
        tally.failed = ["the layers of the suite could not be made"]
        return tally
    junit = results / f"pytest-{name}.xml"
    environment = dict(os.environ, DSEC_BUILD=str(build.resolve()), PYTHONPATH=str(ROOT / "sdk" / "python"),
                       PYTHONDONTWRITEBYTECODE="1")
    options = []
    if name == "vm-cases":
        environment["DSEC_TEST_BACKEND"] = "microvm"
        options = ["-m", "vm"]
    code = subprocess.call(
        ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "--durations=10",
         f"--timeout={TEST_SECONDS}", "--maxfail=20", f"--junitxml={junit}", *options, str(folder)],
        env=environment,
    )
    if junit.exists():
        read_junit(junit, tally)
    if code != 0 and not tally.failed:
        tally.failed = [f"pytest exit status {code}"]
    return tally


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="CMake build folder")
    parser.add_argument("--only", default="", help="comma-separated labels")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    wanted = [label for label in arguments.only.split(",") if label]
    arguments.build = arguments.build.resolve()
    results = arguments.build / "test-results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    known = ctest_labels(arguments.build)
    unknown = sorted(name for name, label in known.items() if label not in CTEST_LABELS)
    tallies = {}
    for label in CTEST_LABELS:
        if not wanted or label in wanted:
            tallies[label] = run_ctest(arguments.build, label, results, arguments.jobs)
    for name, folder in PYTEST_SUITES.items():
        if (not wanted or name in wanted) and folder.is_dir():
            tallies[name] = run_pytest(name, folder, arguments.build, results)

    failed = bool(unknown)
    if unknown:
        print(f"tests without a known label: {', '.join(unknown)}")
    print(f"\n{'label':<12}{'ran':>6}{'failed':>8}{'skipped':>9}")
    for label, tally in tallies.items():
        print(f"{label:<12}{tally.ran:>6}{len(tally.failed):>8}{len(tally.skipped):>9}")
    print("\nskipped tests:" if any(tally.skipped for tally in tallies.values()) else "\nno test was skipped")
    for label, tally in tallies.items():
        for name, reason in tally.skipped:
            print(f"  [{label}] {name}: {reason}")
    for label, tally in tallies.items():
        for name in tally.failed:
            failed = True
            print(f"FAILED [{label}] {name}")
        if tally.ran == 0 and not (label in OPTIONAL and not any(v == label for v in known.values())):
            failed = True
            print(f"FAILED [{label}] no test ran")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
