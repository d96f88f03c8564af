#!/usr/bin/env python3
"""Makes libraries to link with in place of the C library's, so that what is linked runs with an older glibc too.

usage: make_stubs.py DIRECTORY OLDEST COMPILER...

Makes a directory in DIRECTORY, whose name says what is in it, and prints its path. It has the C library's libraries, with
names and no code: of each symbol the newest version up to OLDEST (such as 2.28), in the library that had it then. The
newer symbols that the C++ runtime, libraries that are linked in and our sources use are in newer.cc, stat.cc and start.cc.
A symbol that is neither there nor old enough is an error of the linker. COMPILER: the C++ compiler, and its options. A
program is linked with -L and this path and, because start.cc takes its place, -Wl,--wrap=__libc_start_main.

Sources: the changes of glibc 2.34 (libraries that became part of libc.so.6); the dynamic symbols of ELF, as readelf prints
them.
"""

import dataclasses
import hashlib
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# Where symbols were before glibc 2.34.
EARLIER = (
    ("libpthread.so.0", r"_?_?pthread_|sem_|thrd_|mtx_|cnd_|tss_|call_once$"),
    ("libdl.so.2", r"dl(addr1?|close|error|info|mopen|open|sym|vsym)$"),
    ("librt.so.1", r"_?_?(aio|lio|mq|shm|timer)_"),
    ("libutil.so.1", r"(forkpty|login|login_tty|logout|logwtmp|openpty)$"),
    ("libanl.so.1", r"(getaddrinfo_a|gai_(cancel|error|suspend))$"),
    ("libresolv.so.2", r"_?_?(dn|ns|p|res)_"),
)
SOURCES = ("newer.cc", "stat.cc", "start.cc")
NEEDS_AT_LEAST = 1000  # symbols of libc.so.6: readelf's columns have been read


def number(version):
    return tuple(int(part) for part in version.split("."))


@dataclasses.dataclass(frozen=True)
class Symbol:
    version: str
    binding: str  # "global" or "weak"
    variable: int | None  # its address; None: a function
    size: int  # in bytes


def symbols(library, oldest):
    """By name. Of each name the newest version up to `oldest`."""
    found = {}
    shown = subprocess.run(["readelf", "--wide", "--dyn-syms", library], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        match = re.match(r"\s*\d+: ([0-9a-f]+) +(\w+) (\w+) +(GLOBAL|WEAK) +DEFAULT +(?!UND|ABS)\w+ (\w+)@@?GLIBC_([0-9.]+)$", line)
        if match is None or match[3] == "TLS":
            continue
        address, size, kind, binding, name, version = match.groups()
        if number(version) > oldest or (name in found and number(found[name].version) > number(version)):
            continue
        found[name] = Symbol(version, binding.lower(), int(address, 16) if kind == "OBJECT" else None, int(size, 0))
    return found


def definition(name, symbol):
    kind = "%function" if symbol.variable is None else "%object"
    return [f".{symbol.binding} {name}", f".type {name}, {kind}", f".size {name}, {symbol.size}", f"{name}:"]


def make_stub(directory, soname, contents, compiler):
    """A library with this soname and these symbols."""
    assembly = [".text"]
    versions = {}
    variables = {}
    for name, symbol in sorted(contents.items()):
        versions.setdefault(symbol.version, []).append(name)
        if symbol.variable is None:
            assembly += definition(name, symbol) + [".skip 8"]
        else:
            variables.setdefault(symbol.variable, []).append(name)
    # A program gets a copy of a variable, for all of its names: environ, and __environ, by which the C library knows it.
    assembly.append(".bss")
    for names in variables.values():
        assembly.append(".balign 32")
        for name in names:
            assembly += definition(name, contents[name])
        assembly.append(f".skip {max(contents[name].size for name in names)}")
    assembly.append('.section .note.GNU-stack,"",%progbits')
    nodes = [f"GLIBC_{version} {{ global: {'; '.join(versions[version])}; }};" for version in sorted(versions, key=number)]
    source, script = directory / f"{soname}.s", directory / f"{soname}.map"
    source.write_text("\n".join(assembly) + "\n")
    script.write_text("\n".join(nodes) + "\n")
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-Xlinker", "--version-script", "-Xlinker", script]
    subprocess.run([*compiler, *options, "-o", directory / soname, source], check=True)


def main(directory, oldest, *compiler):
    def path_of(name, kind="file"):
        return subprocess.run([*compiler, f"-print-{kind}-name={name}"], capture_output=True, text=True, check=True).stdout.strip()

    digest = hashlib.sha256(repr((oldest, compiler)).encode())
    for name in (path_of("libc.so.6"), "make_stubs.py", "stat_version.h", *SOURCES):
        digest.update((HERE / name).read_bytes())
    directory = pathlib.Path(directory).resolve() / f"glibc-{digest.hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    oldest = number(oldest)
    libc = symbols(path_of("libc.so.6"), oldest)
    assert len(libc) > NEEDS_AT_LEAST, f"{len(libc)} symbols in {path_of('libc.so.6')}"
    loader = next(name for name in re.findall(r"\[(ld-linux\S*)\]", subprocess.run(
        ["readelf", "--wide", "--dynamic", path_of("libc.so.6")], capture_output=True, text=True, check=True).stdout))
    stubs = {"libm.so.6": symbols(path_of("libm.so.6"), oldest), loader: symbols(path_of(loader), oldest)}
    for soname, pattern in EARLIER:
        stubs[soname] = {name: libc.pop(name) for name in [*libc] if re.match(pattern, name)}
    stubs["libc.so.6"] = libc
    for soname, contents in stubs.items():
        make_stub(directory, soname, contents, compiler)
    options = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-D_GNU_SOURCE", "-c"]
    objects = []
    for source in SOURCES:
        objects.append(directory / f"{source}.o")
        subprocess.run([*compiler, *options, HERE / source, "-o", objects[-1]], check=True)
    archive = directory / "libnewer.a"
    archive.unlink(missing_ok=True)
    subprocess.run([path_of("ar", "prog"), "rcsD", archive, *objects], check=True)
    others = " ".join(f'"{directory / soname}"' for soname in [*(soname for soname, _ in EARLIER), loader])
    own = f'"{archive}" "{path_of("libc_nonshared.a")}"'  # linked into each program and library
    (directory / "libc.so").write_text(f'GROUP ( {own} "{directory / "libc.so.6"}" AS_NEEDED ( {others} ) )\n')
    (directory / "libm.so").write_text(f'GROUP ( "{directory / "libm.so.6"}" )\n')
    print(directory)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
