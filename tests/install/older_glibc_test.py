#!/usr/bin/env python3
#: test install-older-glibc args='{source} {compiler}'
"""Programs and libraries that run with an older glibc than this machine's: older_glibc_test.py SOURCE_DIR COMPILER...

packaging/glibc makes libraries to link with. What is linked is run here, once with this machine's functions and once with those that take
their place where the C library has none.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SOURCE, COMPILER = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
OLDEST = (2, 28)
PROGRAM = r"""
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

struct Global {
  Global() { std::puts("constructor"); }
  ~Global() { std::puts("destructor"); }
} global;

extern "C" int thrown_in_library();
// By these names glibc 2.38's headers declare strtol and others.
extern "C" long __isoc23_strtol(const char*, char**, int);
extern "C" unsigned long __isoc23_strtoul(const char*, char**, int);
extern "C" long long __isoc23_strtoll(const char*, char**, int);
extern "C" unsigned long long __isoc23_strtoull(const char*, char**, int);
extern "C" int __isoc23_sscanf(const char*, const char*, ...);
extern "C" int __isoc23_fscanf(FILE*, const char*, ...);
extern "C" std::size_t strlcpy(char*, const char*, std::size_t) noexcept;

int main(int count, char**) {
  using namespace std::chrono_literals;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable condition;
  const auto start = std::chrono::steady_clock::now();
  const bool ended = !condition.wait_for(lock, 20ms, [] { return false; });
  std::printf("waited %d %d\n", ended, std::chrono::steady_clock::now() - start >= 20ms);
  bool ready = false;
  std::jthread thread([&] {
    const std::lock_guard guard(mutex);
    ready = true;
    condition.notify_one();
  });
  std::printf("notified %d\n", condition.wait_for(lock, 60s, [&] { return ready; }));
  try {
    throw std::runtime_error("thrown");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
  std::printf("library %d\n", thrown_in_library());
  struct stat info;
  std::printf("lstat %d\n", ::lstat("/none", &info));
  const int status = ::stat("/", &info);
  std::printf("stat %d %d\n", status, S_ISDIR(info.st_mode));
  std::printf("file system %d\n", std::filesystem::is_directory("/"));
  std::random_device random;
  bool differs = false;
  for (unsigned first = random(), i = 0; i < 8; ++i) differs = differs || random() != first;
  char bytes[1000] = {};
  ::arc4random_buf(bytes, sizeof bytes);
  int zeros = 0;
  for (const char byte : bytes) zeros += byte == 0;
  std::printf("random %d %d\n", differs, zeros < 100);
  std::printf("exp %d\n", std::exp(count) > 2.7);
  char* end = nullptr;
  std::printf("numbers %ld", __isoc23_strtol("-12x", &end, 10));
  std::printf("%s %lu %lld", end, __isoc23_strtoul("ff", nullptr, 16), __isoc23_strtoll("-9000000000", nullptr, 0));
  std::printf(" %llu", __isoc23_strtoull("9000000000", nullptr, 10));
  int first = 0, second = 0, third = 0;
  int read = __isoc23_sscanf("3:4", "%d:%d", &first, &second);
  char digits[] = "56";
  FILE* const file = ::fmemopen(digits, 2, "r");
  read += __isoc23_fscanf(file, "%d", &third);
  std::fclose(file);
  std::printf(" %d %d %d %d\n", read, first, second, third);
  char copied[4] = "xyz";
  const std::size_t length = ::strlcpy(copied, "a", 0) + ::strlcpy(copied + 2, "b", 2) + 10 * ::strlcpy(copied, "abcdef", 2);
  std::printf("copied %zu %s%s\n", length, copied, copied + 2);
  // Variables of the C library that it knows by another name itself.
  ::setenv("OLDER_GLIBC", "set", 1);
  bool is_set = false;
  for (char** variable = environ; *variable != nullptr; ++variable) is_set = is_set || std::strcmp(*variable, "OLDER_GLIBC=set") == 0;
  std::printf("environ %d, name %d\n", is_set, program_invocation_short_name != nullptr);
}
"""
SHOWN = """constructor
waited 1 1
notified 1
thrown
library 7
lstat -1
stat 0 1
file system 1
random 1 1
exp 1
numbers -12x 255 -9000000000 9000000000 3 3 4 56
copied 62 ab
environ 1, name 1
destructor
"""
LIBRARY = """
extern "C" int thrown_in_library() {
  try {
    throw 7;
  } catch (int number) {
    return number;
  }
}
"""
OWN_NAMES = ("stat", "stat64", "lstat", "lstat64", "fstatat", "fstatat64")
OWN_STAT = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in OWN_NAMES)
# Nothing that is looked up by its name is found.
NOTHING_IS_FOUND = 'extern "C" void* dlsym(void*, const char*) { return nullptr; }\n'
# glibc 2.36
TOO_NEW = "#include <cstdlib>\nint main() { return static_cast<int>(::arc4random_uniform(1)); }\n"


def versions(file):
    shown = subprocess.run(["objdump", "-T", file], capture_output=True, text=True, check=True).stdout
    return {tuple(int(part) for part in version.split(".")) for version in re.findall(r"GLIBC_(\d[\d.]*)", shown)}


class OlderGlibc(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.directory = pathlib.Path(scratch.name)
        command = [SOURCE / "packaging/glibc/make_stubs.py", cls.directory / "a, b", "2.28", *COMPILER]
        cls.stubs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def link(self, name, sources, *options):
        files = []
        for number, source in enumerate(sources):
            files.append(self.directory / f"{name}{number}.cc")
            files[-1].write_text(source)
        runtime = ["-static-libstdc++", "-static-libgcc", "-Wl,--wrap=__libc_start_main", f"-L{self.stubs}"]
        command = [*COMPILER, "-std=c++20", "-O1", *files, "-o", self.directory / name, "-pthread", *runtime, *options]
        return subprocess.run(command, capture_output=True, text=True)

    def check_program(self, name, *more):
        made = self.link("libthrows.so", [LIBRARY], "-shared", "-fPIC")
        self.assertEqual(made.returncode, 0, made.stderr)
        made = self.link(name, [PROGRAM, *more], self.directory / "libthrows.so", f"-Wl,-rpath,{self.directory}")
        self.assertEqual(made.returncode, 0, made.stderr)
        for file in (name, "libthrows.so"):
            self.assertLessEqual(max(versions(self.directory / file)), OLDEST, file)
        done = subprocess.run([self.directory / name], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, SHOWN, ""))

    def test_Program_NeedsNoLaterGlibcAndRuns(self):
        self.check_program("program")

    def test_WithoutNewerFunctions_OlderOnesTakeTheirPlace(self):
        self.check_program("older", NOTHING_IS_FOUND)

    def test_LibraryWithItsOwnFunctions_KeepsThemForPrograms(self):
        """softverbs-files replaces stat for programs."""
        made = self.link("libown.so", [LIBRARY + OWN_STAT], "-shared", "-fPIC", "-Wl,--exclude-libs,ALL")
        self.assertEqual(made.returncode, 0, made.stderr)
        command = ["nm", "-D", "--defined-only", self.directory / "libown.so"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assertEqual({line.split()[-1] for line in shown.splitlines() if " T " in line}, {*OWN_NAMES, "thrown_in_library"})

    def test_SymbolThatIsTooNew_IsAnErrorOfTheLinker(self):
        made = self.link("too_new", [TOO_NEW])
        self.assertIn("undefined reference to `arc4random_uniform'", made.stderr)

    def test_WithoutStubs_ProgramNeedsALaterGlibc(self):
        """What the tests above compare can be seen."""
        source = self.directory / "plain.cc"
        source.write_text(PROGRAM + LIBRARY)
        # Before 2.38 this machine has no functions for the names of its headers.
        options = ["-std=c++20", "-O1", "-pthread", "-Wl,--unresolved-symbols=ignore-in-object-files"]
        subprocess.run([*COMPILER, *options, source, "-o", self.directory / "plain"], check=True)
        self.assertGreater(max(versions(self.directory / "plain")), OLDEST)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
