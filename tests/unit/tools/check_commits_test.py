#!/usr/bin/env python3
#: test check-commits args={source}
"""tools/check_commits and its hook, on commits of a scratch repository: check_commits_test.py SOURCE_DIR."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv[1]).resolve()
BODY = "\n\nIt was not known which of them is right.\n"
RIGHT = (
    "tests: compare the order of two lines" + BODY,
    "rma, tests/unit: pass the reason on" + BODY,
    "README.md: need no number" + BODY,
    "x: " + "y" * 68 + BODY,
    "ci: show what is new\n\nOutput:\n\n    " + "two words " * 10 + "\nhttps://host/" + "x" * 80 + "\n",
)
WRONG = {
    "compare the order of two lines" + BODY: "the subject is not 'area: change in the imperative'",
    "all tests: compare two lines" + BODY: "the subject is not 'area: change in the imperative'",
    "tests: Compare two lines" + BODY: "after the area the subject begins with a verb in lower case, not 'Compare'",
    "tests: added a case" + BODY: "'added' is not the imperative",
    "tests: adds a case" + BODY: "'adds' is not the imperative",
    "tests: adding a case" + BODY: "'adding' is not the imperative",
    "tests: the order of lines" + BODY: "'the' is not the imperative",
    "tests: compare two lines." + BODY: "the subject ends with a full stop",
    "x: " + "y" * 69 + BODY: "the subject has 72 characters, not below 72",
    "tests: compare two lines": "there is no body that says why",
    "tests: compare two lines\n\nSigned-off-by: A <a@host>\n": "there is no body that says why",
    "tests: compare two lines\nIt was wrong.\n": "there is no empty line between subject and body",
    "tests: compare two lines\n\n" + "two words " * 8 + "x\n": "line 3 has 81 characters, more than 80",
}


class Messages(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        (self.root / "tools").mkdir()
        shutil.copy(SOURCE / "tools/check_commits", self.root / "tools")
        shutil.copytree(SOURCE / "tools/hooks", self.root / "tools/hooks")
        self.git("init", "--quiet", "--initial-branch", "main")
        self.commit("begin")

    def run_command(self, *command, given=None):
        identity = {f"GIT_{who}_{what}": "a@host" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(command, input=given, capture_output=True, text=True, env=environment, cwd=self.root, check=False)

    def git(self, *arguments, given=None):
        return self.run_command("git", *arguments, given=given)

    def commit(self, message, *options):
        return self.git("commit", "--quiet", "--allow-empty", "--cleanup=strip", "-F", "-", *options, given=message)

    def check(self, *arguments):
        done = self.run_command(self.root / "tools/check_commits", *arguments)
        return done.returncode, done.stdout + done.stderr

    def test_Message_Right_IsAccepted(self):
        for message in RIGHT:
            self.commit(message)
        self.assertEqual(self.check("HEAD~5..HEAD"), (0, "5 messages are right\n"))

    def test_Message_Wrong_IsNamedWithItsOnlyFault(self):
        for message, fault in WRONG.items():
            (self.root / "message").write_text(message)
            subject = message.split("\n")[0]
            self.assertEqual(self.check("--message", "message"), (1, f"this commit ({subject}): {fault}\n"))

    def test_Range_EachWrongCommit_IsNamedAndMergesAreNot(self):
        self.git("checkout", "--quiet", "-b", "branch")
        self.commit("first" + BODY)
        self.commit("tests: compare two lines" + BODY)
        self.git("checkout", "--quiet", "main")
        self.commit("tests: added" + BODY)
        self.git("merge", "--quiet", "--no-ff", "--no-edit", "branch")
        status, shown = self.check("HEAD~2..HEAD")
        self.assertEqual((status, shown.count("\n")), (1, 2), shown)
        self.assertIn(" (first): ", shown)
        self.assertIn(" (tests: added): ", shown)

    def test_Range_Unknown_IsWrongUsage(self):
        status, shown = self.check("nothing..HEAD")
        self.assertEqual(status, 2)
        self.assertTrue(shown.endswith(". See tools/check_commits --help\n"), shown)

    def test_Hook_WrongMessage_MakesNoCommit(self):
        self.git("config", "core.hooksPath", "tools/hooks")
        refused = self.commit("added a case" + BODY)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("this commit (added a case): the subject is not", refused.stderr)
        comment = "# Please enter the message.\n# ------------------------ >8 ------------------------\n# " + "x " * 80 + "\n" + "y " * 80
        self.assertEqual(self.commit(RIGHT[0] + comment, "--cleanup=scissors").returncode, 0)
        self.assertEqual(self.git("log", "--format=%s").stdout, "tests: compare the order of two lines\nbegin\n")

    def test_Range_WhatGitAndHostsWrite_IsAccepted(self):
        (self.root / "file").touch()
        self.git("add", "file")
        self.commit("tests: compare the order of two lines, which are those of one rank" + " (#1234)" + BODY)
        self.git("revert", "--no-edit", "HEAD")
        self.assertEqual(self.check("HEAD~2..HEAD"), (0, "2 messages are right\n"))

    def test_Hook_FixupAndOtherComments_AreAccepted(self):
        self.git("config", "core.hooksPath", "tools/hooks")
        self.assertEqual(self.git("commit", "--quiet", "--allow-empty", "--fixup", "HEAD").returncode, 0)
        self.git("config", "core.commentChar", ";")
        refused = self.commit("tests: compare two lines\n\n; a comment, not the body\n")
        self.assertIn("there is no body that says why", refused.stderr)

    def test_Hook_Merge_IsAccepted(self):
        self.git("config", "core.hooksPath", "tools/hooks")
        self.git("checkout", "--quiet", "-b", "branch")
        self.commit(RIGHT[0])
        self.git("checkout", "--quiet", "main")
        merged = self.git("merge", "--quiet", "--no-ff", "--no-edit", "branch")
        self.assertEqual(merged.returncode, 0, merged.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
