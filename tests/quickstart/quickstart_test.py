#!/usr/bin/env python3
# The first run of a new user. Most cases replace meson and ninja by scripts, so that they take seconds.
#: all suite=programs sanitizer=none args={source}
#: test quickstart priority=5 args='Quickstart Packages Readme'
#: test quickstart-build full alone timeout=900 priority=-10 args=Build
"""tools/quickstart as a new user runs it, and the commands of README.md after it: quickstart_test.py SOURCE_DIR CLASS...

Quickstart, Packages and Readme run it in a tree of three scripts, with programs in place of meson, ninja, apt-get and what is
built. Build runs it in a copy of the whole tree. The commands of README.md start programs in place of torchrun, mpirun, srun
and docker, which record their arguments and environment.
"""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

# A job in the background of a shell ignores SIGINT, one under nohup SIGHUP, and bash cannot trap a signal that it ignored
# from the start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SOURCE = pathlib.Path(sys.argv[1]).resolve()
WAIT_S = 60
# What tools/quickstart and tools/setup call, and what the build needs besides ninja.
PROGRAMS = """bash cat chmod dirname env flock g++ getopt grep id ln mkdir mktemp pkg-config readlink rm rmdir sed setsid sh sleep stat tail
touch""".split()
OTHER_USER = 65534

MESON = """#!/bin/sh
case "$1" in
  --version) echo 1.0.0; exit ;;
  setup) [ ! -e build/meson-private ] || { echo "meson-private is left"; exit 1; } ;;
esac
mkdir -p build/meson-private
echo 'build tools/verbatim-perf/verbatim-perf: phony' >build/build.ninja
"""

# Fails if another build runs in the same directory.
NINJA = """#!/bin/sh
cd build || exit
[ -z "$NINJA_FAILS" ] || { echo "the error of a compiler"; exit 1; }
trap 'rmdir running; exit 1' TERM
mkdir running || { trap - TERM; echo "two builds at once"; exit 1; }
echo "[1/2] Compiling"
if [ -e slow ]; then sleep "$(cat slow)" & wait $!; fi
echo "[2/2] Linking"
mkdir -p plugin src/softverbs/lib
touch plugin/libnccl-net-verbatim.so src/softverbs/lib/libibverbs.so.1
for target; do
  case "$target" in
    tools/*)
      mkdir -p "${target%/*}"
      printf '#!/bin/sh\\necho "ran $*"\\n[ ! -e build/slow-run ] || exec sleep "$(cat build/slow-run)"\\n' >"$target"
      chmod +x "$target"
      ;;
  esac
done
rmdir running
"""

APT_GET = """#!/bin/sh
echo "$*" >>"$APT_LOG"
case "$*" in
  *--download-only*) [ -z "$NO_NETWORK" ] || { echo "E: Unable to fetch some archives" >&2; exit 100; } ;;
  *install*) ln -s "$APT_NINJA" "$APT_PATH/ninja" ;;
esac
"""


# Tries to load the plugin as NCCL does.
LAUNCHER = f"""#!{sys.executable}
import ctypes, json, os, sys
try:
    error = ctypes.CDLL("libnccl-net-verbatim.so") and None
except OSError as failure:
    error = str(failure)
call = dict(program=os.path.basename(sys.argv[0]), arguments=sys.argv[1:], environment=dict(os.environ), error=error)
print(json.dumps(call), file=open(os.environ["CALLS"], "a"))
"""
NO_GPU = "#!/bin/sh\nexit 77\n"  # in place of tests/gpu/run
LAUNCHERS = ("torchrun", "mpirun", "srun", "docker")
VARIABLES = {"NCCL_NET_PLUGIN": "verbatim", "NCCL_NET": "Verbatim", "NCCL_NET_PLUGIN_REF_COUNT": "1"}


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def readme_commands():
    """The indented blocks of README.md that are not the output of quickstart, in their order."""
    blocks = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", (SOURCE / "README.md").read_text(), re.M)
    return "".join(re.sub(r"^    ", "", block, flags=re.M) for block in blocks if not block.lstrip().startswith("== "))


