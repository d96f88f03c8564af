#!/usr/bin/env python3
#: test parsers args={source}
"""What parses bytes from outside has a fuzzer: parsers_test.py SOURCE_DIR.

A parser is
- a function that a header declares, whose name begins with decode, parse, unpack, from_bytes or reason_in, and whose first parameter
  is bytes or text;
- a source that reads from a descriptor, uses the payload of a frame, serves HTTP, or calls a parser of JSON, numbers or structures, and one
  outside of src/wire that includes wire/codec.h.
Each is in one of the two tables of tests/unit/fuzz/README.md: with its fuzzers, or with the reason why it has none. Each row is of a parser that
exists, and each fuzzer has its source, its seeds and its target in tests/unit/fuzz. Before that the check is tried on a tree with each of
these faults.
"""

import pathlib
import re
import sys
import tempfile

PAGE = "tests/unit/fuzz/README.md"
TABLES = re.compile(r"<!-- parsers:begin -->(.*?)<!-- parsers:end -->(.*?)<!-- no-fuzzer:begin -->(.*?)<!-- no-fuzzer:end -->", re.S)

FUNCTION = re.compile(
    r"\b((?:decode|parse|unpack|from_bytes|reason_in)\w*)\(\s*(?:const )?std::(?:span<(?:const )?std::uint8_t|string_view|string&)"
)
SYSTEM_READ = r"(?:recv|recvfrom|recvmsg|read)"
PARSES = re.compile(
    rf"""(?<![\w:>])::{SYSTEM_READ}\(    # of a descriptor
    | \breceive_into\(                   # base/socket.h
    | \.payload\b                        # of a frame of tools/ranks
    | \w*[Jj]son::parse\(
    | \bfrom_bytes<
    | \bstrto(?:u?ll?|u?l|d|f)\(
    | \bstd::(?:from_chars|sto[a-z]+)\(
    | \bevhttp_new\(                      # an HTTP server
    """,
    re.X,
)
# In src/wire the headers have the functions.
CODEC = '#include "wire/codec.h"'
# With the three arguments of the system call at least, in a file without a function of this name.
BARE_READ = re.compile(rf"(?<![\w:.>]){SYSTEM_READ}\((?=[^;{{}}]*,[^;{{}}]*,)")
OWN_READ = re.compile(rf"^\s*(?:virtual |static )*(?!return )[\w:<>]+[&*]? {SYSTEM_READ}\(", re.M)
COMMENT = re.compile(r"//.*")
ROW = re.compile(r"^\| `([^`|]+)` \|([^|]*)\|[^|]*\|([^|]*)\|$", re.M)
ROW_WITHOUT_FUZZER = re.compile(r"^\| (`[^|]+) \|([^|]*)\|([^|]*)\|$", re.M)
NAME = re.compile(r"`([^`]+)`")
# The row is of a source, not of a function of a header. A source without any of the patterns can have one, too: it may
# read memory into which a peer writes.
WHOLE = ""


