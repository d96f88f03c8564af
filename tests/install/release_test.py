#!/usr/bin/env python3
#: test install-release full alone timeout=3600 priority=-10 args='{source} {build}/tests/install/release'
"""Two release builds in different directories have the same bytes: release_test.py SOURCE_DIR SCRATCH_DIR.

tools/package runs in two copies of the tree whose paths have different lengths.
"""

import filecmp
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

SOURCE, SCRATCH = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
PLUGIN_BYTES = 2_500_000


class Release(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        shutil.rmtree(SCRATCH, ignore_errors=True)
        cls.trees = [cls.build(SCRATCH / "a", "build"), cls.build(SCRATCH / "a longer path" / "b", "build-b/below")]

    @staticmethod
    def build(copy, build):
        """Copies the sources and packs them; build directories at different depths."""
        shutil.copytree(SOURCE, copy, ignore=lambda _, names: [name for name in names if name.startswith((".git", "build"))])
        (copy / build).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["tools/package", "tree", "--out", copy / "out", "--build", build], cwd=copy, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return pathlib.Path(done.stdout.splitlines()[-1])

    def test_TwoBuilds_HaveTheSameBytes(self):
        names = [sorted(path.relative_to(tree) for path in tree.rglob("*") if path.is_file()) for tree in self.trees]
        self.assertEqual(*names)
        self.assertGreater(len(names[0]), 30)
        same, different, missing = filecmp.cmpfiles(*self.trees, names[0], shallow=False)
        self.assertEqual((different, missing), ([], []))
        self.assertEqual(len(same), len(names[0]))

    def test_NoFile_HasAPathOfThisMachine(self):
        forbidden = [str(SCRATCH).encode(), str(SOURCE).encode(), b"/a longer path/"]
        for path in self.trees[1].rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                self.assertEqual([text for text in forbidden if text in content], [], path)
        plugin = (self.trees[1] / "lib/libnccl-net-verbatim.so").read_bytes()
        self.assertEqual([name for name in re.findall(rb"[^\0]*\.cc(?=\0)", plugin) if name.startswith((b"/", b"."))], [])

    def test_Plugin_IsStrippedAndSmall(self):
        plugin = self.trees[0] / "lib/libnccl-net-verbatim.so"
        self.assertLessEqual(plugin.stat().st_size, PLUGIN_BYTES)
        programs = (path for path in (self.trees[0] / "bin").glob("verbatim-*") if path.name != "verbatim-report")  # a script
        for path in [plugin, *programs]:
            shown = subprocess.run(["nm", path], capture_output=True, text=True)
            self.assertIn("no symbols", shown.stderr, path)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
