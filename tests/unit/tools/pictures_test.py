#!/usr/bin/python3
#: all args='{source} {build}'
#: test pictures args='Drawing Stopped'
#: test pictures-top full timeout=300 sanitizer=none args=Top PROGRAMS_REQUIRED={programs_required}
#:   + needs=verbatim_top,verbatim_perf,plugin,softverbs,softverbs_mlx5,softverbs_files
"""tools/pictures: docs/pictures has what it draws, and what it keeps of a run: pictures_test.py SOURCE_DIR BUILD_DIR CLASS...

Stopped runs it with programs in place of mpirun and of those that need a GPU; Top runs verbatim-top, and needs the Python module pyte,
which Debian has for the system's Python.
"""

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
import unittest.mock
import xml.etree.ElementTree

sys.dont_write_bytecode = True
SOURCE = pathlib.Path(sys.argv[1]).resolve()
BUILD = pathlib.Path(sys.argv[2]).resolve()
SVG = "{http://www.w3.org/2000/svg}"

LAUNCHER = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
# Two ranks; it ends with rank 0.
MPIRUN = """#!/bin/sh
shift 2
OMPI_COMM_WORLD_RANK=1 "$@" &
OMPI_COMM_WORLD_RANK=0 exec "$@"
"""
# Rank 1 waits; rank 0 prints a line over Verbatim when rank 1 is stopped, and ends.
ALL_REDUCE_PERF = """#!/bin/sh
echo "NCCL version 2.28.3+cuda" >"$NCCL_DEBUG_FILE"
echo "Channel 00/0 : 0[0] -> 1[0] [send] via NET/$NCCL_NET/0" >>"$NCCL_DEBUG_FILE"
case $NCCL_DEBUG_FILE in *.1) exec sleep 60 ;; esac
until grep -q '^State:.T' "/proc/$(cat "${NCCL_DEBUG_FILE%/*}/pid.1")/status"; do sleep 0.01; done
[ "$NCCL_NET" = IB ] || echo "NET/Verbatim : stalled <$NCCL_NET_PLUGIN $NCCL_HOSTID>" >>"$NCCL_DEBUG_FILE"
"""


