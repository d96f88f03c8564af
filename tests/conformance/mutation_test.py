#!/usr/bin/env python3
#: test conformance-mutation-{mode} mode=none,flip-byte,swap-members,skip-tail,overrun,wrong-size,wrong-send-size
#:   + timeout=240 args='{conformance} {plugin} {mutate} {mode} 8 12' SOFTVERBS_ENGINE=inline
"""Checks that the suite finds each kind of wrong data that a plugin could deliver.

Usage: mutation_test.py CONFORMANCE PLUGIN MUTATE_PLUGIN MODE [VERSION...]

Runs the data tests with a wrapper that alters messages. With MODE none the tests must pass. With any other MODE they
must fail by their own checks, and not by a crash, a timeout or a failed start.
"""

import os
import re
import subprocess
import sys

conformance, plugin, mutate, mode, *versions = sys.argv[1:]
# Without OptionalReceiveCompletion: it would wait until its deadline for data that never arrives.
suites = "Net/Data.*{0}:Net/Groups.*{0}:Net/MixedTraffic.*{0}:-*OptionalReceiveCompletion*"
# A pattern that must be in the output, and the fraction of the tests that must fail. The wrapper alters one message in
# each test, so each test that checks this property must fail.
error, min_failing = {
    "none": (r"\[  PASSED  \]", 0),
    "flip-byte": (r"wrong bytes: \d+ in a buffer", 0.8),
    "swap-members": (r"wrong bytes: \d+ in a buffer", 0.18),
    "skip-tail": (r"wrong bytes: \d+ in a buffer", 0.8),
    "overrun": (r"wrong bytes: \d+ in a buffer", 0.8),
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
        sys.exit(f"v{version}: unexpected result of the suite with MUTATE_MODE={mode}")
