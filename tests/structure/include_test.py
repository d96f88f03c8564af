#!/usr/bin/env python3
#: test include-directions args={source}
"""Include lines point one way: include_test.py SOURCE_DIR.

ALLOWED names each folder of the sources and the folders whose headers it may include besides its own. A folder that is not named there, or an
include line that it does not allow, is a failure. Tests outside tests/unit include from src/ only base, which the tools use too, and nothing of
tests/unit. Before that the check is tried on a tree of small files, some of which include what they must not.
"""

import pathlib
import re
import sys
import tempfile

BASE = {"base"}
WIRE = BASE | {"wire"}
VERBS = BASE | {"verbs"}
CHANNEL = WIRE | {"channel"}
DIAGNOSE = VERBS | CHANNEL
TRANSFER = DIAGNOSE | {"net/diagnose"}
CONNECT = TRANSFER | {"net/transfer"}
HOST = BASE | {"softverbs/host"}

ALLOWED = {
    "base": set(),
    "runtime": BASE,
    "verbs": BASE,
    "wire": BASE,
    "channel": WIRE | {"runtime"},
    "net/diagnose": DIAGNOSE,
    "net/transfer": TRANSFER,
    "net/connect": CONNECT,
    "net/monitor": CONNECT | {"runtime"},
    "net/context": CONNECT | {"net/connect", "net/monitor"},
    "rma": CONNECT | {"net/connect", "net/context", "net/monitor", "runtime"},
    "plugin": CONNECT | {"net/context", "rma", "nccl"},
    "softverbs/host": BASE,
    "softverbs/files": HOST,
    "softverbs/gpu": HOST,
    "softverbs/memory": HOST | {"softverbs/gpu"},
    "softverbs/fabric": HOST,
    "softverbs/faults": HOST | {"softverbs/fabric"},
    "softverbs/engine": HOST | {"softverbs/fabric", "softverbs/faults", "softverbs/gpu", "softverbs/memory"},
    "softverbs/api": HOST | {"softverbs/engine", "softverbs/fabric", "softverbs/faults", "softverbs/memory"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def folder_of(root, path):
    """The folder of a file of ours, as ALLOWED names it; relative to src/, plugin/ as it is."""
    parts = path.relative_to(root).parent.parts
    return "/".join(parts[1:] if parts[0] == "src" else parts)


def target_folder(root, source, name):
    """The folder of an included header; None when there is no such file."""
    for parent in (source.parent, root / "src", root / "include", root):
        header = (parent / name).resolve()
        if header.is_file():
            return "nccl" if header.is_relative_to(root / "include") else folder_of(root, header)
    return None


def upward_includes(root):
    """Include lines that ALLOWED does not have, as lines of text."""
    sources = [path for top in ("src", "plugin") for path in sorted((root / top).rglob("*")) if path.suffix in (".cc", ".h")]
    for source in sources:
        folder = folder_of(root, source)
        if folder not in ALLOWED:
            yield f"{source.relative_to(root)}: the folder {folder} is not in ALLOWED"
            continue
        for name in INCLUDE.findall(source.read_text()):
            target = target_folder(root, source, name)
            if target != folder and target not in ALLOWED[folder]:
                yield f"{source.relative_to(root)}: {folder} must not include {name} ({target or 'no such file'})"


def internal_includes(root):
    """Include lines of tests outside tests/unit that name internal headers, or headers of tests/unit, as lines of text."""
    tests = root / "tests"
    sources = [path for path in sorted(tests.rglob("*")) if path.suffix in (".cc", ".h") and not path.is_relative_to(tests / "unit")]
    for source in sources:
        for name in INCLUDE.findall(source.read_text()):
            for parent in (source.parent, tests, root / "src"):
                header = (parent / name).resolve()
                if not header.is_file():
                    continue
                if header.is_relative_to(tests / "unit") or header.is_relative_to(root / "src") and header.parent != root / "src/base":
                    yield f"{source.relative_to(root)}: only tests/unit may include {header.relative_to(root)}"
                break


def check_finds_wrong_includes():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory).resolve()
        for folder in ("base", "verbs"):
            (root / "src" / folder).mkdir(parents=True)
        (root / "src/verbs/device.h").write_text('#include "base/result.h"\n')
        (root / "src/base/result.h").write_text('#include "verbs/device.h"\n')
        expected = ["src/base/result.h: base must not include verbs/device.h (verbs)"]
        assert list(upward_includes(root)) == expected, list(upward_includes(root))
        for folder in ("unit", "rma"):
            (root / "tests" / folder).mkdir(parents=True)
            (root / f"tests/{folder}/a_test.cc").write_text(
                '#include <gtest/gtest.h>\n#include "base/result.h"\n#include "verbs/device.h"\n#include "unit/peer.h"\n'
            )
        (root / "tests/unit/peer.h").write_text("")
        expected = [f"tests/rma/a_test.cc: only tests/unit may include {name}" for name in ("src/verbs/device.h", "tests/unit/peer.h")]
        assert list(internal_includes(root)) == expected, list(internal_includes(root))


def main():
    check_finds_wrong_includes()
    root = pathlib.Path(sys.argv[1]).resolve()
    found = [*upward_includes(root), *internal_includes(root)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
