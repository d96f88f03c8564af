#!/usr/bin/env python3
# ibv_devinfo and the shell do not load the runtime that a library built with a sanitizer needs.
#: test softverbs-launcher sanitizer=none protocol=exitcode timeout=300 needs=softverbs,softverbs_mlx5
#:   + args='{source}/tools/softverbs {softverbs_dir} {softverbs_device_names}'
"""tools/softverbs finds the library and passes its options on; no files remain in /dev/shm after processes have ended.

usage: launcher_test.py LAUNCHER LIBRARY_DIRECTORY DEVICE_NAMES_PROGRAM
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

LAUNCHER, LIBRARY, PROGRAM = sys.argv[1:4]
NAMESPACE = f"launcher-{os.getpid()}"
BUILD = os.path.normpath(os.path.join(LIBRARY, "../../.."))


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SOFTVERBS_")}
    return {**kept, "SOFTVERBS_NAMESPACE": NAMESPACE, "SOFTVERBS_BUILD_DIR": BUILD, **more}


def launch(*arguments, **more):
    return subprocess.run(
        [LAUNCHER, *arguments], env=environment(**more), capture_output=True, text=True, timeout=60, check=False
    )


def remaining_files(directory="/dev/shm"):
    return [name for name in os.listdir(directory) if NAMESPACE in name]


def processes():
    """(pid, state, parent's pid) of all processes."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                found.append((int(pid), state, int(parent)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def await_files(count):
    """For files that any process removes: a process of another test may be doing so."""
    deadline = time.monotonic() + 60
    while len(remaining_files()) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return remaining_files()


class Launcher(unittest.TestCase):
    def names(self, result):
        self.assertEqual(result.returncode, 0, result.stderr)
        return [line for line in result.stdout.splitlines() if line.startswith("softverbs")]

    def test_finds_the_library(self):
        self.assertEqual(self.names(launch("--", PROGRAM)), ["softverbs0"])
        self.assertEqual(self.names(launch("--lib", LIBRARY, PROGRAM, SOFTVERBS_BUILD_DIR="/nowhere")), ["softverbs0"])

    def test_path_with_characters_of_the_loader(self):
        with tempfile.TemporaryDirectory() as directory:
            build = os.path.join(directory, "with a space")
            os.symlink(BUILD, build)
            for options in ((), ("--preload",)):
                result = launch(*options, PROGRAM, SOFTVERBS_BUILD_DIR=build)
                self.assertEqual(self.names(result), ["softverbs0"])
                self.assertEqual(result.stderr, "")
            if os.path.exists(f"{BUILD}/src/softverbs/files/libsoftverbs-files.so"):
                shown = launch("cat", "/sys/class/infiniband_verbs/uverbs0/ibdev", SOFTVERBS_BUILD_DIR=build)
                self.assertEqual((shown.stdout, shown.stderr), ("softverbs0\n", ""))
            for character in ":;":
                build = os.path.join(directory, f"a{character}b")
                os.symlink(BUILD, build)
                result = launch(PROGRAM, SOFTVERBS_BUILD_DIR=build)
                self.assertEqual(result.returncode, 2)
                self.assertIn("Next:", result.stderr)

    def test_options_become_variables(self):
        self.assertEqual(self.names(launch("--devices", "3", PROGRAM)), ["softverbs0", "softverbs1", "softverbs2"])
        options = ("--devices", "5", "--engine", "inline", "--link-layer", "ib", "--namespace", "mine", "--stats", "f")
        options += ("--directory", "/tmp")
        shown = launch(*options, "env").stdout.splitlines()
        for line in (
            "SOFTVERBS_DEVICES=5",
            "SOFTVERBS_ENGINE=inline",
            "SOFTVERBS_LINK_LAYER=ib",
            "SOFTVERBS_NAMESPACE=mine",
            "SOFTVERBS_STATS=f",
            "SOFTVERBS_DIRECTORY=/tmp",
        ):
            self.assertIn(line, shown)

    def test_arguments_of_the_program_are_passed_on(self):
        self.assertEqual(launch("--", "echo", "--devices", "2  3").stdout, "--devices 2  3\n")
        self.assertEqual(launch("sh", "-c", "exit 7").returncode, 7)

    def test_wrong_arguments_are_named(self):
        for arguments, named in (
            (["--unknown", "true"], "--unknown"),
            (["--devices"], "--devices"),
            ([], "no command"),
            (["--lib", "/nowhere", "true"], "/nowhere"),
        ):
            result = launch(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(named, result.stderr)
        self.assertIn("usage:", launch("--help").stdout)

    def test_subcommand_name_after_dashes_is_a_program(self):
        self.assertNotEqual(launch("--", "stats").returncode, 0)
        self.assertIn("stats", launch("--", "stats").stderr)

    def test_subcommand_without_its_program_names_directory(self):
        result = launch("stats", SOFTVERBS_BUILD_DIR="/nowhere")
        self.assertEqual(result.returncode, 2)
        self.assertIn("/nowhere", result.stderr)

    def test_malformed_setting_is_named(self):
        result = launch("--engine", "steam", PROGRAM)
        self.assertEqual(result.returncode, 4)
        self.assertIn("SOFTVERBS_ENGINE=steam", result.stderr)

    def test_rdma_core_tools_see_the_devices(self):
        if shutil.which("ibv_devinfo") is None:
            self.skipTest("no ibv_devinfo")
        result = launch("--devices", "2", "ibv_devinfo")
        self.assertEqual(result.returncode, 0, result.stderr)
        for name in ("softverbs0", "softverbs1", "PORT_ACTIVE"):
            self.assertIn(name, result.stdout)


class Exit(unittest.TestCase):
    def test_files_are_removed_after_exit_handlers(self):
        result = launch(PROGRAM)
        self.assertIn("files at exit: 2", result.stdout)  # the registry and the segment
        self.assertEqual(remaining_files(), [])

    def start(self, *prefix, **more):
        child = subprocess.Popen(
            [*prefix, LAUNCHER, PROGRAM, "stay"],
            env=environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while child.stdout.readline() not in ("open\n", ""):
            pass
        return child

    def kill(self, child):
        child.kill()
        child.communicate(timeout=60)

    def test_last_process_removes_files_of_dead_ones(self):
        killed, last = self.start(), self.start()
        self.assertEqual(len(remaining_files()), 3)
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=60)
        last.communicate(timeout=60)
        killed.communicate(timeout=60)
        self.assertEqual(last.returncode, 0)
        self.assertEqual(remaining_files(), [])

    def test_next_process_of_another_namespace_removes_files_of_dead_ones(self):
        for number in (signal.SIGKILL, signal.SIGINT):
            child = self.start()
            child.send_signal(number)
            child.communicate(timeout=60)
            self.assertLessEqual(len(remaining_files()), 2)  # a process of another test may remove them
            self.names_in_another_namespace()
            self.assertEqual(await_files(0), [])

    def names_in_another_namespace(self):
        other = NAMESPACE.replace("launcher", "other")
        self.assertEqual(launch(PROGRAM, SOFTVERBS_NAMESPACE=other).returncode, 0)
        self.assertEqual([name for name in os.listdir("/dev/shm") if other in name], [])

    def test_files_of_running_processes_remain(self):
        killed, running = self.start(), self.start()
        self.kill(killed)
        self.names_in_another_namespace()
        self.assertEqual(len(remaining_files()), 3)
        running.communicate(timeout=60)
        self.assertEqual(running.returncode, 0)
        self.assertEqual(remaining_files(), [])

    def test_segments_without_registry_are_removed(self):
        child = self.start()
        registry = min(remaining_files(), key=len)
        os.unlink(f"/dev/shm/{registry}")  # before the kill: after it, a process of another test may remove both
        self.kill(child)
        self.names_in_another_namespace()
        self.assertEqual(await_files(0), [])

    def test_files_that_are_no_registries_remain(self):
        registries = ["softverbs9-shared", "softverbs9-shared-name", "softverbs10-0-1", "softverbs10-0-1-name", "softverbs10-0-1.7"]
        others = ["softverbs", "softverbs-notes", "softverbs.txt", "softverbs9-notes", "softverbs9-0-notes", "softverbs9-sharedname"]
        with tempfile.TemporaryDirectory() as shared:
            for name in registries + others:
                with open(os.path.join(shared, name), "wb"):
                    pass
            self.assertEqual(launch(PROGRAM, SOFTVERBS_DIRECTORY=shared).returncode, 0)
            self.assertEqual(sorted(os.listdir(shared)), sorted(others))

    def unshare(self):
        unshare = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode != 0:
            self.skipTest("this system does not allow a new PID namespace")
        return unshare

    def test_ending_process_removes_files_of_killed_pid_namespace(self):
        last, killed = self.start(), self.start(*self.unshare())
        self.assertEqual(len(remaining_files()), 4)
        children = [pid for pid, _, parent in processes() if parent == killed.pid]
        self.assertEqual(len(children), 1)
        self.kill(killed)
        while any(pid in children and state not in "ZX" for pid, state, _ in processes()):
            time.sleep(0.01)  # the child of unshare ends some time after it
        last.communicate(timeout=60)
        self.assertEqual(last.returncode, 0)
        self.assertEqual(await_files(0), [])

    def test_pid_namespaces_share_a_directory(self):
        unshare = self.unshare()
        with tempfile.TemporaryDirectory() as shared:
            first = self.start(*unshare, SOFTVERBS_DIRECTORY=shared)
            second = self.start(*unshare, SOFTVERBS_DIRECTORY=shared)
            self.assertEqual(len(remaining_files(shared)), 3)  # one registry for both
            self.assertEqual(remaining_files(), [])
            self.kill(first)
            while len(remaining_files(shared)) == 3:  # its child ends some time later
                self.assertEqual(launch(PROGRAM, SOFTVERBS_DIRECTORY=shared).returncode, 0)
            second.communicate(timeout=60)
            self.assertEqual(second.returncode, 0)
            self.assertEqual(remaining_files(shared), [])

    def test_killed_pid_namespace_leaves_nothing_to_the_next_process(self):
        unshare = self.unshare()
        first = self.start(*unshare)
        second = self.start(*unshare)
        self.assertEqual(len(remaining_files()), 4)  # each PID namespace has a registry
        self.names_in_another_namespace()
        self.assertEqual(len(remaining_files()), 4)
        self.kill(first)
        while len(remaining_files()) == 4:  # its child ends some time later
            self.names_in_another_namespace()
        self.assertEqual(len(await_files(2)), 2)
        self.kill(second)
        while remaining_files():
            self.assertEqual(launch(PROGRAM).returncode, 0)

    def test_held_clock_keeps_the_registry(self):
        if not os.path.exists(f"{BUILD}/tools/softverbs-control/softverbs-control"):
            self.skipTest("softverbs-control is not built")
        self.assertEqual(launch("hold").returncode, 0)
        self.kill(self.start())
        self.names_in_another_namespace()
        self.assertEqual(len(await_files(1)), 1)
        self.assertEqual(launch("release").returncode, 0)
        self.assertEqual(remaining_files(), [])

    def test_failed_open_leaves_no_files(self):
        # A limit of the file size makes the creation of the registry fail, a larger one that of the segment.
        for blocks in (4096, 131072):
            result = launch("sh", "-c", f"trap '' XFSZ; ulimit -f {blocks}; exec '{PROGRAM}'")
            self.assertEqual(result.returncode, 5, result.stderr)
            self.assertEqual(remaining_files(), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
