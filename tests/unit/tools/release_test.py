#!/usr/bin/env python3
#: test release timeout=300 args='{source} {meson}'
"""tools/release and tools/package on a small project in a scratch repository: release_test.py SOURCE_DIR MESON.

Nothing is compiled: the project has a program of this system three times, and documents. tools/release runs with a tools/package that
writes a line, and tools/package itself twice, in two places and with other modes and times of files: the bytes are the same.
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv[1]).resolve()
MESON = sys.argv[2]
VERSION = "1.2.0-rc3"
CHANGES = f"# Changes\n\n## {VERSION}\n\n### Added\n\n- A release.\n\n## 1.1.0\n\n- Before.\n"
PROJECT = f"""project(
  'verbatim',
  version: '{VERSION}',
)
foreach tag : ['plugin', 'tools', 'softverbs']
  install_data('/bin/true', rename: tag, install_dir: get_option('bindir'), install_tag: tag)
endforeach
install_data('LICENSE', 'CHANGELOG.md', install_dir: get_option('datadir') / 'doc/verbatim', install_tag: 'doc')
"""
# In place of tools/package: what it was called with, and whether the folder is a clean clone.
PACKAGE = """#!/bin/sh
[ "$1" != "$FAILS" ] || exit 1
[ -z "$(git status --porcelain)" ] && [ ! -e untracked ] || exit 2
echo "$1 of $(git rev-parse HEAD)" >"$3/package.$1.$7"
"""


class Project(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name).resolve()
        bin_ = self.scratch / "bin"
        bin_.mkdir()
        for program in ("dpkg-deb", "rpmbuild", "pip", "aarch64-linux-gnu-g++", "qemu-aarch64"):
            if not shutil.which(program):
                (bin_ / program).symlink_to("/bin/true")
        (bin_ / "meson").symlink_to(MESON)
        identity = {f"GIT_{who}_{what}": "a@host" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "SOURCE_DATE"))}
        self.environment |= identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "FAILS": ""}
        self.environment["PATH"] = f"{bin_}:{self.environment['PATH']}"
        self.root = self.scratch / "project"

    def make_project(self, package=None):
        (self.root / "tools").mkdir(parents=True)
        for name in ("LICENSE", "meson_options.txt", "tools/package", "tools/release", ".gitignore"):
            shutil.copy(SOURCE / name, self.root / name)
        if package:
            (self.root / "tools/package").write_text(package)
        (self.root / "meson.build").write_text(PROJECT)
        (self.root / "CHANGELOG.md").write_text(CHANGES)
        self.run_in(self.root, "git", "init", "--quiet", "--initial-branch", "main")
        self.commit()

    def run_in(self, directory, *command, **variables):
        environment = self.environment | variables
        return subprocess.run([*map(str, command)], cwd=directory, env=environment, capture_output=True, text=True, check=False)

    def commit(self):
        self.run_in(self.root, "git", "add", "-A")
        self.run_in(self.root, "git", "commit", "--quiet", "-m", "change")

    def sum_of(self, path):
        return hashlib.sha256(path.read_bytes()).hexdigest()


class Release(Project):
    def setUp(self):
        super().setUp()
        self.make_project(PACKAGE)

    def release(self, *arguments, root=None, **variables):
        done = self.run_in(root or self.root, "tools/release", *arguments, **variables)
        return done.returncode, done.stdout, done.stderr

    def tags(self):
        return self.run_in(self.root, "git", "tag").stdout.split()

    def check_refused(self, status, text, *arguments, **variables):
        shown = self.release(*(arguments or [VERSION]), **variables)
        self.assertEqual((shown[0], shown[1]), (status, ""), shown)
        self.assertRegex(shown[2], rf"^tools/release: .*{text}.*\n$")
        self.assertEqual(self.tags(), [])
        self.assertFalse((self.root / "dist").exists())

    def test_Release_HasSourcesPackagesNotesChecksumsAndTag(self):
        head = self.run_in(self.root, "git", "rev-parse", "HEAD").stdout.strip()
        status, _, err = self.release(VERSION)
        self.assertEqual(status, 0, err)
        out = self.root / "dist" / VERSION
        packages = [f"package.{kind}.{machine}" for kind in ("archive", "deb", "rpm", "wheel") for machine in ("aarch64", "x86_64")]
        sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
        self.assertEqual(sorted(sums), sorted(["NOTES.md", f"verbatim-{VERSION}.tar.gz", *packages]))
        self.assertEqual(sums, {name: self.sum_of(out / name) for name in sums})
        self.assertEqual(sorted(path.name for path in out.iterdir()), sorted([*sums, "SHA256SUMS"]))
        self.assertEqual((out / "package.rpm.aarch64").read_text(), f"rpm of {head}\n")
        self.assertEqual((out / "NOTES.md").read_text(), "\n### Added\n\n- A release.\n\n")
        tag = self.run_in(self.root, "git", "tag", "-l", "--format=%(*objectname) %(contents)").stdout
        self.assertEqual(tag.strip(), f"{head} Verbatim {VERSION}\n\n### Added\n\n- A release.")
        with tarfile.open(out / f"verbatim-{VERSION}.tar.gz") as archive:
            self.assertIn(f"verbatim-{VERSION}/CHANGELOG.md", archive.getnames())

    def test_Release_OfATag_HasTheSameBytesInAnotherClone(self):
        self.assertEqual(self.release(VERSION)[0], 0)
        other = self.scratch / "a longer path/project"
        self.run_in(self.root, "git", "clone", "--quiet", self.root, other)
        (other / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n")
        (other / "untracked").touch()
        status, _, err = self.release(VERSION, "--out", self.scratch / "again", root=other, SOURCE_DATE_EPOCH="7")
        self.assertEqual(status, 0, err)
        self.assertEqual((self.scratch / "again/SHA256SUMS").read_text(), (self.root / "dist" / VERSION / "SHA256SUMS").read_text())

    def test_UncommittedChange_IsRefused(self):
        (self.root / "untracked").touch()
        self.check_refused(1, "there are changes that are not committed")

    def test_ChangelogOrMesonOfAnotherVersion_IsRefused(self):
        self.check_refused(1, "meson.build has the version 1.2.0-rc3", "1.1.0")
        unreleased = CHANGES.replace("\n## ", "\n## Unreleased\n\n## ", 1)
        for changes in (CHANGES.replace(VERSION, "Unreleased"), unreleased, f"## {VERSION}\n\n## 1.1.0\n- x\n"):
            (self.root / "CHANGELOG.md").write_text(changes)
            self.commit()
            self.check_refused(1, f"the first section of CHANGELOG.md is not '## {VERSION}'")

    def test_VersionOrArguments_Wrong_AreWrongUsage(self):
        for arguments in (["1.2"], ["v1.2.0"], ["1.2.0-beta"], [VERSION, "1.1.0"], ["--fast", VERSION]):
            self.check_refused(2, "See tools/release --help", *arguments)

    def test_PackageFails_NothingIsLeft(self):
        status, out, _ = self.release(VERSION, FAILS="wheel")
        self.assertEqual((status, out), (1, ""))
        self.assertEqual(self.tags(), [])
        self.assertFalse((self.root / "dist").exists())

    def test_FilesExist_AreNotReplaced(self):
        (self.root / "dist" / VERSION).mkdir(parents=True)
        status, _, err = self.release(VERSION)
        self.assertEqual((status, self.tags()), (1, []))
        self.assertIn("exists. Next: remove it", err)


class Package(Project):
    def setUp(self):
        super().setUp()
        self.make_project()

    def build_twice(self, kind):
        """The files of two builds of one commit, by their names."""
        other = self.scratch / "a longer path/project"
        self.run_in(self.root, "git", "clone", "--quiet", self.root, other)
        (other / "CHANGELOG.md").chmod(0o600)
        os.utime(other / "CHANGELOG.md", (7, 7))
        built = []
        for number, root in enumerate((self.root, other)):
            out = self.scratch / f"out{number}"
            done = self.run_in("/", root / "tools/package", kind, "--out", out, "--build", root / "build")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            built.append({path.name: path for path in out.iterdir()})
        first, second = ({name: self.sum_of(path) for name, path in files.items()} for files in built)
        self.assertEqual(first, second)
        return built[0]

    def test_Archive_BuiltTwice_HasTheSameBytesAndNothingOfTheMachine(self):
        ((name, path),) = self.build_twice("archive").items()
        self.assertRegex(name, rf"^verbatim-{re.escape(VERSION)}-\w+\.tar\.gz$")
        when = int(self.run_in(self.root, "git", "log", "-1", "--format=%ct").stdout)
        with tarfile.open(path) as archive:
            members = archive.getmembers()
        top = name.removesuffix(".tar.gz")
        self.assertEqual([member.name for member in members], sorted(member.name for member in members))
        self.assertIn(f"{top}/share/doc/verbatim/CHANGELOG.md", [member.name for member in members])
        for member in members:
            self.assertTrue(member.name.split("/")[0] == top, member.name)
            self.assertEqual((member.uid, member.gid, member.uname, member.gname, member.mtime), (0, 0, "", "", when), member.name)
            self.assertIn(member.mode, (0o755, 0o644), member.name)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg-deb")
    def test_Debs_BuiltTwice_HaveTheSameBytesAndAVersionBeforeTheRelease(self):
        for name, path in self.build_twice("deb").items():
            self.assertRegex(name, r"^[a-z-]+_1\.2\.0~rc3_\w+\.deb$")
            self.assertEqual(self.run_in("/", "dpkg-deb", "--field", path, "Version").stdout, "1.2.0~rc3\n")
            self.assertGreater(int(self.run_in("/", "dpkg-deb", "--field", path, "Installed-Size").stdout), 10)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
