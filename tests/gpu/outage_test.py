#!/usr/bin/env python3
# What of the programs for GPUs can be tested without one.
#: test outage-times suite=programs timeout=90
"""usage: outage_test.py
outage.py times every all_reduce. PyTorch is replaced by a module whose second all_reduce of an iteration is slow."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

SLOW_S = 0.2

TORCH = """
class Tensor:
    value = 0
    def fill_(self, value):
        self.value = value
    def item(self):
        return self.value
    def nelement(self):
        return 1
    def element_size(self):
        return 4
    def __ne__(self, other):
        return Count()

class Count:
    def sum(self):
        return 0

class cuda:
    set_device = staticmethod(lambda device: None)
    device_count = staticmethod(lambda: 1)
    synchronize = staticmethod(lambda: None)

def empty(*shape, device):
    return Tensor()

zeros = empty
"""

DISTRIBUTED = f"""
import time
calls = 0

def init_process_group(backend, timeout):
    pass

def all_reduce(tensor):
    global calls
    calls += 1
    if calls == 4:
        time.sleep({SLOW_S})
"""


def main():
    with tempfile.TemporaryDirectory() as directory:
        package = pathlib.Path(directory) / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(TORCH)
        (package / "distributed.py").write_text(DISTRIBUTED)
        variables = {"RANK": "0", "WORLD_SIZE": "1", "OUTAGE_ITERATIONS": "3", "PYTHONPATH": directory}
        program = pathlib.Path(__file__).with_name("outage.py")
        result = subprocess.run(
            [sys.executable, program], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
        )
    assert result.returncode == 0, result.stderr
    times = [float(found) for found in re.findall(r"^ +([\d.]+) ms at ", result.stdout, re.M)]
    assert times and max(times) >= 1e3 * SLOW_S, result.stdout


main()
