#!/usr/bin/env python3
#: test find-tests args={source}
"""tests/find_tests.py on folders of its own: what the first lines of tests can say, and what it says of wrong lines:
find_tests_test.py SOURCE_DIR."""

import importlib
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(sys.argv[1]).resolve() / "tests/find_tests.py"
sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPT.parent))
find_tests = importlib.import_module("find_tests")

FACTS = ("link:gtest=found", "link:net=found", "link:perf", "target:plugin=/b/plugin.so", "target:verbs=/b/verbs.so", "target:top")
FACTS += ("path:build=/b", "path:compiler=ccache|g++", "path:mpirun")
PROGRAM = "//: program unit link=gtest\n"
FIELDS = ("kind", "name", "program", "arguments", "environment", "suites", "targets", "timeout", "priority", "protocol")


class Found(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name) / "tests"
        self.root.mkdir()

    def write(self, files):
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def found(self, files, sanitizer="none"):
        """Programs and tests by name, each with its fields by name."""
        self.write(files)
        rows = find_tests.Finder(self.root, "/b/bin", sanitizer, FACTS).find()
        programs = {row[1]: row[2:] for row in rows if row[0] == "program"}
        tests = {row[2]: dict(zip(FIELDS, row[1:])) for row in rows if row[0] == "test"}
        return programs, tests

    def of_head(self, head, sanitizer="none"):
        """The tests of one source, whose program and suite are given."""
        return self.found({"a_test.cc": f"{PROGRAM}//: all suite=unit\n{head}"}, sanitizer)[1]

    def error(self, files):
        with self.assertRaises(find_tests.Wrong) as raised:
            self.found(files)
        return ": ".join(raised.exception.args)


class Programs(Found):
    def test_SourceWithProgram_IsBuiltAndRun(self):
        programs, tests = self.found({"a_test.cc": "//: program a link=net,gtest\n//: test a suite=unit\n\nint x;\n"})
        self.assertEqual(programs, {"a": [f"{self.root}/a_test.cc", "net|gtest", "", ""]})
        expected = ("test", "a", "a", "", "", "unit", "a", "120", "0", "exitcode")
        self.assertEqual(tests, {"a": dict(zip(FIELDS, expected))})

    def test_SourcesOfFolder_AreOneProgram(self):
        folder = "# About the suite.\n#: program unit sources=main.cc,support/child.cc,src/x.cc link=gtest\n#: test all\n#: all suite=unit\n"
        files = {"unit/meson.build": folder, "unit/a_test.cc": "", "unit/more/b_test.cc": "", "unit/main.cc": "", "unit/c.cc": ""}
        files |= {"support/child.cc": "", "../src/x.cc": "", "other_test.cc": "//: in unit\n", "unit/d_test.cc": "//: test d filter=D.*\n"}
        programs, tests = self.found(files | {"unit/e_test.cc": "//: all suite=slow\n//: program e link=gtest\n//: test e\n"})
        sources = ["../src/x.cc", "other_test.cc", "support/child.cc", "unit/a_test.cc", "unit/d_test.cc", "unit/main.cc"]
        found = {pathlib.Path(source).resolve() for source in programs["unit"][0].split("|")}
        self.assertEqual(found, {(self.root / source).resolve() for source in sources + ["unit/more/b_test.cc"]})
        self.assertEqual(programs["e"][0], f"{self.root}/unit/e_test.cc")
        runs = {name: (test["program"], test["arguments"]) for name, test in tests.items()}
        self.assertEqual(runs, {"all": ("unit", ""), "d": ("unit", "--gtest_filter=D.*"), "e": ("e", "")})

    def test_Flags_Defines_AndProgramsThatThisBuildDoesNotRun(self):
        head = "//: program a optimized export_dynamic define=PLUGIN={plugin} link=gtest\n//: test a suite=unit\n"
        others = {"b.cc": "//: program b\n", "c_test.cc": "//: program c\n//: test c suite=unit under=b sanitizer=thread\n"}
        programs, tests = self.found({"a_test.cc": head, **others})
        self.assertEqual(programs, {"a": [f"{self.root}/a_test.cc", "gtest", '-DPLUGIN="/b/plugin.so"', "optimized|export_dynamic"]})
        self.assertEqual(tests["a"]["targets"], "plugin|a")

    def test_ProgramOfAnotherFolder_RunsTestOrIsItsArgument(self):
        files = {"wrap.cc": "//: program wrap\n", "peer.cc": "//: program peer\n"}
        programs, tests = self.found(files | {"a_test.cc": PROGRAM + "//: test a suite=unit under=wrap args='--peer {peer}'\n"})
        self.assertEqual(tests["a"]["program"], "wrap")
        self.assertEqual(tests["a"]["arguments"], "/b/bin/unit|--peer|/b/bin/peer")
        self.assertEqual(set(tests["a"]["targets"].split("|")), {"unit", "wrap", "peer"})
        self.assertEqual(set(programs), {"unit", "wrap", "peer"})

    def test_Scripts_AreRun(self):
        files = {"a_test.py": "#!/usr/bin/env python3\n#: test a suite=unit args={compiler}\n", "run": "#!/bin/sh\n#: test b suite=unit\n"}
        _, tests = self.found(files)
        self.assertEqual(tests["a"]["program"], f"{self.root}/a_test.py")
        self.assertEqual(tests["a"]["arguments"], "ccache|g++")
        self.assertEqual(tests["b"]["program"], f"{self.root}/run")

    def test_SourceThatMesonBuilds_IsLeftToIt(self):
        self.assertEqual(self.found({"meson.build": "x = executable('a', 'a_test.cc')\n", "a_test.cc": ""}), ({}, {}))


