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
suites = "Net/Data.*{0}:Net/Groups.*{0}:Net/MixedTraffic.*{0}"
complaint = {
    "flip-byte": r"wrong bytes in a buffer",
    "swap-members": r"wrong bytes in a buffer",
    "skip-tail": r"wrong bytes in a buffer",
    "overrun": r"wrong bytes in a buffer",
    "wrong-size": r"operation->sizes|\.sizes",
    "wrong-send-size": r"operation->sizes|\.sizes",
    "none": r"\[  PASSED  \]",
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
    summary = [line for line in run.stdout.splitlines() if re.match(r"\[  (PASSED|FAILED)  \]|\[=====", line)]
    print(f"v{version} {mode}: exit {run.returncode}", *summary[-6:], sep="\n  ")
    expected = 0 if mode == "none" else 1
    ran = re.search(r"\[=+\] (\d+) tests? from .* ran", run.stdout)
    if run.returncode != expected or not ran or int(ran.group(1)) < 20 or not re.search(complaint, run.stdout):
        print(run.stdout[-6000:], run.stderr[-2000:], sep="\n")
        sys.exit(f"v{version}: with MUTATE_MODE={mode} the suite did not answer as it must")
