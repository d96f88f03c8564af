#!/usr/bin/env python3
# Counts the instructions of one message under valgrind, which does not work with sanitizers.
#: test softverbs-instructions sanitizer=none protocol=exitcode args='{softverbs_write_loop} 500'
#:   + VERBS_TEST_LIBRARY={softverbs} SOFTVERBS_ENGINE=inline
"""usage: instructions_test.py WRITE_LOOP MAXIMUM

Counts the instructions of one 8-byte WRITE between QPs of one process: ibv_post_send and ibv_poll_cq, including the work
of the device in them. The result is the difference between two runs under callgrind, divided by the difference of their
WRITE counts. Fails when it is above MAXIMUM. Exits with 77 (skipped) when valgrind is not installed.
"""

import re
import shutil
import subprocess
import sys

# The start of a process differs by some ten thousand instructions from run to run.
FEW, MANY = 1000, 41000


def instructions(program, count):
    run = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    collected = re.search(r"Collected : (\d+)", run.stdout)
    if run.returncode != 0 or collected is None:
        sys.exit(run.stdout)
    return int(collected.group(1))


def main():
    program, maximum = sys.argv[1], int(sys.argv[2])
    if shutil.which("valgrind") is None:
        print("skipped: valgrind is not installed")
        sys.exit(77)
    each = (instructions(program, MANY) - instructions(program, FEW)) / (MANY - FEW)
    print(f"{each:.0f} instructions for one 8-byte WRITE, the maximum is {maximum}")
    if not 50 < each <= maximum:
        sys.exit(1)


main()