class Tree(unittest.TestCase):
    """A tree with the script and with what is kept of runs."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name).resolve()
        (self.root / "tools").mkdir()
        shutil.copy(SOURCE / "tools/pictures", self.root / "tools")
        self.pictures = self.root / "docs/pictures"
        shutil.copytree(SOURCE / "docs/pictures", self.pictures, ignore=shutil.ignore_patterns("*.svg"))

    def run_script(self, *arguments, **environment):
        command = [self.root / "tools/pictures", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
        return done.returncode, done.stdout + done.stderr

    def write_program(self, name, script):
        path = self.root / name
        path.write_text(script)
        path.chmod(0o755)


class Drawing(Tree):
    def test_Pictures_AreWhatTheScriptDraws(self):
        self.assertEqual(self.run_script(), (0, ""))
        names = sorted(path.name for path in self.pictures.glob("*.svg"))
        self.assertEqual(names, sorted(path.name for path in (SOURCE / "docs/pictures").glob("*.svg")))
        for name in names:
            self.assertEqual((self.pictures / name).read_bytes(), (SOURCE / "docs/pictures" / name).read_bytes(), name)

    def test_Texts_AreInsideOfTheirPicture(self):
        self.assertEqual(self.run_script(), (0, ""))
        paths = list(self.pictures.glob("*.svg"))
        self.assertIn("connection.svg", [path.name for path in paths])
        for path in paths:
            root = xml.etree.ElementTree.parse(path).getroot()
            texts = root.findall(f"{SVG}text")
            self.assertTrue(texts, path.name)
            for each in texts:
                left, length, y = (float(each.get(name)) for name in ("x", "textLength", "y"))
                inside = left >= 0 and left + length <= float(root.get("width")) and 0 < y < float(root.get("height"))
                self.assertTrue(inside, f"{path.name}: {each.text}")

    def test_LongWarning_IsWrappedAndNothingIsLost(self):
        words = [f"<{number}&{'x' * (number % 30)}>" for number in range(100)]
        lines = f"3.0 s rank 1: NCCL INFO\n7.6 s rank 0: NCCL WARN {' '.join(words)}"
        (self.pictures / "stopped.txt").write_text(
            f"== NCCL_NET=IB\n0 s: the stop\n9 s: the end\n\n== NCCL_NET=Verbatim\n0 s: the stop\n{lines}\n9 s: the end\n"
        )
        self.assertEqual(self.run_script(), (0, ""))
        root = xml.etree.ElementTree.parse(self.pictures / "stopped.svg").getroot()
        shown = " ".join(each.text for each in root.findall(f"{SVG}text"))
        self.assertEqual([word for word in shown.split() if word.startswith("<")], words)
        self.assertIn("  9 s  not one line: the end", shown)
        self.assertIn("  8 s  log of rank 0:", shown)
        self.assertIn(" 1 more: ", shown)


class Stopped(Tree):
    def load(self):
        loader = importlib.machinery.SourceFileLoader("pictures", str(self.root / "tools/pictures"))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("pictures", loader))
        loader.exec_module(module)
        module.RUN_S = 0
        return module

    def test_Run_KeepsTheLinesBehindTheStop(self):
        self.write_program("tools/softverbs", LAUNCHER)
        self.write_program("mpirun", MPIRUN)
        self.write_program("all_reduce_perf", ALL_REDUCE_PERF)
        self.write_program("nvidia-smi", "#!/bin/sh\necho NVIDIA H100\n")
        with unittest.mock.patch.dict(os.environ, {"PATH": f"{self.root}:{os.environ['PATH']}"}):
            self.load().record_stopped()
        kept = (self.pictures / "stopped.txt").read_text()
        begin = r"0 s: rank 1 \(pid \d+\) is stopped\n"
        end = r"\d+ s: the job has ended\n"
        line = r"\d+\.\d s rank 0: NET/Verbatim : stalled <verbatim rank-0>\n"
        self.assertRegex(kept, rf"^.+\nNCCL 2\.28\.3\+cuda, 1 NVIDIA H100; .+\n\n== NCCL_NET=IB\n{begin}{end}\n== NCCL_NET=Verbatim\n{begin}{line}{end}$")
        self.assertEqual(self.run_script(), (0, ""))

    def test_NoGpu_NothingIsRun(self):
        for name in ("plugin/libnccl-net-verbatim.so", "tools/verbatim-top/verbatim-top"):
            (self.root / "build" / name).parent.mkdir(parents=True)
            (self.root / "build" / name).touch()
        status, output = self.run_script("stopped", PATH="/nonexistent", SOFTVERBS_BUILD_DIR=str(self.root / "build"))
        self.assertEqual((status, output), (77, "tools/pictures: no nvidia-smi on the PATH; nothing was run\n"))


class Top(Tree):
    def test_Screen_NamesTheStoppedProcess(self):
        shutil.copy(SOURCE / "tools/softverbs", self.root / "tools")
        status, output = self.run_script("top", SOFTVERBS_BUILD_DIR=str(BUILD))
        if status == 77 and os.environ.get("PROGRAMS_REQUIRED") != "1":
            self.skipTest(output)
        self.assertEqual((status, output), (0, ""))
        kept = (self.pictures / "top.txt").read_text()
        self.assertRegex(kept, r"(?m)^! look first at process \d+ on \S+: \d process(es)? waits? for it$")
        self.assertRegex(kept, r"(?m)^= +PID PROGRAM .* WAITS FOR$")
        self.assertTrue(re.search(r"(?m)^   +\d+ verbatim-perf +sends [1-9]", kept), kept)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
