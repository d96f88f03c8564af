#!/usr/bin/env python3
#: test install-packages full alone timeout=3600 priority=-10 args={build}/tests/install/packages
"""The packages that tools/package builds, installed and removed in scratch places: package_test.py SCRATCH_DIR.

deb: installed, run, removed and purged in a root of its own. wheel: in a fresh virtual environment. rpm: built, and its
files compared with those of the deb. A kind whose program is missing here is skipped.

Of each program and library of the wheel, which has all: the glibc and the other libraries that it needs.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import unittest
import urllib.request

SCRATCH = pathlib.Path(sys.argv[1]).resolve()
SOURCE = pathlib.Path(__file__).resolve().parents[2]
OUT = SCRATCH / "out"
OLDEST_GLIBC = "2.28"
LIBRARIES = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"}  # and the loader
NOTICES_OF_PLUGIN = {"libsodium-dev"}
NOTICES_OF_PROGRAMS = {"libcli11-dev", "libevent-dev", "libfmt-dev", "libncurses-dev", "nlohmann-json3-dev"}
PACKAGES = {"libnccl-net-verbatim", "verbatim-tools", "softverbs"}


def run(*command, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "DESTDIR")}
    done = subprocess.run([*map(str, command)], env={**environment, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(kind, machine=platform.machine()):
    """The packages of a kind. All kinds share one build directory for each machine."""
    command = [SOURCE / "tools/package", kind, "--machine", machine, "--out", OUT, "--build", SCRATCH / "build"]
    lines = run(*command).splitlines()
    return [pathlib.Path(line) for line in lines if line.startswith(f"{OUT}/")]


def check_tools(case, directory):
    """The tools run over softverbs from `directory`, and find the plugin of the same installation."""
    variables = {"PATH": f"{directory}:{os.environ['PATH']}", "SOFTVERBS_LOCK_LIMIT": "none"}
    job = ["verbatim-perf", "sendrecv", "--plugin", "verbatim", "-b", "8", "-e", "8"]
    launcher = ["softverbs", "--namespace", "package", "--"]
    case.assertIn("\ninit: succeeds", run(*launcher, "verbatim-info", **variables))
    files = run(*launcher, "stat", "-c", "%F", "/dev/infiniband/uverbs0", "/sys/class/infiniband", **variables)
    case.assertEqual(files, "character special file\ndirectory\n")
    case.assertTrue(run(directory / "verbatim-report", "--version").startswith("verbatim-report "))
    check_exporter(case, directory)
    shown = run(*launcher, *job, **variables)
    case.assertIn("# Wrong elements    : 0 OK", shown)
    case.assertRegex(shown, rf"\(net plugin v\d+, {re.escape(str(SCRATCH))}/")


def check_exporter(case, directory):
    command = [directory / "verbatim-exporter", "--listen", "127.0.0.1:0", "--dir", SCRATCH / "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exporter:
        try:
            url = re.search(r"http://\S+", exporter.stdout.readline())[0]
            with urllib.request.urlopen(url, timeout=60) as answer:
                case.assertIn(b"\nverbatim_up 1\n", answer.read())
        finally:
            exporter.terminate()
    case.assertEqual(exporter.returncode, 0)


@unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg-deb")
class Deb(unittest.TestCase):
    def setUp(self):
        self.root = SCRATCH / "root"
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("info", "updates", "triggers"):
            (self.root / "var/lib/dpkg" / name).mkdir(parents=True)
        for name in ("status", "available"):
            (self.root / "var/lib/dpkg" / name).touch()

    def dpkg(self, *arguments):
        forced = "--force-depends,not-root,script-chrootless"  # the root has no other packages
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        return run("dpkg", f"--root={self.root}", forced, "--log=/dev/null", *arguments, PATH=path)

    def files(self):
        return [path for path in self.root.glob("usr/**/*") if not path.is_dir()]

    def test_Packages_AreInstalledRunRemovedAndPurged(self):
        packages = build("deb")
        self.assertEqual({package.name.split("_")[0] for package in packages}, PACKAGES)
        for package in packages:
            self.assertRegex(run("dpkg-deb", "--field", package, "Version"), r"^\d+\.\d+\.\d+(~rc\d+)?\n$")
            depends = run("dpkg-deb", "--field", package, "Depends").strip().split(", ")
            self.assertEqual(depends[0], f"libc6 (>= {OLDEST_GLIBC})")
            others = {"libnccl-net-verbatim": ["libibverbs1"], "verbatim-tools": ["python3"]}
            self.assertEqual(depends[1:], others.get(package.name.split("_")[0], []))
            recommended = run("dpkg-deb", "--field", package, "Recommends").strip()
            self.assertEqual(recommended, "python3-matplotlib" if package.name.startswith("verbatim-tools") else "")
        if shutil.which("lintian"):
            shown = subprocess.run(["lintian", *packages], capture_output=True, text=True)
            self.assertEqual((shown.returncode, shown.stdout), (0, ""), shown.stderr)
        self.dpkg("--install", *packages)
        plugin = list((self.root / "usr/lib").glob("*/libnccl-net-verbatim.so"))
        self.assertEqual(len(plugin), 1)
        notices = {
            package: {file.name for file in (self.root / "usr/share/doc" / package / "libraries").iterdir()}
            for package in ("libnccl-net-verbatim", "verbatim-tools")
        }
        self.assertEqual(notices["libnccl-net-verbatim"], NOTICES_OF_PLUGIN)
        self.assertEqual(notices["verbatim-tools"], NOTICES_OF_PROGRAMS)
        check_tools(self, self.root / "usr/bin")
        self.dpkg("--remove", *PACKAGES)
        self.assertEqual(self.files(), [])
        self.dpkg("--purge", *PACKAGES)
        self.assertNotIn("Package: ", (self.root / "var/lib/dpkg/status").read_text())


class Wheel(unittest.TestCase):
    def test_Wheel_InFreshEnvironment_SetsVariablesAndRuns(self):
        (wheel,) = build("wheel")
        self.assertRegex(wheel.name, rf"^verbatim_nccl-\d+\.\d+\.\d+(rc\d+)?-py3-none-manylinux_{OLDEST_GLIBC.replace('.', '_')}_\w+\.whl$")
        environment = SCRATCH / "venv"
        shutil.rmtree(environment, ignore_errors=True)
        run(sys.executable, "-m", "venv", environment)
        run(environment / "bin/pip", "install", "--disable-pip-version-check", "--no-index", wheel)
        python = environment / "bin/python"
        script = f'eval "$("{python}" -m verbatim_nccl env)"; env'
        shown = dict(line.split("=", 1) for line in run("sh", "-euc", script).splitlines() if "=" in line)
        self.assertEqual((shown["NCCL_NET"], shown["NCCL_NET_PLUGIN_REF_COUNT"]), ("Verbatim", "1"))
        plugin = pathlib.Path(shown["NCCL_NET_PLUGIN"])
        self.assertTrue(plugin.is_file() and plugin.is_relative_to(environment), plugin)
        check_tools(self, environment / "bin")
        self.assertEqual(subprocess.run([python, "-m", "verbatim_nccl"], capture_output=True).returncode, 2)
        files = [file for file in plugin.parents[1].rglob("*") if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
        self.assertGreater(len(files), 10)
        for file in files:
            self.check_needs(file)
        run(environment / "bin/pip", "uninstall", "--yes", "verbatim-nccl")
        self.assertFalse(plugin.exists())

    def test_WheelForAnotherMachine_HasItsProgramsAndTheyRun(self):
        emulator = shutil.which("qemu-aarch64")
        if platform.machine() == "aarch64":
            self.skipTest("this machine is no other one")
        trial = [SOURCE / "packaging/aarch64/make_sysroot", SCRATCH / "trial", "libtinfo6"]
        if subprocess.run(trial, stderr=subprocess.DEVNULL).returncode == 77:
            self.skipTest("no cross compiler or emulator for aarch64, or no packages")
        (wheel,) = build("wheel", "aarch64")
        self.assertRegex(wheel.name, rf"-py3-none-manylinux_{OLDEST_GLIBC.replace('.', '_')}_aarch64\.whl$")
        root = SCRATCH / "wheel-aarch64"
        shutil.rmtree(root, ignore_errors=True)
        shutil.unpack_archive(wheel, root, "zip")
        files = [file for file in root.rglob("*") if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
        self.assertGreater(len(files), 10)
        for file in files:
            self.assertEqual(file.read_bytes()[18:20], b"\xb7\x00")  # EM_AARCH64
            self.check_needs(file)
        own = root / "verbatim_nccl/files"
        notices = {file.name for file in (own / "share/doc/verbatim/libraries").iterdir()}
        self.assertEqual(notices, NOTICES_OF_PLUGIN | NOTICES_OF_PROGRAMS)
        variables = {"VERBATIM_VERBS_LIBRARY": own / "lib/verbatim/softverbs/lib/libibverbs.so.1", "SOFTVERBS_NAMESPACE": "aarch64"}
        (own / "bin/verbatim-info").chmod(0o755)
        shown = run(emulator, "-L", "/usr/aarch64-linux-gnu", own / "bin/verbatim-info", **variables)
        self.assertIn("\ninit: succeeds", shown)

    def check_needs(self, file):
        shown = run("objdump", "-p", file)
        versions = [tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_(\d[\d.]*)", shown)]
        self.assertLessEqual(max(versions), tuple(map(int, OLDEST_GLIBC.split("."))), file)
        needed = set(re.findall(r"NEEDED +(\S+)", shown))
        self.assertEqual({name for name in needed - LIBRARIES if not name.startswith("ld-linux-")}, set(), file)


@unittest.skipUnless(shutil.which("rpmbuild"), "no rpmbuild")
class Rpm(unittest.TestCase):
    def test_Spec_Builds(self):
        packages = build("rpm")
        self.assertEqual({re.match(r"(.+?)-\d", package.name)[1] for package in packages}, PACKAGES)
        files = "\n".join(run("rpm", "-qlp", package) for package in packages)
        for name in ("libnccl-net-verbatim.so", "bin/verbatim-info", "bin/verbatim-exporter", "bin/softverbs", "softverbs/lib/libibverbs.so.1"):
            self.assertIn(name, files)
        (tools,) = (package for package in packages if package.name.startswith("verbatim-tools"))
        self.assertEqual(run("rpm", "-qp", "--recommends", tools), "python3-matplotlib\n")
        self.assertIn("\npython3\n", run("rpm", "-qp", "--requires", tools))
        provided = "\n".join(run("rpm", "-qp", "--provides", package) for package in packages)
        self.assertNotIn("libibverbs.so", provided)


if __name__ == "__main__":
    SCRATCH.mkdir(parents=True, exist_ok=True)
    unittest.main(argv=sys.argv[:1], verbosity=2)