def parsers(root):
    """Pairs of a file and a function, or WHOLE."""
    for top in ("src", "plugin", "tools"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in (".cc", ".h"):
                continue
            text = COMMENT.sub("", path.read_text())
            name = str(path.relative_to(root))
            if path.suffix == ".h":
                yield from ((name, function) for function in sorted(set(FUNCTION.findall(text))))
            decodes = CODEC in text and not name.startswith("src/wire/")
            if decodes or PARSES.search(text) or (BARE_READ.search(text) and not OWN_READ.search(text)):
                yield name, WHOLE


def rows(root):
    """Of both tables: file, function, names of fuzzers, the reason where a row has none."""
    tables = TABLES.search((root / PAGE).read_text())
    if tables is None:
        return
    for file, functions, fuzzers in ROW.findall(tables[1]):
        for function in NAME.findall(functions) or [WHOLE]:
            yield file, function, NAME.findall(fuzzers), ""
    for parsed, _, reason in ROW_WITHOUT_FUZZER.findall(tables[3]):
        for name in NAME.findall(parsed):
            file, _, function = name.partition(":")
            yield file, function, [], reason.strip()


def faults(root):
    found = set(parsers(root))
    seen = set()
    used = set()
    for file, function, fuzzers, reason in rows(root):
        what = f"{file} {function}".strip()
        if (file, function) in seen:
            yield f"{PAGE}: two rows of {what}"
        seen.add((file, function))
        if (file, function) not in found and (function or not (root / file).is_file()):
            yield f"{PAGE}: there is no parser {what}"
        if not fuzzers and not reason:
            yield f"{PAGE}: {what} has neither a fuzzer nor a reason"
        used.update(fuzzers)
    for file, function in sorted(found - seen):
        yield f"{file}: the parser {function or '(the source reads or parses)'} is in no table of {PAGE}"
    targets = (root / "tests/unit/fuzz/meson.build").read_text()
    sources = {path.name.removesuffix("_fuzz.cc") for path in (root / "tests/unit/fuzz").glob("*_fuzz.cc")}
    for name in sorted(used | sources):
        if name not in used:
            yield f"tests/unit/fuzz/{name}_fuzz.cc: the fuzzer has no row in {PAGE}"
        if name not in sources:
            yield f"tests/unit/fuzz/{name}_fuzz.cc: no such file, but {PAGE} names this fuzzer"
        if not re.search(rf"'{name}': {{", targets):
            yield f"tests/unit/fuzz/meson.build: the fuzzer {name} is not built"
        if not any((root / f"tests/unit/fuzz/corpus/{name}").glob("*")):
            yield f"tests/unit/fuzz/corpus/{name}: there are no seeds"


def check_finds_faults():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for folder in ("src", "tools", "tests/unit/fuzz/corpus/wire", "tests/unit/fuzz/corpus/rma"):
            (root / folder).mkdir(parents=True)
        (root / "src/a.h").write_text("int decode_one(std::span<const std::uint8_t> bytes);\nint parse(std::string_view text);\n")
        (root / "src/b.cc").write_text("void f() { ::recv(0, nullptr, 0, 0); }\n// ::recv( in a comment\n")
        (root / "tools/c.cc").write_text("// ::read(\n")
        (root / "tests/unit/fuzz/wire_fuzz.cc").write_text("")
        (root / "tests/unit/fuzz/corpus/wire/seed").write_text("x")
        good_build = "fuzzers = {\n  'wire': {\n    'sources': files(),\n  },\n}\n"
        good_page = (
            "# Tests\n| `other` | `table` | x | `y` |\n<!-- parsers:begin -->\n"
            "| `src/a.h` | `decode_one` | a peer | `wire` |\n| `tools/c.cc` | | memory | `wire` |\n<!-- parsers:end -->\n"
            "<!-- no-fuzzer:begin -->\n| `src/a.h:parse`, `src/b.cc` | a user | it is short |\n<!-- no-fuzzer:end -->\n"
        )
        decode_row = "| `src/a.h` | `decode_one` | a peer | `wire` |\n"

        def found(page=good_page, build=good_build):
            (root / PAGE).write_text(page)
            (root / "tests/unit/fuzz/meson.build").write_text(build)
            return list(faults(root))

        assert found() == [], found()
        cases = {
            "the parser decode_one is in no table": found(good_page.replace(decode_row, "")),
            "the parser parse is in no table": found(good_page.replace("`src/a.h:parse`, ", "")),
            "src/b.cc: the parser (the source": found(good_page.replace(", `src/b.cc`", "")),
            "there is no parser src/a.h decode_two": found(good_page.replace("`decode_one`", "`decode_one`, `decode_two`")),
            "there is no parser src/d.cc": found(good_page.replace("tools/c.cc", "src/d.cc")),
            "there is no parser src/a.h unpack": found(good_page.replace("src/a.h:parse", "src/a.h:unpack")),
            "two rows of src/b.cc": found(good_page.replace("tools/c.cc", "src/b.cc")),
            "src/b.cc has neither": found(good_page.replace("it is short", "")),
            "src/a.h decode_one has neither": found(good_page.replace("a peer | `wire`", "a peer | ")),
            "rma_fuzz.cc: no such file": found(good_page.replace("memory | `wire`", "memory | `rma`")),
            "corpus/rma: there are no seeds": found(good_page.replace("memory | `wire`", "memory | `rma`")),
            "meson.build: the fuzzer wire is not built": found(build="fuzzers = {\n  'rma': {\n  },\n}\n"),
            "wire_fuzz.cc: the fuzzer has no row": found(good_page.replace("`wire`", "`rma`")),
            "is in no table": found("# Tests without tables\n"),
        }
        for expected, lines in cases.items():
            assert any(expected in line for line in lines), (expected, lines)
        (root / "tools/c.cc").write_text("x = ::read(fd, buffer, 1);\n")
        assert found() == []
        parsing = (
            "return recv(fd, &x, sizeof(x), 0);",
            "read(fd, &x, 1);",
            "receive_into(socket, bytes, filled);",
            "a = ranks::Json::parse(text);",
            "a = nlohmann::json::parse(text);",
            "from_bytes<Hello>(text);",
            "memcpy(&hello, frame.payload.data(), sizeof hello);",
            "strtoll(a, b, 0);",
            "std::from_chars(a, b, c);",
            "std::stoul(text);",
            "http = evhttp_new(base);",
            '#include "wire/codec.h"',
        )
        for text in parsing:
            (root / "tools/d.cc").write_text(f"  {text}\n")
            assert any("tools/d.cc: the parser (the" in line for line in found()), (text, found())
        for text in ("stream.read(a, b, c);", "read(value);", "Status read(int a, int b, int c);\n  read(a, b, c);", "std::stop_token();"):
            (root / "tools/d.cc").write_text(f"  {text}\n")
            assert found() == [], (text, found())


def main():
    check_finds_faults()
    root = pathlib.Path(sys.argv[1]).resolve()
    found = list(faults(root))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
