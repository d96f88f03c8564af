#!/usr/bin/env python3
#: test run-tests priority=5 timeout=300 args='{source} {meson}'
"""tools/run_tests and tools/count_cases on a project of its own, with a test that fails in each way.

usage: run_tests_test.py SOURCE_ROOT MESON"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

SOURCES, MESON = sys.argv[1:3]

# A test that fails as its name says in its first FAILURES runs, and then passes.
TEST = """
import os, pathlib, signal, sys, time
name, failures, state = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
runs = int(state.read_text()) if state.exists() else 0
state.write_text(str(runs + 1))
print("[==========] Running 2 tests from 1 test suite.")
print("[ RUN      ] Suite.Works\\n[       OK ] Suite.Works (0 ms)\\n[ RUN      ] Suite.Case", flush=True)
if runs >= failures:
    print("[       OK ] Suite.Case (0 ms)\\n[  PASSED  ] 2 tests.")
    sys.exit(0)
if name == "signal" or (name == "signal-later" and runs > 0):
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "time-out" or (name == "hangs-later" and runs > 0):
    time.sleep(300)
if name == "crash-of-a-child":
    print("a process of this test has crashed: signal 11", file=sys.stderr)
if name == "sanitizer":
    print("ERROR: AddressSanitizer: heap-use-after-free", file=sys.stderr)
actual = "false (leak of threads: 1 before, 2 now)" if name == "leak-of-threads" else "false"
print(f"case.cc:12: Failure\\nValue of: arrived\\n  Actual: {actual}\\nExpected: true")
if name == "wrong-byte":
    print("wrong byte at 7: 0, not 1")
if name == "tool":
    print("# Wrong elements    : 7 FAILED")
print("[  FAILED  ] Suite.Case (0 ms)\\n[  PASSED  ] 1 test.\\n[  FAILED  ] 1 test, listed below:\\n[  FAILED  ] Suite.Case")
sys.exit(1)
"""

# Name of the test -> its suite, how often it fails.
TESTS = {
    "passes": ("unit", 0),
    "once": ("unit", 1),
    "twice": ("unit", 2),
    "always": ("unit", 100),
    "signal": ("unit", 1),
    "signal-later": ("unit", 2),
    "hangs-later": ("unit", 2),
    "crash-of-a-child": ("unit", 1),
    "time-out": ("unit", 1),
    "sanitizer": ("unit", 1),
    "wrong-byte": ("unit", 1),
    "leak-of-threads": ("unit", 1),
    "tool": ("unit", 1),
    "finds-mutations": ("unit", 1),
    "fuzz": ("fuzz", 1),
    "completion": ("completion", 1),
    "structure": ("structure", 1),
    "abi": ("abi", 1),
}


UNITTEST = """
import time, unittest
class Names(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1, 2, "the names differ")
    def test_error(self):
        {}["x"]
    def test_parts(self):
        for part in range(2):
            with self.subTest(part=part):
                self.assertEqual(part, 0)
    def test_skipped(self):
        self.skipTest("no reason")
    def test_works(self):
        pass
