"""Test cases as TAP (Test Anything Protocol) on standard output: Meson and tools/count_cases read it."""

import contextlib
import time
import traceback

from machine import Failure


class CaseFailure(Exception):
    """A test case failed. The text gives the reason."""


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
        """An exception of the body fails the case. A failure of the machine also ends the suite."""
        started = time.monotonic()
        try:
            yield
        except CaseFailure as failure:
            self.result(False, name, failure)
        except Failure as failure:
            self.result(False, name, failure)
            raise
        except Exception:  # an error of the suite itself: later cases may still pass
            self.result(False, name, traceback.format_exc())
        else:
            self.result(True, f"{name} ({time.monotonic() - started:.1f} s)")

    @contextlib.contextmanager
    def timed(self, part, machines):
        """Prints the time of the body and the processor time of the machines."""
        started, before = time.monotonic(), [machine.processor_s() for machine in machines]
        try:
            yield
        finally:
            worked = sum(machine.processor_s() for machine in machines) - sum(before)
            self.note(f"{part}: {time.monotonic() - started:.0f} s, {worked:.0f} s of processor time")

    def end(self):
        print(f"1..{self.count}", flush=True)
        for name in self.failed:
            self.note(f"failed: {name}")
        return 1 if self.failed else 0
