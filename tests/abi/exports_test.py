#!/usr/bin/env python3
# A plugin that is built with a sanitizer needs the sanitizer's runtime library.
#: test abi-exports suite=abi sanitizer=none args='{plugin} {source}/plugin/exports.map'
"""Checks the dynamic symbols and the needed libraries of the plugin.

Usage: exports_test.py PLUGIN EXPORTS_MAP

The defined dynamic symbols must be exactly those of EXPORTS_MAP: one data object for each table version. No symbol of
the C++ runtime may be defined or undefined. No symbol may have the binding UNIQUE, because dlclose() cannot unload such
a library. Only the C library may be needed.
"""

import re
import subprocess
import sys
import unittest

VERSIONS = range(6, 13)
RMA_TABLES = {"ncclRmaPlugin_v13", "ncclRmaPlugin_v14", "ncclGinPlugin_v13"}
ALLOWED_NEEDED = re.compile(r"^(libc|libm|libdl|libpthread)\.so\.\d+$|^ld-linux[^/]*\.so\.\d+$")
# Mangled C++ names, and the prefixes of libstdc++, libgcc and their unwinder.
CXX_RUNTIME = re.compile(r"^(_Z|__cxa_(?!finalize$|atexit$|thread_atexit_impl$)|__gxx_|_Unwind_|__gcc_|__emutls_)")

plugin = ""
exports_map = ""


def readelf(*options):
    run = subprocess.run(
        ["readelf", "--wide", *options, plugin], check=True, capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    return run.stdout.splitlines()


def dynamic_symbols():
    """(name, type, binding, section index) of each entry of .dynsym; names without version."""
    symbols = []
    for line in readelf("--dyn-syms"):
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            symbols.append((fields[7].split("@")[0], fields[3], fields[4], fields[6]))
    return symbols


def exported_by_map():
    with open(exports_map, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/|#[^\n]*", "", file.read(), flags=re.S)
    names = re.search(r"global\s*:(.*?)local\s*:\s*\*\s*;", text, flags=re.S).group(1)
    return {name.strip() for name in names.split(";") if name.strip()}


class Exports(unittest.TestCase):
    def test_the_map_names_every_version_and_no_other(self):
        self.assertEqual(exported_by_map(), {f"ncclNetPlugin_v{version}" for version in VERSIONS} | RMA_TABLES)

    def test_defined_symbols_equal_the_map(self):
        defined = [symbol for symbol in dynamic_symbols() if symbol[3] != "UND"]
        self.assertEqual(sorted(name for name, _, _, _ in defined), sorted(exported_by_map()))
        for name, kind, binding, _ in defined:
            self.assertEqual((kind, binding), ("OBJECT", "GLOBAL"), name)

    def test_no_symbol_of_the_cxx_runtime_is_undefined(self):
        undefined = [name for name, _, _, section in dynamic_symbols() if section == "UND"]
        self.assertIn("dlopen", undefined)  # libibverbs is opened at run time
        self.assertEqual([name for name in undefined if CXX_RUNTIME.match(name)], [])

    def test_no_unique_symbol(self):
        self.assertEqual([name for name, _, binding, _ in dynamic_symbols() if binding == "UNIQUE"], [])

    def test_needed_libraries(self):
        needed = [re.search(r"\[(.*)\]", line).group(1) for line in readelf("--dynamic") if "(NEEDED)" in line]
        self.assertIn("libc.so.6", needed)
        self.assertEqual([name for name in needed if not ALLOWED_NEEDED.match(name)], [])


if __name__ == "__main__":
    plugin, exports_map = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1], verbosity=2)
