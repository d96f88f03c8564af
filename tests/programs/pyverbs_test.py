#!/usr/bin/env python3
#: test programs-pyverbs full
"""The tests of pyverbs (Debian's package python3-pyverbs, which has them among its documentation): none fails, and each
test that is skipped is skipped for a known cause."""

import gzip
import os
import re
import shutil
import subprocess

from program_test_case import LAUNCHER, LIBRARY, ProgramTest, main

PYTHON = "/usr/bin/python3"  # the interpreter for which Debian builds its packages
TESTS = "/usr/share/doc/rdma-core/tests"
# rdma-core 44 has 273 tests, of which 78 need only what softverbs supports (79 on RoCE).
FEWEST_TESTS, FEWEST_PASSED = 273, 78

# Causes of skipped tests. src/softverbs/README.md lists what softverbs does not support.
OTHER_DEVICES = r"non MLX5 device|non EFA device|not an MLX5 device|non EFA|PCI device must be passed"
UNSUPPORTED = [
    r"Create (RAW|Raw Packet|QP type \d+)",  # queue pairs that are not RC, UC or UD
    r"Create RAW QP must be done by root|[Mm]ust be run by root on Ethernet",  # raw queue pairs
    r"Extended QP is not supported",  # extended queue pairs of the types above
    r"Create XRCD is not supported",
    r"ODP is not supported",
    r"Device memory is not supported",
    r"MW access is not supported|memory window|additional access flags 18",
    r"Parent Domain is not supported",
    r"Rereg MR is not supported",
    r"Extended CQ is not supported",  # for tag matching
    r"Converting timestamp to nanoseconds is not supported",  # a call of libmlx5
    r"Importing a device is not supported",
    r"doesn't have net interface",  # the kernel's connection manager
]
SYSTEM = [r"dmabuf", r"cuda", r"CUDA", r"huge pages"]
LINK_LAYER = [r"Link layer of port=1 is InfiniBand", r"No supported port is up"]  # InfiniBand has no RoCE v2 addresses
CAUSES = re.compile("|".join([OTHER_DEVICES, *UNSUPPORTED, *SYSTEM, *LINK_LAYER]))

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


class Suite(ProgramTest):
    def setUp(self):
        super().setUp()
        found = subprocess.run([PYTHON, "-c", "import pyverbs.device"], check=False, capture_output=True)
        if found.returncode != 0:
            self.miss("pyverbs is not installed (Debian's package python3-pyverbs)")
        if not os.path.exists(f"{TESTS}/run_tests.py"):
            self.miss(f"{TESTS} is missing: dpkg is configured to leave out documentation. Next: tools/setup --full")
        os.chmod(self.directory.name, 0o777)  # another user writes the statistics
        self.tests = os.path.join(self.directory.name, "tests")
        os.mkdir(self.tests)
        for name in os.listdir(TESTS):
            source, target = os.path.join(TESTS, name), os.path.join(self.tests, name.removesuffix(".gz"))
            if name.endswith(".gz"):
                with gzip.open(source) as packed, open(target, "wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
            elif os.path.isfile(source):
                shutil.copy(source, target)

    def run_suite(self, *prefix, **settings):
        suite = [*prefix, PYTHON, os.path.join(self.tests, "run_tests.py"), "-v"]
        result = self.run_alone(*suite, PYTHONDONTWRITEBYTECODE="1", **settings)
        self.assertEqual(result.status, 0, result)
        ran = int(re.search(r"^Ran (\d+) tests in ", result.output, re.M).group(1))
        end = re.search(r"^OK \(skipped=(\d+)\)$", result.output, re.M)
        self.assertIsNotNone(end, result)
        self.assertGreaterEqual(ran, FEWEST_TESTS)
        self.assertGreaterEqual(ran - int(end.group(1)), FEWEST_PASSED, result)
        causes = re.findall(r" \.\.\. skipped (.*)$", result.output, re.M)
        self.assertEqual(len(causes), int(end.group(1)))
        self.assertEqual(sorted({cause for cause in causes if not CAUSES.search(cause)}), [])
        self.assertGreater(result.stats["work_requests"]["send"], 0)

    def test_every_engine_and_link_layer(self):
        for layer in ("roce", "ib"):
            for engine in ("thread", "inline"):
                with self.subTest(layer=layer, engine=engine):
                    self.run_suite(SOFTVERBS_LINK_LAYER=layer, SOFTVERBS_ENGINE=engine)

    def test_ordinary_user_with_kernel_lock_limit(self):
        settings = {"SOFTVERBS_LOCK_LIMIT": "kernel"}
        if os.geteuid() != 0:
            return self.run_suite(**settings)
        readable = [*NOBODY, "cat", LAUNCHER, os.path.join(LIBRARY, "libibverbs.so.1")]
        if subprocess.run(readable, check=False, capture_output=True).returncode != 0:
            self.skipTest("user 65534 cannot read the build directory")
        return self.run_suite(*NOBODY, **settings)


if __name__ == "__main__":
    main()