class Tests(Found):
    def test_Settings_AreThoseOfTheTest(self):
        head = "//: test a full threads alone timeout=7 priority=-2 protocol=gtest args='--n 2' filter=A.*:-*B* X=1 Y='a b' needs=verbs\n"
        test = self.of_head(head + "//: benchmark b\n")["a"]
        expected = ("test-alone", "a", "unit", "--n|2|--gtest_filter=A.*:-*B*", "X=1|Y=a b", "unit|full|threads")
        self.assertEqual(test, dict(zip(FIELDS, expected + ("unit|verbs", "7", "-2", "gtest"))))
        self.assertEqual(self.of_head("//: benchmark b\n")["b"]["kind"], "benchmark")

    def test_FoldersAndLinesBefore_ApplyToTests_WhichReplaceAndAdd(self):
        files = {"meson.build": "#: all suite=unit args=-x A=1 B=1 C=1\n", "f/meson.build": "#: all B=2 C=2 filter=*One*:-Two\n"}
        files["f/a_test.cc"] = PROGRAM + "//: test a\n//: all C=3 args=-y\n//:   + filter=Three\n//: test b\n"
        _, tests = self.found(files)
        self.assertEqual(tests["a"]["environment"], "A=1|B=2|C=2")
        self.assertEqual(tests["b"]["environment"], "A=1|B=2|C=3")
        self.assertEqual(tests["b"]["arguments"], "-x|-y|--gtest_filter=*One*:Three:-Two")

    def test_ValueOfTheNearestLine_Wins(self):
        lines = ("all B=file C=file D=file E=file F=file", "set s C=set D=set E=set F=set", "test a-{} use=s D=test E=test F=test")
        head = "".join(f"//: {line}\n" for line in lines) + "//:   when sanitizer=none E=when F=when\n//:   x F=variant\n"
        files = {"meson.build": "#: all suite=unit A=folder B=folder C=folder D=folder\n", "a_test.cc": PROGRAM + head}
        test = self.found(files)[1]["a-x"]
        self.assertEqual(test["environment"], "A=folder|B=file|C=set|D=test|E=when|F=variant")

    def test_Variants_AddToTheLineAbove(self):
        head = "//: test net-{} A=1 V={variant}\n//:   thread full\n//:   inline A=2\n//:   + B=3\n//:   v{n} n=6,7 N={n}\n"
        tests = self.of_head(head)
        self.assertEqual({name: (test["environment"], test["suites"]) for name, test in tests.items()}, {
            "net-thread": ("A=1|V=thread", "unit|full"),
            "net-inline": ("A=2|V=inline|B=3", "unit"),
            "net-v6": ("A=1|V=v6|N=6", "unit"),
            "net-v7": ("A=1|V=v7|N=7", "unit"),
        })

    def test_ListsOfName_AreCrossed(self):
        tests = self.of_head("//: test {engine}-{qps} engine=thread,inline qps=1,2 E={engine} Q={qps}\n")
        expected = {f"{e}-{q}": f"E={e}|Q={q}" for e in ("thread", "inline") for q in "12"}
        self.assertEqual({name: test["environment"] for name, test in tests.items()}, expected)

    def test_Sets_AreUsedByName(self):
        head = "//: set over-a A=1 filter=-X\n//: set over-b A=2\n//: test {over} over=a,b use=over-{over} filter=Y B=1\n"
        tests = self.of_head(head)
        self.assertEqual(tests["a"]["environment"], "A=1|B=1")
        self.assertEqual(tests["a"]["arguments"], "--gtest_filter=Y:-X")
        self.assertEqual(tests["b"]["environment"], "A=2|B=1")

    def test_Others_AreTheCasesOfTheOtherVariants(self):
        tests = self.of_head("//: test {}\n//:   a filter=A.*:B.*\n//:   c filter=C.*\n//:   rest filter=-D.*:{others}\n")
        self.assertEqual(tests["rest"]["arguments"], "--gtest_filter=-D.*:A.*:B.*:C.*")

    def test_Shards_AreTestsWithPartsOfTheCases(self):
        tests = self.of_head("//: test a shards=2\n")
        self.assertEqual(tests["a-1"]["environment"], "GTEST_TOTAL_SHARDS=2|GTEST_SHARD_INDEX=1")
        self.assertEqual(set(tests), {"a-0", "a-1"})

    def test_ValuesThatNameTargets_AreNeeded(self):
        test = self.of_head("//: test a LIBRARY={verbs} OUT={build}/out args='--plugin {plugin}'\n")["a"]
        self.assertEqual(test["environment"], "LIBRARY=/b/verbs.so|OUT=/b/out")
        self.assertEqual(test["arguments"], "--plugin|/b/plugin.so")
        self.assertEqual(set(test["targets"].split("|")), {"plugin", "verbs", "unit"})

    def test_WhatThisBuildHasNot_LeavesTestsOut(self):
        head = "//: test a X={top}\n//: test b has=mpirun\n//: test c args={mpirun}\n//: test d needs=top\n//: test e has=plugin\n"
        self.assertEqual(set(self.of_head(head)), {"e"})
        self.assertEqual(self.found({"a_test.cc": "//: program p link=perf,gtest\n//: test a suite=unit\n"}), ({}, {}))

    def test_Sanitizers_LeaveTestsOutAndChangeSettings(self):
        head = "//: test a N=1\n//:   when sanitizer=any N=2\n//:   when sanitizer=thread filter=-Slow.*\n//:   when has=top N=3\n"
        head += "//: test b sanitizer=none\n//: test c sanitizer=thread\n//: test a2 sanitizer=any\n"
        plain, threads, address = (self.of_head(head, kind) for kind in ("none", "thread", "address,undefined"))
        self.assertEqual([set(tests) for tests in (plain, threads, address)], [{"a", "b"}, {"a", "c", "a2"}, {"a", "a2"}])
        self.assertEqual([tests["a"]["environment"] for tests in (plain, threads, address)], ["N=1", "N=2", "N=2"])
        self.assertEqual([tests["a"]["arguments"] for tests in (plain, threads)], ["", "--gtest_filter=-Slow.*"])