class ReadmeCommands(unittest.TestCase):
    """What Readme and Build do with the commands of README.md."""

    maxDiff = None
    README_LIMIT_S = WAIT_S

    def run_readme(self, root):
        """Runs all commands in one shell, as a reader does whose LD_LIBRARY_PATH is not set. Returns the calls and the output."""
        programs = root.parent / "launchers"
        programs.mkdir()
        for name in LAUNCHERS:
            write_program(programs / name, LAUNCHER)
        environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        environment.update(PATH=f"{programs}:{self.path()}", CALLS=str(root.parent / "calls"))
        commands = readme_commands()
        result = subprocess.run(
            ["bash", "-exc", commands],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=self.README_LIMIT_S,
        )
        self.assertEqual(result.returncode, 0, result.stdout[-2000:] + result.stderr[-4000:])
        calls = [json.loads(line) for line in (root.parent / "calls").read_text().splitlines()]
        self.assertEqual([call["program"] for call in calls], ["torchrun", "mpirun", "srun", "docker", "torchrun"])
        for call in calls:
            self.check_environment(call["environment"], root)
        self.check_mpirun(calls[1]["arguments"])
        self.check_docker(calls[3]["arguments"])
        last = calls[4]["environment"]
        self.assertEqual(last["LD_LIBRARY_PATH"].split(":")[0], str(root / "build/src/softverbs/lib"))
        self.assertEqual([last.get(f"NCCL_{name}_DISABLE") for name in ("P2P", "SHM")], ["1", "1"])
        for name in re.findall(r"`((?:build|tools)/[\w./-]+)", (SOURCE / "README.md").read_text()):
            tree = root if name.startswith("build/") else SOURCE
            self.assertTrue((tree / name).exists(), f"README.md names {name}, which is not there after its commands")
        return calls, result.stdout

    def path(self):
        return os.environ["PATH"]

    # The loader takes an empty element for the current directory.
    def check_environment(self, environment, root):
        directories = environment["LD_LIBRARY_PATH"].split(":")
        self.assertNotIn("", directories)
        self.assertIn(str(root / "build/plugin"), directories)
        self.assertEqual({name: environment.get(name) for name in VARIABLES}, VARIABLES)

    def check_mpirun(self, arguments):
        passed = {arguments[i + 1] for i, argument in enumerate(arguments) if argument == "-x"}
        self.assertEqual(passed, {"LD_LIBRARY_PATH", *VARIABLES})
        hosts = arguments[arguments.index("--host") + 1].split(",")
        self.assertEqual(int(arguments[arguments.index("-np") + 1]), sum(int(host.split(":")[1]) for host in hosts))

    def check_docker(self, arguments):
        def after(option):
            return [arguments[i + 1] for i, argument in enumerate(arguments) if argument == option]

        directory, place, _ = after("-v")[0].split(":")
        self.assertTrue((pathlib.Path(directory) / "libnccl-net-verbatim.so").exists(), directory)
        self.assertEqual(dict(variable.split("=") for variable in after("-e")), {"LD_LIBRARY_PATH": place, **VARIABLES})
        self.assertEqual([after("--device"), after("--ulimit"), after("--network")], [["/dev/infiniband"], ["memlock=-1"], ["host"]])


