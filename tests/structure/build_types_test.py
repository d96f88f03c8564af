#!/usr/bin/env python3
# A sanitizer changes nothing in it.
#: test build-types sanitizer=none args={source}
#: test build-types-full sanitizer=none full alone args='{source} full' timeout=7200 priority=-20
"""The usual build types compile as a user configures them, without -Dwerror=true: build_types_test.py SOURCE_DIR [full].

A newer compiler, or another build type, may warn where nothing is wrong (g++ 12 does at -O3). Without `full` this asks only whether
warnings are errors by default. With `full` it builds the plugin and softverbs in each build type, the tools as a release too, with
each of the compilers that are installed; sources are joined, for a shorter build.
"""

import json
import shutil
import subprocess
import sys
import tempfile

FULL = sys.argv[2:] == ["full"]
SOURCE = sys.argv[1]
COMPILERS = ("g++", "g++-12", "g++-13", "clang++", "clang++-14", "clang++-16", "clang++-18")
# Meson's name, and whether the tools are built too. The first is what `meson setup build` takes.
TYPES = (([], False), (["--buildtype=release"], True), *(([f"--buildtype={name}"], False) for name in ("debug", "minsize", "plain")))

JOINED = ("-Dunity=on", "-Dunity_size=100")


def run(compiler, command):
    result = subprocess.run(
        ["env", f"CXX={compiler}", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        print("\n".join(result.stdout.splitlines()[-40:]))
    return result.returncode == 0


def builds(compiler, options, tools):
    with tempfile.TemporaryDirectory() as directory:
        setup = ["meson", "setup", directory, SOURCE, *options, "-Dtests=disabled", f"-Dtools={'enabled' if tools else 'disabled'}"]
        return run(compiler, setup) and run(compiler, ["ninja", "-C", directory])


def compilers():
    """The installed ones by version, because g++ and g++-12 can be the same."""
    found = {}
    for name in filter(shutil.which, COMPILERS):
        text = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        found.setdefault((name[0], text.split()[-1]), name)
    return found.values()


def main():
    if not FULL:
        command = ["meson", "introspect", "--buildoptions", f"{SOURCE}/meson.build"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        defaults = {option["name"]: option["value"] for option in json.loads(text)}
        print(f"werror is {defaults['werror']} by default")
        return 1 if defaults["werror"] else 0
    wrong = 0
    for compiler in compilers():
        for options, tools in TYPES:
            right = builds(compiler, [*options, *JOINED], tools)
            wrong += not right
            print(f"{compiler}: {' '.join(options) or 'default'}: {'builds' if right else 'FAILS'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
