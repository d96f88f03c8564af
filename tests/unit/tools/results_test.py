#!/usr/bin/env python3
#: test results args={source}
"""tools/results: its measurements are those of RESULTS.md, and what it prints of fake commands: results_test.py SOURCE_DIR."""

import importlib.machinery
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
SOURCE = pathlib.Path(sys.argv[1]).resolve()
BENCHMARK = re.compile(r"--benchmark ([\w-]+)")
REPEAT = re.compile(r"^Repeat: `tools/results ([\w-]+)`", re.M)


def measurements():
    loader = importlib.machinery.SourceFileLoader("results", str(SOURCE / "tools/results"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("results", loader))
    loader.exec_module(module)
    return module.MEASUREMENTS


class Page(unittest.TestCase):
    def test_SectionsThatCanBeRepeated_AreTheMeasurements(self):
        sections = (SOURCE / "RESULTS.md").read_text().split("\n### ")
        names = [name for section in sections for name in REPEAT.findall(section)]
        self.assertEqual(sorted(names), sorted(measurements()))
        for section in sections:
            for name in REPEAT.findall(section):
                for command in measurements()[name][0]:
                    self.assertIn(command, section, name)

    def test_Benchmarks_Exist(self):
        tests = [path for path in (SOURCE / "tests").rglob("*") if path.suffix in (".build", ".cc")]
        text = "".join(path.read_text() for path in tests)
        commands = [command for commands, _ in measurements().values() for command in commands]
        names = BENCHMARK.findall("\n".join(commands))
        self.assertTrue(names)
        self.assertEqual(set(names) - set(re.findall(r"^(?://|#): benchmark ([\w-]+)", text, re.M)), set())


class Runs(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        (self.root / "tools").mkdir()
        shutil.copy(SOURCE / "tools/results", self.root / "tools")

    def results(self, *arguments, **programs):
        """With programs in place of those that it calls."""
        for name, script in programs.items():
            path = self.root / ("tools" if name in ("quickstart", "softverbs") else "") / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        environment = os.environ | {"PATH": f"{self.root}:{os.environ['PATH']}"}
        command = [self.root / "tools/results", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_NoName_ListsAll(self):
        self.assertEqual(self.results(), (0, "\n".join(measurements()) + "\n", ""))

    def test_UnknownName_IsWrongUsage(self):
        status, out, err = self.results("bandwidth")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("bandwidth", err)

    def test_Benchmark_IsPrintedAsATable(self):
        status, out, err = self.results("put-rate", meson='echo "benchmark of $4: median 2.5 (1.0 to 9.25, 44 rounds) ns"; echo more')
        self.assertEqual((status, err), (0, ""))
        head, command, table = out.strip().split("\n\n")
        self.assertRegex(head, r"^\S.*processors, load [\d.]+ before; commit \S+; \d{4}-\d\d-\d\d:$")
        self.assertEqual(command, "    $ meson test -C build --benchmark perf-put-rate -v")
        rows = table.splitlines()
        self.assertIn("\n".join(rows[:2]) + "\n", (SOURCE / "RESULTS.md").read_text())
        self.assertEqual(rows[2:], ["| of --benchmark, ns | 2.5 | 1.0 | 9.25 | 44 |"])

    def test_Program_IsPrintedWithoutOtherLines(self):
        status, out, err = self.results("quickstart", quickstart='echo "== 1. packages"; echo "done in 58 s: $1"')
        self.assertEqual((status, err), (0, ""))
        expected = r"    \$ time tools/quickstart --no-gpu\n    done in 58 s: --no-gpu\n    real\t\S+\n    user\t\S+\n    sys\t\S+\n\n"
        self.assertRegex(out.split(":\n\n", 1)[1], f"^{expected}$")

    def test_OutputWithoutAResult_IsAFailure(self):
        for name in ("put-rate", "soak"):
            status, _, err = self.results(name, meson='echo "No suitable tests defined."')
            self.assertEqual(status, 1, name)
            self.assertTrue(err.startswith("No suitable tests defined.\ntools/results: no result in the output of meson test"), err)

    def test_Commands_MayLockAllMemory(self):
        _, out, _ = self.results("caches-nixl", softverbs='echo "# over $SOFTVERBS_LOCK_LIMIT"')
        self.assertIn("    # over none\n", out)

    def test_CommandThatFails_IsAFailure(self):
        status, _, err = self.results("soak", meson='echo "no such test"; exit 3')
        self.assertEqual(status, 1)
        self.assertTrue(err.startswith("no such test\ntools/results: exit status 3 of meson test -C build soak"), err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