class Tree(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.root = pathlib.Path(self.directory.name).resolve() / "tree"
        (self.root / "tools").mkdir(parents=True)
        for name in ("quickstart", "setup", "softverbs"):
            shutil.copy(SOURCE / "tools" / name, self.root / "tools")
        self.programs = self.root.parent / "programs"
        self.programs.mkdir()
        write_program(self.programs / "meson", MESON)
        write_program(self.programs / "ninja", NINJA)
        self.root.parent.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}"}

    def start(self, *arguments, **more):
        return subprocess.Popen(
            [self.root / "tools/quickstart", "--no-gpu", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )

    def finish(self, process, status=0):
        out, err = process.communicate(timeout=WAIT_S)
        self.assertEqual(process.returncode, status, out + err)
        return out, err

    def run_to_end(self, *arguments, status=0, **more):
        return self.finish(self.start(*arguments, **more), status)

    def assert_one_line(self, text, *parts):
        self.assertEqual(text.count("\n"), 1, text)
        for part in parts:
            self.assertIn(part, text)


class Readme(Tree, ReadmeCommands):
    def path(self):
        return self.environment["PATH"]

    def test_every_command_works_in_its_order(self):
        gpu = self.root / "tests/gpu/run"
        gpu.parent.mkdir(parents=True)
        write_program(gpu, NO_GPU)
        self.run_readme(self.root)


class Quickstart(Tree):
    def test_builds_runs_and_says_what_is_next(self):
        out, err = self.run_to_end()
        self.assertEqual(err, "")
        self.assertRegex(out, r"building \[2/2\]: \d+ s")
        for operation in ("all_reduce", "sendrecv"):
            self.assertRegex(out, rf"ran {operation} .*--procs 4 ")
        last = out.splitlines()[-4:]
        self.assertRegex(last[0], r"^done in \d+ s: every byte was correct$")
        self.assertTrue(all(line.startswith("next, ") for line in last[1:]), last)

    def test_wrong_arguments_are_named_before_anything_is_built(self):
        for arguments, named in (
            (["--procs"], "--procs"),
            (["--procs", "0"], "'0'"),
            (["--procs", "65"], "'65'"),
            (["--procs=four"], "'four'"),
            (["--procs", "4 "], "'4 '"),
            (["--gpu"], "'--gpu'"),
        ):
            _, err = self.run_to_end(*arguments, status=2)
            self.assert_one_line(err, named)
        self.assertFalse((self.root / "build").exists())

    def test_one_process_claims_nothing_about_bytes_between_processes(self):
        out, _ = self.run_to_end("--procs", "1")
        self.assertIn("--procs 1 ", out)
        self.assertIn("no bytes were sent between processes", out)
        self.assertNotIn("every byte", out)

    def test_failed_build_prints_the_error_and_names_the_log(self):
        self.environment["NINJA_FAILS"] = "1"
        out, err = self.run_to_end(status=1)
        self.assertIn("the error of a compiler", out)
        self.assert_one_line(err, "building failed", "build/quickstart.log")

    def test_two_at_once_take_turns(self):
        (self.root / "build").mkdir()
        (self.root / "build/slow").write_text("1")
        both = [self.finish(process) for process in (self.start(), self.start())]
        waited = [out for out, _ in both if "waits for its end" in out]
        self.assertEqual(len(waited), 1, both)
        self.assertEqual(waited[0].count("another tools/quickstart"), 1)

    def wait_until(self, condition):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, self.processes())
            time.sleep(0.02)

    def stop(self, process, kill, number):
        kill(process.pid, number)
        _, err = self.finish(process, 128 + number)
        self.assert_one_line(err, f"stopped by {signal.Signals(number).name}", "Next: run it again")
        self.wait_until(lambda: self.processes() == [])

    def processes(self):
        lines = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().decode(errors="replace"))
            except OSError:  # has just ended
                continue
        return [line for line in lines if str(self.root.parent) in line]

    # A terminal sends SIGINT to all processes of its foreground group; kill sends a signal to one.
    def test_stopped_build_leaves_no_process_and_runs_again(self):
        (self.root / "build").mkdir()
        for kill, number in (
            (os.killpg, signal.SIGINT),
            (os.kill, signal.SIGINT),
            (os.kill, signal.SIGTERM),
            (os.kill, signal.SIGHUP),
        ):
            (self.root / "build/slow").write_text("1000")
            process = self.start()
            self.wait_until((self.root / "build/running").exists)
            self.stop(process, kill, number)
            self.assertFalse((self.root / "build/running").exists())
        (self.root / "build/slow").unlink()
        self.run_to_end()

    def test_stopped_run_leaves_no_process(self):
        self.run_to_end()
        (self.root / "build/slow-run").write_text("1000")
        for kill in (os.killpg, os.kill):
            process = self.start()
            while "ran all_reduce" not in process.stdout.readline():
                pass
            self.stop(process, kill, signal.SIGINT)

    def test_stopped_while_it_waits_for_another(self):
        (self.root / "build").mkdir()
        (self.root / "build/slow").write_text("1000")
        first = self.start()
        self.wait_until((self.root / "build/running").exists)
        for kill in (os.killpg, os.kill):
            second = self.start()
            self.assertIn("waits for its end", second.stdout.readline())
            kill(second.pid, signal.SIGINT)
            self.assert_one_line(self.finish(second, 130)[1], "waiting for another")
        self.stop(first, os.kill, signal.SIGINT)

    def test_stopped_at_any_time(self):
        for milliseconds in range(0, 400, 25):
            process = self.start()
            time.sleep(milliseconds / 1000)
            process.terminate()
            self.finish_any(process)
            self.wait_until(lambda: self.processes() == [])

    def finish_any(self, process):
        _, err = process.communicate(timeout=WAIT_S)
        self.assertIn(process.returncode, (0, 143, -signal.SIGTERM), err)
        self.assertLessEqual(err.count("\n"), 1)

    def test_rest_of_a_stopped_configuration_is_removed(self):
        (self.root / "build/meson-private").mkdir(parents=True)
        self.run_to_end()

    def test_existing_build_is_not_configured_again(self):
        self.run_to_end()
        out, _ = self.run_to_end()
        self.assertNotIn("configuring", out)

    def test_tree_of_another_user_is_one_line(self):
        if os.geteuid() == 0:
            prefix = {"user": OTHER_USER, "extra_groups": []}
        else:
            prefix = {}
            self.root.chmod(0o555)
        _, err = self.run_to_end(status=1, **prefix)
        self.assert_one_line(err, f"cannot write in {self.root}/build", "Next: clone")


