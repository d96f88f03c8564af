#!/usr/bin/env python3
#: test install timeout=60 args='{meson} {build} {prefix} {bindir} {libdir} {datadir} {mandir}'
#:   + needs=manuals,cost_allocator,plugin,softverbs
#:   + needs=softverbs_files,softverbs_mlx5,softverbs_bench,softverbs_control,verbatim_eplb
#:   + needs=verbatim_info,verbatim_kv,verbatim_model,verbatim_perf,verbatim_report,verbatim_top
#:   when has=verbatim_exporter args=verbatim-exporter needs=verbatim_exporter
"""What `meson install` puts where: install_test.py MESON BUILD_DIR PREFIX BINDIR LIBDIR DATADIR MANDIR [PROGRAM...].

Installs an existing build into a scratch root, as a package is made, without building anything.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

MESON, BUILD, PREFIX, BIN, LIB, DATA, MAN = sys.argv[1:8]
SOURCE = pathlib.Path(__file__).resolve().parents[2]
PRIVATE = f"{LIB}/verbatim"
NCCL_TESTS = (  # in alphabetical order
    *("all_gather", "all_reduce", "alltoall", "alltoallv", "broadcast", "gather", "hypercube", "reduce", "reduce_scatter"),
    *("scatter", "sendrecv"),
)
TOOLS = [f"verbatim-{name}" for name in ("eplb", "info", "kv", "model", "perf", "report", "top")]
PROGRAMS = ["softverbs", "softverbs-bench"] + sorted(TOOLS + sys.argv[8:])  # those that are built only where it is possible
# A program that loads one of these by its name must get the system's.
SHADOWING = re.compile(r"^lib(ibverbs|mlx5|rdmacm|nccl|cuda)\.so")
# The subcommands of programs, each with the program that prints its help.
SUBCOMMANDS = {
    "verbatim-perf": (f"{BIN}/verbatim-perf", ["cost", "qp-order"]),
    "softverbs": (f"{PRIVATE}/softverbs/softverbs-control", ["fault", "hold", "release", "stats"]),
}
OPTION_LINE = re.compile(r"^  (-\S.*?)(?:  |$)", re.M)
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def options_in(help_text):
    return {option for line in OPTION_LINE.findall(help_text) for option in OPTION.findall(line)}


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        root = pathlib.Path(cls.directory.name).resolve()
        environment = {name: value for name, value in os.environ.items() if name != "DESTDIR"}
        done = subprocess.run(
            [MESON, "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", root],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # A prefix that nothing was configured with.
        cls.prefix = root / "moved"
        (root / PREFIX.lstrip("/")).rename(cls.prefix)
        cls.files = sorted(
            str(path.relative_to(cls.prefix)) for path in cls.prefix.rglob("*") if path.is_file() or path.is_symlink()
        )

    def below(self, directory):
        return [name[len(directory) + 1 :] for name in self.files if name.startswith(directory + "/")]

    def run_installed(self, program, *arguments, **variables):
        # Meson puts the libraries of the build directory on the library path.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "LD_LIBRARY_PATH" and not name.startswith(("SOFTVERBS_", "VERBATIM_"))
        }
        environment["PATH"] = f"{self.prefix / BIN}:{environment['PATH']}"
        return subprocess.run([program, *arguments], env={**environment, **variables}, capture_output=True, text=True)

    def test_Programs_AreInBindir(self):
        self.assertEqual(self.below(BIN), PROGRAMS)
        for name in PROGRAMS:
            self.assertTrue(os.access(self.prefix / BIN / name, os.X_OK), name)

    def test_Libdir_HasThePluginAndOnePrivateDirectory(self):
        files = self.below(LIB)
        self.assertEqual([name for name in files if "/" not in name], ["libnccl-net-verbatim.so"])
        self.assertEqual(
            [name for name in files if "/" in name],
            [
                "verbatim/libverbatim-counting-allocator.so",
                *(f"verbatim/nccl-tests/{name}_perf" for name in NCCL_TESTS),
                "verbatim/softverbs/files/libsoftverbs-files.so",
                "verbatim/softverbs/lib/libibverbs.so",
                "verbatim/softverbs/lib/libibverbs.so.1",
                "verbatim/softverbs/lib/libmlx5.so",
                "verbatim/softverbs/lib/libmlx5.so.1",
                "verbatim/softverbs/softverbs-control",
            ],
        )

    def test_Plugin_HasItsNameAsSoname(self):
        plugin = self.prefix / LIB / "libnccl-net-verbatim.so"
        shown = subprocess.run(["objdump", "-p", plugin], capture_output=True, text=True, check=True).stdout
        self.assertRegex(shown, r"\n *SONAME +libnccl-net-verbatim\.so\n")

    def test_LibrariesOfTheSystem_AreNotShadowed(self):
        for name in self.files:
            if SHADOWING.match(os.path.basename(name)):
                self.assertEqual(os.path.dirname(name), f"{PRIVATE}/softverbs/lib")

    def test_LicenceAndManuals_AreInDatadir(self):
        files = self.below(f"{DATA}/doc/verbatim")
        for name in ("LICENSE", "CHANGELOG.md", "RESULTS.md", "SECURITY.md"):
            self.assertIn(name, files)
        for part in ("examples", "plugin", "src", "tests", "tools"):
            own = {f"{part}/{path.relative_to(SOURCE / part)}" for path in (SOURCE / part).rglob("*.md")}
            installed = {name for name in files if name.startswith(f"{part}/") and name.endswith(".md")}
            self.assertEqual(installed, own)
        examples = {f"examples/{path.name}" for path in (SOURCE / "examples").iterdir()}
        self.assertEqual({name for name in files if name.startswith("examples/")}, examples)

    def test_LinksBetweenInstalledManuals_LeadSomewhere(self):
        done = subprocess.run(
            [sys.executable, SOURCE / "tests/structure/documents_test.py", self.prefix / DATA / "doc/verbatim"],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout.strip() + done.stderr), (0, ""))

    def test_AllOtherFiles_AreNamedHere(self):
        known = (BIN, LIB, f"{DATA}/doc/verbatim", f"{DATA}/bash-completion/completions", MAN)
        places = tuple(f"{place}/" for place in known)
        self.assertEqual([name for name in self.files if not name.startswith(places)], [])

    def test_ProgramsOfNcclTests_AreTheirOperations(self):
        for name in NCCL_TESTS:
            program = self.prefix / PRIVATE / f"nccl-tests/{name}_perf"
            shown = self.run_installed("softverbs", "--", program, "-g", "2", "-b", "1K", "-e", "1K", "-n", "1")
            self.assertEqual(shown.returncode, 0, shown.stdout + shown.stderr)
            self.assertIn(f"# Collective test concluded: {name}_perf\n", shown.stdout)

    def test_Launcher_FindsSoftverbsFromAnyPrefix(self):
        link = self.prefix / "link"
        link.symlink_to(self.prefix / BIN / "softverbs")
        for launcher in (self.prefix / BIN / "softverbs", link):
            shown = self.run_installed(launcher, "--devices", "2", "--", "verbatim-info", "--json")
            self.assertEqual((shown.returncode, shown.stderr), (0, ""))
            self.assertIn(f"{self.prefix}/{PRIVATE}/softverbs/lib/libibverbs.so.1", shown.stdout)
            self.assertIn('"softverbs1"', shown.stdout)
            self.assertEqual(self.run_installed(launcher, "stats").stderr, "")
        usage = self.run_installed(launcher, "--help").stdout
        self.assertTrue(usage.startswith("usage: softverbs "), usage)
        self.assertNotIn("tools/softverbs", usage)
        link.unlink()

    def test_Launcher_WithoutItsLibraries_NamesThePlace(self):
        place = self.prefix / PRIVATE / "softverbs"
        place.rename(place.with_suffix(".moved"))
        try:
            missing = self.run_installed("softverbs", "true")
        finally:
            place.with_suffix(".moved").rename(place)
        self.assertEqual(missing.returncode, 2)
        self.assertIn(f"{PRIVATE}/softverbs/lib. Next: install Verbatim again", missing.stderr)

    def test_InstalledPlugin_MovesDataBetweenInstalledTools(self):
        job = ["verbatim-perf", "sendrecv", "--plugin", "verbatim", "-b", "8", "-e", "8K", "-f", "8"]
        launch = ["softverbs", "--namespace", "install", "--"]
        done = self.run_installed(*launch, *job, SOFTVERBS_LOCK_LIMIT="none")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("# Wrong elements    : 0 OK", done.stdout)
        self.assertIn(f", {self.prefix}/{LIB}/libnccl-net-verbatim.so)", done.stdout)

    def test_Version_IsTheSameEverywhere(self):
        shown = {}
        for name in PROGRAMS:
            done = self.run_installed(name, "--version")
            self.assertEqual((done.returncode, done.stderr), (0, ""), name)
            self.assertTrue(done.stdout.startswith(f"{name} "), done.stdout)
            shown[name] = done.stdout[len(name) + 1 :]
        self.assertEqual(len(set(shown.values())), 1, shown)
        release, tables = shown["verbatim-info"].splitlines()
        project = subprocess.run([MESON, "introspect", BUILD, "--projectinfo"], capture_output=True, text=True).stdout
        self.assertRegex(project, rf'"version": "{re.escape(release.split()[0])}"')
        self.assertRegex(release, r"^\d+\.\d+\.\d+(-rc\d+)?( \(commit [0-9a-f]{12,}(-dirty)?\))?$")
        plugin = self.prefix / LIB / "libnccl-net-verbatim.so"
        self.assertIn(release.split()[0].encode() + b"\0", plugin.read_bytes())
        exported = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True).stdout
        for table in re.findall(r"\bnccl\w+_v(\d+)$", exported, re.M):
            self.assertIn(f" v{table}", tables)
        for table in re.findall(r" v(\d+)", tables):
            self.assertRegex(exported, rf"(?m)_v{table}$")

    def helps(self, name):
        """The help of a program and of its subcommands, by word."""
        program, words = SUBCOMMANDS.get(name, ("", []))
        texts = {word: self.run_installed(self.prefix / program, word, "--help").stdout for word in words}
        return {"": self.run_installed(name, "--help").stdout, **texts}

    def manual(self, name):
        text = (self.prefix / MAN / f"man{name[-1]}" / name).read_text()
        for escaped, character in (("\\-", "-"), ("\\:", ""), ("\\&", ""), ("\\(ha", "^"), ("\\(aq", "'")):
            text = text.replace(escaped, character)
        return text

    def test_EveryProgram_HasAManualWithAllItsOptions(self):
        pages = [f"man1/{name}.1" for name in PROGRAMS] + ["man7/libnccl-net-verbatim.7"]
        self.assertEqual(self.below(MAN), sorted(pages))
        for name in PROGRAMS:
            page = self.manual(f"{name}.1")
            heads = re.findall(r"^\.TP\n\.B (-.*)$", page, re.M)
            in_page = {option for line in heads for option in OPTION.findall(line)}
            texts = self.helps(name)
            self.assertEqual(in_page, set().union(*map(options_in, texts.values())), name)
            self.assertIn("--help", in_page)
            words = {word for text in texts.values() for word in text.split() if word.isalpha()}
            self.assertEqual([word for word in words if word not in page], [], name)

    def test_ManualOfThePlugin_HasEverySetting(self):
        page = self.manual("libnccl-net-verbatim.7")
        table = (SOURCE / "plugin/README.md").read_text().split("| variable | NCCL's variable |")[1].split("\n\n")[0]
        rows = [row.split(" | ") for row in re.findall(r"^\| `(VERBATIM_\w+` \| .*) \|$", table, re.M)]
        self.assertGreater(len(rows), 30)
        self.assertEqual(re.findall(r"^\.B (VERBATIM_\w+)$", page, re.M), [row[0].rstrip("`") for row in rows])
        for row in rows:
            self.assertIn(f"Default: {row[3].replace('`', '')}.", page)

    def test_Manuals_AreCorrectRoff(self):
        if not shutil.which("groff"):
            self.skipTest("no groff")
        for page in (self.prefix / MAN).rglob("*.[17]"):
            done = subprocess.run(["groff", "-man", "-ww", "-z", page], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""), page)

    def complete(self, *words):
        """What bash offers for the last word."""
        script = """. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _verbatim_complete "$1"
            [ ${#COMPREPLY[@]} -eq 0 ] || printf '%s\\n' "${COMPREPLY[@]}" """
        completions = self.prefix / DATA / "bash-completion/completions"
        done = self.run_installed("bash", "-c", script, "bash", completions / words[0], *words)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.split()

    def test_Completion_OffersWhatHelpLists(self):
        self.assertEqual(self.below(f"{DATA}/bash-completion/completions"), PROGRAMS)
        for name in PROGRAMS:
            for word, text in self.helps(name).items():
                offered = self.complete(name, *([word] if word else []), "-")
                self.assertEqual(set(offered), options_in(text), (name, word))

    def test_Completion_OffersValuesAndSubcommands(self):
        self.assertEqual(self.complete("verbatim-perf", "--memory", ""), ["host", "cuda"])
        self.assertEqual(self.complete("verbatim-perf", "all"), ["all_gather", "all_reduce", "alltoall", "alltoall_put", "alltoallv"])
        self.assertEqual(self.complete("verbatim-perf", "co"), ["cost"])
        self.assertEqual(self.complete("softverbs", "--engine", "i"), ["inline"])
        self.assertEqual(self.complete("softverbs", "re"), ["release"])
        self.assertEqual(self.complete("softverbs", "--", "verbatim-mod"), ["verbatim-model"])
        control = self.run_installed(self.prefix / SUBCOMMANDS["softverbs"][0], "--help").stdout
        listed = re.findall(r"^  (\w+) ", control.split("Subcommands:")[1], re.M)
        self.assertEqual(self.complete("softverbs", ""), listed)
        for words in (("verbatim-perf", "--json"), ("verbatim-report",), ("verbatim-report", "a.json")):
            self.assertIn("/etc/passwd", self.complete(*words, "/etc/passw"))

    def test_LogLines_NameSourcesByTheirPlaceInTheTree(self):
        plugin = (self.prefix / LIB / "libnccl-net-verbatim.so").read_bytes()
        self.assertRegex(plugin, rb"\0plugin/abi\.cc\0")
        self.assertRegex(plugin, rb"\0src/net/[a-z_/]+\.cc\0")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
