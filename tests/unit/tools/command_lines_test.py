#!/usr/bin/env python3
#: test command-lines args={build} needs=softverbs_bench,softverbs_control,verbatim_eplb,verbatim_info
#:   + needs=verbatim_kv,verbatim_model,verbatim_perf,verbatim_top
#:   when has=verbatim_exporter args=verbatim-exporter needs=verbatim_exporter
"""The command lines of all tools and scripts: help, errors, exit statuses: command_lines_test.py BUILD_DIR
[verbatim-exporter]."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
SOURCE = pathlib.Path(__file__).resolve().parents[3]
USAGE, FAILED = 2, 3
VERSION = re.search("version: '([^']+)'", (SOURCE / "meson.build").read_text())[1]
# Each with arguments that come before the others, and an option with a letter that is missing.
PROGRAMS = {
    "softverbs-bench": ([], "--engine=1", "--engines"),
    "softverbs-control": (["stats"], "--jso", "--json"),
    "verbatim-eplb": ([], "--schedle", "--schedule"),
    "verbatim-info": ([], "--chanels", "--channels"),
    "verbatim-kv": ([], "--isolaton", "--isolation"),
    "verbatim-model": ([], "--quant", "--quanta"),
    "verbatim-perf": (["cost", "--plugin", "p.so"], "--conections", "--connections"),
    "verbatim-top": ([], "--intervl", "--interval"),
}
if "verbatim-exporter" in sys.argv[2:]:  # built where libevent is installed
    PROGRAMS["verbatim-exporter"] = ([], "--lisen", "--listen")
# Scripts whose arguments getopt(1) reads, and those that read their own: tools/README.md says why.
GETOPT = ["tools/check", "tools/package", "tools/quickstart", "tools/release", "tools/setup", "tests/arm64/run", "tests/gpu/run"]
OWN = ["tools/cost", "tools/softverbs"]
# What kExitStatuses says, and the table of tools/README.md.
STATUS = re.compile(r"(?:^|[;,:] )(?:of verbatim-kv also )?(\d):? (\w+)")
STATUS_ROW = re.compile(r"^\| (\d) \| (\w+)", re.M)


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=20, cwd=SOURCE, check=False)
    return done.returncode, done.stdout, done.stderr


class CommandLines(unittest.TestCase):
    def program(self, name):
        return BUILD / "tools" / name / name

    def test_UnknownOption_OfPrograms_IsNamedWithTheNearestOne(self):
        for name, (before, unknown, meant) in PROGRAMS.items():
            status, out, err = run(self.program(name), *before, unknown)
            shown = " ".join([name.replace("-control", ""), *before[:1]])
            line = f"{shown}: unknown argument '{unknown}'. Next: is {meant} meant? See {shown} --help\n"
            self.assertEqual((status, out, err), (USAGE, "", line))

    def test_MalformedClause_IsAnErrorOfTheProgramThatTheUserHasTyped(self):
        status, out, err = run(self.program("softverbs-control"), "fault", "bogus")
        self.assertEqual((status, out, err.split(": ")[0]), (USAGE, "", "softverbs"), err)

    def test_UnknownOption_OfScripts_LeadsToHelp(self):
        for name in GETOPT + OWN:
            status, out, err = run(SOURCE / name, "--no-such-option")
            self.assertEqual((status, out), (USAGE, ""), name)
            self.assertIn("--no-such-option", err)
            self.assertTrue(err.endswith(f". See {name} --help\n") and err.count("\n") == 1, err)

    def test_MissingValue_OfScripts_LeadsToHelp(self):
        for name, option in (("tools/check", "-j"), ("tools/package", "--out"), ("tools/cost", "--build"), ("tools/softverbs", "--lib")):
            status, out, err = run(SOURCE / name, option)
            self.assertEqual((status, out), (USAGE, ""), name)
            self.assertTrue(err.endswith(f". See {name} --help\n") and err.count("\n") == 1, err)

    def test_Report_NeedsMatplotlibForAPageOnly(self):
        report = SOURCE / "tools/verbatim-report"
        with tempfile.TemporaryDirectory() as scratch:
            (pathlib.Path(scratch) / "matplotlib.py").write_text("raise ImportError('none')\n")
            file = pathlib.Path(scratch) / "pairs.json"
            file.write_text('{"findings": [], "links": [], "hosts": []}\n')
            without = ["env", f"PYTHONPATH={scratch}", report]
            status, out, err = run(*without, "--help")
            self.assertEqual((status, err), (0, ""))
            self.assertTrue(out.startswith("usage: verbatim-report "), out)
            self.assertEqual(run(*without, "--version"), (0, f"verbatim-report {VERSION}\n", ""))
            status, out, err = run(*without, file, "-o", f"{scratch}/page.html", file)
            self.assertEqual((status, out), (FAILED, ""))
            self.assertTrue(err.startswith("verbatim-report: Python has no matplotlib. Next: ") and err.count("\n") == 1, err)
        line = "verbatim-report: unknown argument '--outpt'. Next: is --output meant? See verbatim-report --help\n"
        self.assertEqual(run(report, "--outpt", "page.html"), (USAGE, "", line))
        self.assertEqual(run(report), (USAGE, "", "verbatim-report: FILE is required. See verbatim-report --help\n"))

    def test_Help_HasTheExitStatusesOfTheManual(self):
        table = STATUS_ROW.findall((SOURCE / "tools/README.md").read_text())
        self.assertEqual([number for number, _ in table][:7], list("0123456"))
        for name in PROGRAMS:
            status, out, err = run(self.program(name), "--help")
            self.assertEqual((status, err), (0, ""), name)
            listed = " ".join(out.split("Exit status: ")[1].split())
            self.assertEqual(STATUS.findall(": " + listed), table[:7], name)

    def test_Help_OfScripts_BeginsWithUsage(self):
        for name in GETOPT + OWN + ["tests/roce/run"]:
            status, out, err = run(SOURCE / name, "--help")
            self.assertEqual((status, err), (0, ""), name)
            self.assertTrue(out.startswith(f"usage: {name} "), out)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
