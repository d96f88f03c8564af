#!/usr/bin/env python3
"""The suite must turn red when one byte of what a plugin delivers is wrong.

Usage: mutation_test.py CONFORMANCE PLUGIN MUTATE_PLUGIN MODE [VERSION...]

Runs the data tests over the mutating wrapper: with MODE none they must pass, with any other MODE fail, by their own
checks and not by a crash, a hang or a refusal to start.
"""

import os
import re
import subprocess
import sys

conformance, plugin, mutate, mode, *versions = sys.argv[1:]
# Without the one that watches memory for data that arrives unannounced: it waits long for what never comes.
suites = "Net/Data.*{0}:Net/Groups.*{0}:Net/MixedTraffic.*{0}:-*OptionalReceiveCompletion*"
# What the output must say, and how large a part of the tests must turn red: the wrapper spoils one message a test, so
# that each test which could see it must.
error, min_failing = {
    "none": (r"\[  PASSED  \]", 0),
    "flip-byte": (r"wrong bytes in a buffer", 0.8),
    "swap-members": (r"wrong bytes in a buffer", 0.18),
    "skip-tail": (r"wrong bytes in a buffer", 0.8),
    "overrun": (r"wrong bytes in a buffer", 0.8),
    "wrong-size": (r"sizes", 0.7),
    "wrong-send-size": (r"sizes", 0.5),
}[mode]

for version in versions or ["12"]:
    run = subprocess.run(
        [conformance, "--plugin", mutate, "--gtest_filter=" + suites.format(f"/v{version}")],
        env={**os.environ, "MUTATE_PLUGIN": plugin, "MUTATE_MODE": mode},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    ran = re.search(r"\[=+\] (\d+) tests? from .* ran", run.stdout)
    tests = int(ran.group(1)) if ran else 0
    red = len(re.findall(r"^\[  FAILED  \] .*\(\d+ ms\)$", run.stdout, flags=re.M))
    print(f"v{version} {mode}: exit {run.returncode}, {red} of {tests} tests red", flush=True)
    fails_as_expected = run.returncode == (0 if mode == "none" else 1) and tests >= 20 and red >= min_failing * tests
    if not fails_as_expected or not re.search(error, run.stdout):
        print(run.stdout[-6000:], run.stderr[-2000:], sep="\n")
        sys.exit(f"v{version}: with MUTATE_MODE={mode} the suite did not answer as it must")