unittest.main()
"""


class Reports(unittest.TestCase):
    """What tools/count_cases says of one test whose output is given."""

    def files_of(self, *entries):
        """What count_cases writes for a log with these entries, and prints."""
        with tempfile.TemporaryDirectory() as directory:
            os.mkdir(f"{directory}/meson-logs")
            log = f"{directory}/meson-logs/testlog.json"
            with open(log, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
            names = ("totals", "failures", "bodies")
            command = [f"{SOURCES}/tools/count_cases", *(word for name in names for word in (f"--{name}", f"{directory}/{name}")), log]
            written = {"shown": subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory).stdout}
            for name in names:
                with open(f"{directory}/{name}", encoding="utf-8") as file:
                    written[name] = file.read().splitlines()
            return written

    def entry(self, name="tools / names", command=("/b/names_test.py",), result="OK", status=0, stdout="", stderr=""):
        entry = {"name": f"verbatim:{name}", "command": command, "result": result, "returncode": status, "duration": 1.0}
        return entry | {"stdout": stdout, "stderr": stderr}

    def count(self, result="FAIL", status=1, stdout="", stderr=""):
        written = self.files_of(self.entry(result=result, status=status, stdout=stdout, stderr=stderr))
        return tuple(int(word) for word in written["totals"][0].split()), written["failures"], written["shown"]

    def cases(self, *names, skipped=(), **more):
        """The entry of a GoogleTest program with these cases."""
        lines = [f"[==========] Running {len(names)} tests from 1 test suite."]
        for name in names:
            lines += [f"[ RUN      ] {name}", f"[  SKIPPED ] {name} (0 ms)" if name in skipped else f"[       OK ] {name} (0 ms)"]
        lines += [f"[  PASSED  ] {len(names) - len(skipped)} tests.", f"[  SKIPPED ] {len(skipped)} tests, listed below:"]
        return self.entry(stdout="\n".join(lines) + "\n", **more)

    def test_bodies_are_cases_without_their_parameters(self):
        names = ("A.Works", "Net/A.Works/0", "Net/A.Works/v12_3", "A/1.Works", "A.Fails", "Rma/B.Works/0")
        written = self.files_of(self.cases(*names, command=["/b/tests/bin/unit"], name="unit / unit"))
        self.assertEqual(written["bodies"], ["unit A.Works"] * 4 + ["unit A.Fails", "unit B.Works"])
        self.assertRegex(written["shown"], r"(?m)^  unit +6 passed, 0 failed, 3 bodies in 6 configurations +1\.0 s$")

    def test_bodies_of_variants_and_builds_are_equal(self):
        wrapped = ["/t/stall", "--mode", "one", "/b/tests/bin/deny", "/b/tests/bin/unit", "--gtest_filter=A.*"]
        written = self.files_of(
            self.cases("A.Works", "A.More", command=["/b/tests/bin/unit"], name="unit / unit-thread"),
            self.cases("A.Works", command=wrapped, name="unit+full / unit-inline"),
            self.cases("A.Works", command=["/b/tests/bin/other"], name="unit / other"),
        )
        self.assertCountEqual(written["bodies"], ["unit A.Works", "unit A.More", "unit A.Works", "other A.Works"])
        self.assertRegex(written["shown"], r"(?m)^  unit +3 passed, 0 failed, 3 bodies in 3 configurations ")
        self.assertRegex(written["shown"], r"(?m)^  unit\+full +1 passed, 0 failed, 1 body in 1 configuration ")
        self.assertRegex(written["shown"], r"(?m)^  all suites +4 passed, 0 failed, 3 bodies in 4 configurations +3\.0 s$")

    def test_case_that_did_not_end_is_a_body_and_one_that_was_skipped_is_none(self):
        begun = self.cases("A.Works", "A.Skipped", "A.Crashes", skipped=["A.Skipped"], name="unit / unit", command=["/b/tests/bin/unit"])
        begun |= {"result": "FAIL", "returncode": -11, "stdout": begun["stdout"].partition("[       OK ] A.Crashes")[0]}
        self.assertEqual(self.files_of(begun)["bodies"], ["unit A.Works", "unit A.Crashes"])

    def test_bodies_of_scripts_are_counted_by_test(self):
        ran = self.entry(stderr="Ran 3 tests in 0.1s\n\nOK (skipped=1)\n")
        tap = self.entry(name="tools / tap", stdout="1..3\nok 1 - a\nok 2 - b # SKIP no device\nok 3 - c\n")
        written = self.files_of(ran, ran, tap, self.entry(name="tools / plain"), self.entry(name="tools / absent", result="SKIP", status=77))
        self.assertEqual(written["bodies"], ["names 1", "names 2"] * 2 + ["tap 1", "tap 2", "plain 1"])
        self.assertRegex(written["shown"], r"(?m)^  tools +7 passed, 0 failed, 4 skipped, 5 bodies in 7 configurations ")

    def test_unittest_cases_are_counted_and_named(self):
        with tempfile.TemporaryDirectory() as directory:
            with open(f"{directory}/names_test.py", "w", encoding="utf-8") as file:
                file.write(UNITTEST)
            run = subprocess.run([sys.executable, f"{directory}/names_test.py"], check=False, capture_output=True, text=True)
        totals, failures, shown = self.count(stdout=run.stdout, stderr=run.stderr)
        self.assertEqual(totals, (1, 3, 1))
        self.assertEqual(len(failures), 3, failures)
        self.assertRegex(failures[0], r"^names: test_error \(.*\)  KeyError: 'x'$")
        self.assertRegex(failures[1], r"^names: test_equal \(.*\)  AssertionError: 1 != 2 : the names differ$")
        self.assertRegex(failures[2], r"^names: test_parts \(.*\) \(part=1\)  AssertionError: 1 != 0$")
        self.assertIn("    again: meson test -C . --no-rebuild names\n", shown)

    def test_unittest_program_ends_later_has_failed(self):
        self.assertEqual(self.count(stderr="Ran 2 tests in 0.1s\n\nOK\n")[0], (1, 1, 0))
        self.assertEqual(self.count(stderr="Ran 0 tests in 0.1s\n\nOK\n", result="OK", status=0)[0], (0, 1, 0))
        self.assertEqual(self.count(stderr="Ran 2 tests in 0.1s\n\nOK\n", result="OK", status=0)[0], (2, 0, 0))

    def test_report_of_a_sanitizer_is_named(self):
        report = "WARNING: ThreadSanitizer: data race (pid=7)\n  Write of size 4\n"
        self.assertEqual(self.count(stderr=report, status=66)[1], ["names: FAIL, exit status 66  " + report.splitlines()[0]])
        begun = "[==========] Running 2 tests from 1 test suite.\n[ RUN      ] Suite.Case\n"
        report = "a.cc:3:1: runtime error: load of misaligned address"
        self.assertEqual(self.count(stdout=begun, stderr=report)[1], ["names: Suite.Case: did not end  " + report])

    def test_limit_of_time_names_what_was_last(self):
        failures = self.count("TIMEOUT", -15, stdout="starts\n", stderr="waits for the second rank\n\nstall: stops: 3, 5.12 s\n")[1]
        self.assertEqual(failures, ["names: TIMEOUT, exit status -15, last output: waits for the second rank"])

    def test_command_repeats_the_failed_cases(self):
        output = (
            "[==========] Running 3 tests from 1 test suite.\n[ RUN      ] A.Fails/0\n[  FAILED  ] A.Fails/0, where GetParam() = 7 (3 ms)\n"
            "[ RUN      ] A.Works\n[       OK ] A.Works (1 ms)\n[ RUN      ] A.Hangs\n"
        )
        self.assertIn("    again: meson test -C . --no-rebuild names --test-args=--gtest_filter=A.Fails/0:A.Hangs\n", self.count(stdout=output)[2])


class RunTests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        cls.path = cls.directory.name
        with open(f"{cls.path}/case.py", "w", encoding="utf-8") as file:
            file.write(TEST)
        lines = ["project('verbatim')", "python = find_program('python3')"]
        for name, (suite, failures) in TESTS.items():
            arguments = f"args: [files('case.py'), '{name}', '{failures}', '{cls.path}/runs-{name}']"
            limit = 10 if name == "time-out" else 120
            lines.append(f"test('{name}', python, {arguments}, suite: '{suite}', timeout: {limit})")
        with open(f"{cls.path}/meson.build", "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        subprocess.run([MESON, "setup", f"{cls.path}/build", cls.path], check=True, stdout=subprocess.DEVNULL)

    def setUp(self):
        for name in ("repeats", *(f"runs-{name}" for name in TESTS)):
            if os.path.exists(f"{self.path}/{name}"):
                os.unlink(f"{self.path}/{name}")

    def read(self, name):
        path = f"{self.path}/{name}"
        if not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read()

    def runs(self, name):
        return int(self.read(f"runs-{name}") or 0)

    def run_tests(self, *names, meson=MESON):
        environment = os.environ | {"PATH": os.path.dirname(meson) + ":" + os.environ["PATH"]}
        command = [f"{SOURCES}/tools/run_tests", "--repeats", f"{self.path}/repeats", f"{self.path}/build", "--", *names]
        return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment).returncode

    def count(self, *options):
        """(passed, failed, skipped), then the lists of failed and of flaky cases."""
        for name in ("failures", "flaky"):
            if os.path.exists(f"{self.path}/{name}"):
                os.unlink(f"{self.path}/{name}")
        command = [f"{SOURCES}/tools/count_cases", *options, "--label", "g++ "]
        for name in ("totals", "failures", "flaky"):
            command += [f"--{name}", f"{self.path}/{name}"]
        log = f"{self.path}/build/meson-logs/testlog.json"
        status = subprocess.run([*command, log], check=False, stdout=subprocess.DEVNULL).returncode
        totals = tuple(int(word) for word in self.read("totals").split())
        self.assertEqual(status, 1 if totals[1] else 0)
        return totals, self.read("failures").splitlines(), self.read("flaky").splitlines()

    def test_all_pass_nothing_is_repeated(self):
        self.assertEqual(self.run_tests("passes"), 0)
        self.assertEqual(self.count(), ((2, 0, 0), [], []))
        self.assertEqual(self.runs("passes"), 1)

    def test_passes_at_last_is_flaky(self):
        for name, runs in (("once", 2), ("twice", 3)):
            with self.subTest(name):
                self.assertEqual(self.run_tests(name), 0)
                self.assertEqual(self.runs(name), runs)
                totals, failures, flaky = self.count()
                self.assertEqual((totals, failures), ((2, 0, 0), []))
                self.assertEqual(len(flaky), 1)
                self.assertRegex(
                    flaky[0],
                    rf"^g\+\+ {name}: Suite\.Case  case\.cc:12: Value of: arrived .*host took \d+ % .*pause \d+ ms\)$",
                )
                totals, failures, flaky = self.count("--strict")
                self.assertEqual((totals, len(failures), len(flaky)), ((1, 1, 0), 1, 1))

    def test_fails_three_times_has_failed(self):
        self.assertEqual(self.run_tests("always", "passes"), 1)
        self.assertEqual(self.runs("always"), 3)
        self.assertEqual(self.runs("passes"), 1)
        totals, failures, flaky = self.count()
        self.assertEqual((totals, len(failures), flaky), ((3, 1, 0), 1, []))

    def test_may_hide_a_defect_is_not_repeated(self):
        # Four at a time, because with more than five nothing would be repeated.
        for names in (
            ("signal", "time-out", "crash-of-a-child", "sanitizer"),
            ("wrong-byte", "leak-of-threads", "tool", "finds-mutations"),
            ("fuzz", "completion", "structure", "abi"),
        ):
            with self.subTest(names=names):
                self.assertEqual(self.run_tests(*names), 1)
                self.assertEqual([self.runs(name) for name in names], [1] * len(names))
                totals, failures, flaky = self.count()
                self.assertEqual((totals, len(failures), flaky), ((4, 4, 0), 4, []))

    def test_more_than_five_have_failed_nothing_is_repeated(self):
        names = ("once", "twice", "wrong-byte", "tool", "fuzz", "signal")
        self.assertEqual(self.run_tests(*names), 1)
        self.assertEqual([self.runs(name) for name in names], [1] * len(names))

    def test_repetition_ends_by_a_signal_has_failed_by_it(self):
        self.assertEqual(self.run_tests("signal-later"), 1)
        self.assertEqual(self.runs("signal-later"), 2)
        totals, failures, flaky = self.count()
        self.assertEqual((totals, flaky), ((1, 1, 0), []))
        self.assertIn("did not end", failures[0])

    def test_repetition_does_not_fit_has_failed(self):
        with open(f"{self.path}/repeats", "w", encoding="ascii") as file:
            file.write("297.0\n")
        self.assertEqual(self.run_tests("hangs-later"), 1)
        totals, failures, flaky = self.count()
        self.assertEqual((totals, len(failures), flaky), ((1, 1, 0), 1, []))

    def test_meson_ends_early_has_failed_without_a_repetition(self):
        os.mkdir(f"{self.path}/bin")
        log = f"{self.path}/build/meson-logs/testlog.json"
        with open(f"{self.path}/bin/meson", "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{MESON} \"$@\"; status=$?\n")
            file.write(f"case \"$*\" in *--list*) ;; *) sed -i '/passes/d' {log} ;; esac\nexit $status\n")
        os.chmod(f"{self.path}/bin/meson", 0o755)
        self.assertEqual(self.run_tests("once", "passes", meson=f"{self.path}/bin/meson"), 1)
        self.assertEqual(self.runs("once"), 1)

    def test_five_were_repeated_before_nothing_is_repeated(self):
        with open(f"{self.path}/repeats", "w", encoding="ascii") as file:
            file.write("1.0\n" * 5)
        self.assertEqual(self.run_tests("once"), 1)
        self.assertEqual(self.runs("once"), 1)

    def test_time_was_used_up_before_has_failed(self):
        with open(f"{self.path}/repeats", "w", encoding="ascii") as file:
            file.write("300.0\n")
        self.assertEqual(self.run_tests("once"), 1)
        self.assertEqual(self.runs("once"), 1)

    def test_meson_does_not_run_has_no_result(self):
        self.assertEqual(self.run_tests("--no-such-option"), 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
