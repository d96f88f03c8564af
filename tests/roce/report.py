"""Test cases as TAP (Test Anything Protocol) on standard output: Meson and tools/count_cases read it."""

import contextlib
import time
import traceback

from machine import Failure


class CaseFailure(Exception):
    """A test case that failed, in words."""


def expect(condition, message):
    if not condition:
        raise CaseFailure(message)


class Report:
    def __init__(self):
        self.count = 0
        self.failed = []

    def note(self, text):
        for line in str(text).splitlines():
            print("# " + line, flush=True)

    def result(self, passed, name, details="", skipped=None):
        self.count += 1
        if not passed:
            self.failed.append(name)
        end = f" # SKIP {skipped}" if skipped is not None else ""
        print(f"{'ok' if passed else 'not ok'} {self.count} - {name.replace('#', '')}{end}", flush=True)
        self.note(details)

    @contextlib.contextmanager
    def case(self, name):
        """What its body raises makes it a failure. A machine that does not answer ends the suite."""
        started = time.monotonic()
        try:
            yield
        except CaseFailure as wrong:
            self.result(False, name, wrong)
        except Failure as failure:
            self.result(False, name, failure)
            raise
        except Exception:  # of the suite itself: the cases after this one may still work
            self.result(False, name, traceback.format_exc())
        else:
            self.result(True, f"{name} ({time.monotonic() - started:.1f} s)")

    @contextlib.contextmanager
    def timed(self, part, machines):
        """Notes how long its body took, and how long the host's processors worked for the machines meanwhile."""
        started, before = time.monotonic(), [machine.processor_s() for machine in machines]
        try:
            yield
        finally:
            worked = sum(machine.processor_s() for machine in machines) - sum(before)
            self.note(f"{part}: {time.monotonic() - started:.0f} s, {worked:.0f} s of a processor")

    def end(self):
        print(f"1..{self.count}", flush=True)
        for name in self.failed:
            self.note(f"failed: {name}")
        return 1 if self.failed else 0