class Packages(Tree):
    """tools/setup with a PATH on which ninja is missing, and with an apt-get that installs it."""

    def setUp(self):
        super().setUp()
        (self.programs / "ninja").rename(self.root.parent / "ninja")
        write_program(self.programs / "apt-get", APT_GET)
        for name in PROGRAMS:
            (self.programs / name).symlink_to(shutil.which(name))
        self.environment.update(
            PATH=str(self.programs),
            APT_LOG=str(self.root.parent / "apt-log"),
            APT_PATH=str(self.programs),
            APT_NINJA=str(self.root.parent / "ninja"),
        )

    def be_root(self, uid):
        (self.programs / "id").unlink(missing_ok=True)
        write_program(self.programs / "id", f"#!/bin/sh\necho {uid}\n")

    def test_download_and_installation_are_timed(self):
        self.be_root(0)
        out, _ = self.run_to_end()
        self.assertIn("packages to install with apt-get: ninja-build\n", out)
        self.assertRegex(out, r"packages downloaded in \d+ s\npackages installed in \d+ s\n")

    def test_libraries_of_all_tools_are_installed(self):
        self.be_root(0)
        (self.programs / "pkg-config").unlink()
        write_program(self.programs / "pkg-config", '#!/bin/sh\ncase "$*" in *ncursesw* | *libevent*) exit 1 ;; esac\n')
        out, _ = self.run_to_end()
        self.assertIn("packages to install with apt-get: ninja-build libncurses-dev libevent-dev\n", out)

    def test_no_network_is_one_line(self):
        self.be_root(0)
        self.environment["NO_NETWORK"] = "1"
        _, err = self.run_to_end(status=1)
        self.assert_one_line(err, "cannot download", "no network?", "ninja-build")

    def test_user_without_sudo_is_one_line(self):
        self.be_root(1000)
        _, err = self.run_to_end(status=1)
        self.assert_one_line(err, "no sudo", "apt-get install", "ninja-build")

    def test_sudo_with_a_password_needs_a_terminal(self):
        self.be_root(1000)
        write_program(self.programs / "sudo", "#!/bin/sh\necho 'a password is required' >&2\nexit 1\n")
        _, err = self.run_to_end(status=1)
        self.assert_one_line(err, "sudo needs a password", "ninja-build")

    def test_system_without_apt_is_one_line(self):
        (self.programs / "apt-get").unlink()
        _, err = self.run_to_end(status=1)
        self.assert_one_line(err, "no apt-get", "ninja-build")


class Build(ReadmeCommands):
    """That a first run, whose time it prints, builds what README.md runs and nothing else, and that README.md's commands work."""

    README_LIMIT_S = 600
    FOLDERS = re.compile(
        r"^(build/src/base/version\.cc$|src/|plugin/|tools/(cli|memory|netapi|ranks|verbatim-info|verbatim-perf|workload)/"
        r"|tools/softverbs-control/process_directory\.cc$)"
    )

    def test_first_run(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory).resolve() / "tree"
            shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("build*", ".git"), symlinks=True)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.monotonic()
            result = subprocess.run(
                [root / "tools/quickstart", "--no-gpu"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.assertEqual(result.returncode, 0, result.stdout[-4000:] + result.stderr)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{time.monotonic() - started:.0f} s, {cpu_s:.0f} s of CPU")
            self.assertEqual(result.stdout.count("Wrong elements    : 0 OK"), 2)
            self.check_sources(root)
            write_program(root / "tests/gpu/run", NO_GPU)
            calls, out = self.run_readme(root)
            self.assertIn("softverbs0", out)  # of verbatim-info
            self.assertEqual([call["error"] for call in calls], [None] * len(calls))

    def check_sources(self, root):
        build = root / "build"
        compiled = []
        for entry in json.loads((build / "compile_commands.json").read_text()):
            if not (build / entry["output"]).exists():
                continue
            source = (build / entry["file"]).resolve()
            if build in source.parents:  # joined sources
                compiled += re.findall(r"#include\s*<([^>]+)>", source.read_text())
            else:
                compiled.append(str(source))
        names = [str(pathlib.Path(name).resolve().relative_to(root)) for name in compiled]
        self.assertGreater(len(names), 100)
        self.assertEqual(sorted(names), sorted(set(names)), "a source is compiled twice")
        self.assertEqual([name for name in names if not self.FOLDERS.match(name)], [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
