#!/usr/bin/env python3
#: all args={build}
#: test install-examples timeout=300
#: test install-examples-run full has=mpirun args=run needs=plugin,softverbs_files,softverbs,verbatim_perf
"""The examples: their syntax, and mpirun.sh with verbatim-perf in place of nccl-tests: examples_test.py BUILD_DIR [run].

Without `run` no program is started.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
RUN = sys.argv[2:] == ["run"]
VARIABLES = {"NCCL_NET_PLUGIN": "verbatim", "NCCL_NET": "Verbatim", "NCCL_NET_PLUGIN_REF_COUNT": "1"}


class Examples(unittest.TestCase):
    def test_EveryFile_IsListedAndSaysWhatToExpect(self):
        listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
        files = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "environment.sh"}
        self.assertEqual(listed, files)
        for name in files - {"all_reduce.py"}:
            text = (EXAMPLES / name).read_text()
            self.assertIn("# Expect: ", text, name)
            self.assertTrue("# Needs: " in text or name == "Dockerfile", name)

    def test_Scripts_HaveNoSyntaxError(self):
        for path in [*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")]:
            self.assertEqual(subprocess.run(["bash", "-n", path]).returncode, 0, path)
        ast.parse((EXAMPLES / "all_reduce.py").read_text())

    def test_Environment_HasTheVariablesOfTheManual(self):
        script = f'. "{EXAMPLES}/environment.sh"; env'
        environment = {"PATH": os.environ["PATH"], "VERBATIM_LIBDIR": "/opt/a b", "LD_LIBRARY_PATH": "/before"}
        shown = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True).stdout
        for name, value in {**VARIABLES, "LD_LIBRARY_PATH": "/opt/a b:/before"}.items():
            self.assertIn(f"{name}={value}\n", shown)
        dockerfile = (EXAMPLES / "Dockerfile").read_text()
        for name, value in VARIABLES.items():
            self.assertIn(f"{name}={value}", dockerfile)

    @unittest.skipUnless(RUN, "started without run")
    def test_Mpirun_WithVerbatimPerf_IsCorrect(self):
        perf = BUILD / "tools/verbatim-perf/verbatim-perf"
        environment = {
            **os.environ,
            "PROGRAM": f"{perf} all_reduce --plugin verbatim --format nccl-tests",
            "MAXBYTES": "1M",
            "SOFTVERBS_BUILD_DIR": str(BUILD),
            "SOFTVERBS_LOCK_LIMIT": "none",
            "SOFTVERBS_NAMESPACE": f"examples-{os.getpid()}",
            "VERBATIM_LIBDIR": str(BUILD / "plugin"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        launcher = [EXAMPLES.parent / "tools/softverbs", "--", EXAMPLES / "mpirun.sh", "-np", "2", "--oversubscribe"]
        done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("# Out of bounds values : 0 OK", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
