"""Test cases as TAP (Test Anything Protocol) on standard output: Meson and tools/count_cases read it."""

import contextlib
import time
import traceback

from machine import Failure

ATTEMPTS = 3  # of a case in which a guest's kernel panics


class CaseFailure(Exception):
    """A test case failed. The text gives the reason. `at`: when it has happened."""

    def __init__(self, text, at=None):
        super().__init__(text)
        self.at = at or time.monotonic()


def expect(condition, message, at=None):
    if not condition:
        raise CaseFailure(message, at)


class Report:
    """`restart` starts the machines anew."""

    def __init__(self, machines, restart):
        self.machines, self.restart = machines, restart
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

    def case(self, name):
        """Runs the function that follows as a case: a decorator, because it may run more than once."""

        def run(body):
            def timed():
                started = time.monotonic()
                body()
                return time.monotonic() - started

            seconds = self.attempt(name, timed)
            if seconds is not None:
                self.result(True, f"{name} ({seconds:.1f} s)")

        return run

    def attempt(self, name, body):
        """Returns what `body` returns. Otherwise reports the case and returns None: an exception fails it, and a failure of a
        machine also ends the suite. A panic of a guest's kernel is not the plugin's failure: `body` is called again on machines
        that are started anew, and the case is skipped when all attempts end so. Wrong data, a crash or a leak that a program has
        printed until the panic fails the case."""
        for number in range(ATTEMPTS):
            earlier = [len(machine.jobs) for machine in self.machines]
            try:
                if number > 0:
                    self.restart()
                return body()
            except Exception as failure:
                is_known = isinstance(failure, (CaseFailure, Failure))
                details = str(failure) if is_known else traceback.format_exc()  # an error of the suite: later cases may pass
                function = self.panic_behind(failure)
                signs = []
                if function is not None:
                    details = f"{name}: the kernel of a machine panicked in {function}\n{details}"
                    jobs = [job for machine, count in zip(self.machines, earlier) for job in machine.jobs[count:]]
                    signs = [line for job in jobs for line in job.signs_of_failure()]
                if function is None or signs:
                    self.result(False, name, "\n".join([*signs, details]))
                    if isinstance(failure, Failure):
                        raise
                    return None
                self.note(details)
        self.result(True, name, skipped=f"the kernel of a machine panicked in {function}, {ATTEMPTS} times")
        self.restart()
        return None

    def panic_behind(self, failure):
        """The function in which a machine's kernel has panicked, if that may be the reason of the failure. It may have been
        noticed as something else, for example by the other machine. But it is not the reason of what has happened before it, also
        when a failure came before it and the panic while the case cleaned up."""
        panics = [(machine.ended_at, machine.panicked_in()) for machine in self.machines if not machine.is_running()]
        at, function = min(((at, function) for at, function in panics if function), default=(None, None))
        while function and failure:
            if getattr(failure, "at", at) < at:
                return None
            failure = failure.__context__
        return function

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
