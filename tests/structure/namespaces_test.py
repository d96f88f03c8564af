#!/usr/bin/env python3
#: test namespaces args='{build} {namespace}'
"""Each test that uses softverbs has a registry of its own: namespaces_test.py BUILD_DIR PREFIX.

tests/bin/meson.build gives each test and benchmark that tests/find_tests.py finds a SOFTVERBS_NAMESPACE of PREFIX, which differs between
builds, and its name. The first lines of a test can replace it, and a test that another meson.build makes has what that gives it. So the
namespaces of all are compared; only a test that names no softverbs library needs none. Python tests that choose a namespace for their
processes, with their process number, are not seen here. Before that the check is tried on tests with each fault.
"""
import json
import pathlib
import sys

LIBRARIES = ("VERBATIM_VERBS_LIBRARY", "VERBS_TEST_LIBRARY")
NAMESPACE = "SOFTVERBS_NAMESPACE"


def faults_of(tests, prefix):
    """One line for each test whose namespace is missing, has another prefix, or is that of a test before it."""
    faults, owners = [], {}
    for test in tests:
        name, environment = test["name"], test["env"]
        namespace = environment.get(NAMESPACE)
        if namespace is None:
            if any(library in environment for library in LIBRARIES):
                faults.append(f"{name} has no {NAMESPACE}")
        elif not namespace.startswith(prefix):
            faults.append(f"{name}: {namespace} does not begin with {prefix}")
        elif namespace in owners:
            faults.append(f"{name}: {namespace} is that of {owners[namespace]}")
        else:
            owners[namespace] = name
    return faults


def check_the_check():
    uses = {LIBRARIES[0]: "library"}
    good = [{"name": "a", "env": {NAMESPACE: "p-a"}}, {"name": "b", "env": {}}, {"name": "c", "env": {**uses, NAMESPACE: "p-c"}}]
    assert not faults_of(good, "p-")
    for bad in ({"name": "d", "env": uses}, {"name": "d", "env": {NAMESPACE: "d"}}, {"name": "d", "env": {NAMESPACE: "p-a"}}):
        assert len(faults_of([*good, bad], "p-")) == 1, bad


def main():
    build, prefix = sys.argv[1:]
    check_the_check()
    faults, used = [], 0
    for kind in ("tests", "benchmarks"):
        tests = json.loads((pathlib.Path(build) / f"meson-info/intro-{kind}.json").read_text(encoding="utf-8"))
        faults += faults_of(tests, prefix)
        used += sum(NAMESPACE in test["env"] for test in tests)
    print("\n".join(faults) if faults else f"{used} tests and benchmarks, each with a namespace of its own")
    return 1 if faults or used == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