class Output(Found):
    def run_script(self, head):
        self.write({"a_test.cc": PROGRAM + head})
        command = [SCRIPT, self.root, "/b/bin", "none", *FACTS]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.returncode, answer.stdout, answer.stderr

    def test_Lines_HaveFieldsBetweenTabs(self):
        lines = f"program\tunit\t{self.root}/a_test.cc\tgtest\t\t\ntest\ttest\ta\tunit\t-x|-y\t\tunit\tunit\t120\t0\texitcode\n"
        self.assertEqual(self.run_script("//: test a suite=unit args='-x -y'\n"), (0, lines, ""))

    def test_Error_EndsTheScript(self):
        self.assertEqual(self.run_script("//: tset a\n"), (1, "", "tests/a_test.cc:2: unknown directive 'tset a'\n"))


class Errors(Found):
    def test_WrongLine_IsNamed(self):
        for line, what in {
            "//: tset a": "unknown directive 'tset a'",
            "//: test": "'test' needs a name",
            "//:test a": "a space and a word must follow the colon",
            "//: test a X='b": "No closing quotation",
            "//: test a X=b|c": "a directive has no '|' and no tab, which separate fields for Meson",
            "//: test a": "the test 'a' has no suite",
            "//: test a suite=unit slow": "unknown word 'slow'",
            "//: test a suite=unit sanitizer=adress": "sanitizer=adress is none of none, any, address, undefined, thread",
            "//: test a suite=unit tiemout=3": "unknown setting 'tiemout', or a list that the name does not mention",
            "//: test a suite=unit 3=3": "unknown setting '3'",
            "//: test a suite=unit timeout=long": "timeout=long is no number",
            "//: test a suite=unit shards=0": "shards=0 is no number from 1",
            "//: test a suite=unit shards=-2": "shards=-2 is no number from 1",
            "//: test a suite=unit protocol=gtst": "protocol=gtst is none of exitcode, gtest, tap, rust",
            "//: test a suite=unit,full": "suite=unit,full is no word",
            "//: test a suite=": "suite= is no word",
            "//: test a suite=unit X={plugn}": "'plugn' is unknown: tests/bin/meson.build has no such name, and no test program has it",
            "//: test a suite=unit X={gtest}": "'gtest' has no path",
            "//: test a suite=unit needs=plugn": "'plugn' is unknown: tests/bin/meson.build has no such name, and no test program has it",
            "//: test a suite=unit use=b": "there is no set 'b'",
            "//: test a{b} suite=unit": "'{b}' is unknown",
            "//: all tiemout=3": "unknown setting 'tiemout'",
            "//: in": "'in' needs a name",
            "//: in b": "there is no program 'b'",
            "//: program b fast": "a program has no 'fast'",
            "//: program unit": "there is another 'unit' in tests/a_test.cc:1",
            "//: program plugin": "there is another 'plugin' in tests/bin/meson.build",
            "//: program build": "there is another 'build' in tests/meson.build",
            "//: program b sources=b.cc": "there is no source b.cc",
        }.items():
            with self.subTest(line):
                self.assertEqual(self.error({"a_test.cc": f"{PROGRAM}\n{line}\n"}), f"tests/a_test.cc:3: {what}")

    def test_WrongIndentedLine_IsNamed(self):
        for lines, what in {
            "//: all X=1\n//:   a": "only a test has variants",
            "//: in unit\n//:   when sanitizer=any X=1": "'in' has no conditions",
            "//: test a suite=unit\n//:   when X=1": "'when' needs a condition: has=NAME or sanitizer=NAME",
            "//: test {} suite=unit\n//:   a b": "unknown word 'b'",
        }.items():
            with self.subTest(lines):
                self.assertEqual(self.error({"a_test.cc": f"{PROGRAM}{lines}\n"}), f"tests/a_test.cc:3: {what}")
        self.assertEqual(self.error({"a_test.cc": "//:   a\n"}), "tests/a_test.cc:1: an indented line needs a directive above it")
        lines = PROGRAM + "//: test a suite=unit\n//:   b\n"
        self.assertEqual(self.error({"a_test.cc": lines}), "tests/a_test.cc:2: the name of a test with variants needs '{}' in their place")

    def test_WrongNameInSharedLine_IsReportedThere(self):
        source = {"f/a_test.cc": PROGRAM + "//: test a suite=unit use=s\n"}
        unknown = "'nobody' is unknown: tests/bin/meson.build has no such name, and no test program has it"
        for word, what in {
            "needs=nobody": unknown,
            "has=nobody": unknown,
            "under=nobody": unknown,
            "X={nobody}": unknown,
            "args='-x {nobody}'": unknown,
            "filter=A.*:-{nobody}": unknown,
            "use=nobody": "there is no set 'nobody'",
            "shards=none": "shards=none is no number from 1",
        }.items():
            for line in (f"#: all {word}\n#: set s\n", f"#: set s {word}\n", f"#: set s X=1\n#:   when sanitizer=none {word}\n"):
                if "use=" in word and line.startswith("#: set"):
                    continue  # a set uses no other
                with self.subTest(line):
                    number = 1 + ("when" in line)
                    self.assertEqual(self.error({"f/meson.build": line, **source}), f"tests/f/meson.build:{number}: {what}")

    def test_SettingThatHasNoEffectOnScript_IsAnError(self):
        for word in ("filter=A.*", "filter=-A.*", "under=unit", "shards=2"):
            files = {"meson.build": "#: all suite=unit\n", "a_test.cc": PROGRAM + "//: test a\n", "b_test.py": f"#!/bin/sh\n#: test b {word}\n"}
            with self.subTest(word):
                what = f"'{word.partition('=')[0]}' has no effect on a script"
                self.assertEqual(self.error(files), f"tests/b_test.py:2: {what}")
                files |= {"meson.build": f"#: all suite=unit {word}\n", "b_test.py": "#!/bin/sh\n#: test b\n"}
                self.assertEqual(self.error(files), f"tests/meson.build:1: {what}")

    def test_ProgramThatNoTestRuns_IsAnError(self):
        what = "no test runs the program 'unit'. Next: add a line '//: test NAME'"
        self.assertEqual(self.error({"a_test.cc": "// About it.\n" + PROGRAM}), f"tests/a_test.cc:2: {what}")
        other = {"b_test.cc": "//: program b\n//: test b suite=unit has=mpirun,unit\n"}
        self.assertEqual(self.error({"a_test.cc": PROGRAM, **other}), f"tests/a_test.cc:1: {what}")
        for words in ("under=unit", "needs=unit", "X={unit}", "needs=unit has=mpirun"):
            with self.subTest(words):
                self.found({"a_test.cc": PROGRAM, "b_test.cc": f"//: program b\n//: test b suite=unit {words}\n"})
        of_missing_library = {"a_test.cc": "//: program p link=perf\n//: test p suite=unit\n", "b_test.cc": "//: in p\n"}
        self.assertEqual(self.found(of_missing_library), ({}, {}))

    def test_NameOfTwoTests_IsAnError(self):
        files = {"a_test.cc": PROGRAM + "//: test a suite=unit\n", "b_test.py": "#!/usr/bin/python3\n#: test a suite=unit\n"}
        self.assertEqual(self.error(files), "tests/b_test.py:2: the test 'a' is also in tests/a_test.cc:2")

    def test_LineBelowTheHead_IsAnError(self):
        lines = PROGRAM + "//: test a suite=unit\nint x;\n//: test b suite=unit\n"
        self.assertEqual(self.error({"a_test.cc": lines}), "tests/a_test.cc:4: a directive stands below the first lines of the file")

    def test_TestWithoutProgramOrName_IsAnError(self):
        self.assertIn("tests/a_test.cc:1: it belongs to no program.", self.error({"a_test.cc": "int x;\n"}))
        (self.root / "a_test.cc").unlink()
        self.assertIn("tests/b_test.py:1: no test is named.", self.error({"b_test.py": "#!/usr/bin/python3\n"}))
        (self.root / "b_test.py").unlink()
        self.assertEqual(self.error({"c.cc": "//: test a suite=unit\n"}), "tests/c.cc:1: there is no program for this test to run")

    def test_ProgramWithWrongLink_OrWithoutSource_IsAnError(self):
        lines = "//: program a link=plugin\n//: test a suite=unit\n"
        self.assertEqual(self.error({"a_test.cc": lines}), "tests/a_test.cc:1: nothing is linked with 'plugin'")
        (self.root / "a_test.cc").unlink()
        lines = "#: program a\n#: test a suite=unit\n"
        self.assertEqual(self.error({"meson.build": lines}), "tests/meson.build:1: the program 'a' has no source")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
