#!/usr/bin/env python3
#: test documents args={source}
"""What must be right in all documents and scripts: documents_test.py SOURCE_DIR.

Links between the Markdown files lead somewhere: to a file or folder of the tree, or to a heading of a Markdown file. Addresses of
other hosts are not checked. The documents of PAGES are not longer than it says. No shell command adds an empty element to LD_LIBRARY_PATH when that was not
set, because the loader takes it for the current directory. plugin/REFERENCE.md says of NCCL's variables that they differ where
src/base/config.cc reads them, and that they have no effect where it does not. Before that each check is tried on a tree with
such mistakes.
"""

import os
import pathlib
import re
import sys
import tempfile

# Lines of which a document has no more; one with more than LINE characters counts as several.
PAGES = {"README.md": 180, "tests/README.md": 120, "tests/simulation/README.md": 120, "plugin/README.md": 240, "src/README.md": 65}
LINE = 120

LINK = re.compile(r"\[[^]\[]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
# $LD_LIBRARY_PATH beside a colon, but not inside of ${LD_LIBRARY_PATH:+...}.
VARIABLE = r"\$(?:LD_LIBRARY_PATH\b|\{LD_LIBRARY_PATH\})"
EMPTY_ELEMENT = re.compile(rf"(?<!\+):{VARIABLE}|(?<!\+){VARIABLE}:")
# Rows of src/base/config.cc: a variable of Verbatim, and that of NCCL which applies in its place.
ALIAS = re.compile(r'"VERBATIM_\w+",\s*"(NCCL_\w+)"')
NCCL_VARIABLE = re.compile(r"`(NCCL_\w+\*?)`")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)


def all_files(root):
    """Not those of builds and of hidden folders, which other programs may write at this moment."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(("build", ".", "__pycache__"))]
        paths = (pathlib.Path(folder) / name for name in sorted(files))
        yield from (path for path in paths if path.is_file())


def documents(root):
    return (path for path in all_files(root) if path.suffix == ".md")


def anchors(document):
    """The names that GitHub gives to the headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", document.read_text())))
    return {heading.replace(" ", "-") for heading in plain}


def wrong_links(root):
    for document in documents(root):
        for link in LINK.findall(FENCE.sub("", document.read_text())):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists():
                yield f"{document.relative_to(root)}: no such file: {link}"
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                yield f"{document.relative_to(root)}: no such heading: {link}"


def long_documents(root):
    for name, limit in PAGES.items():
        lines = sum(max(1, -(-len(line) // LINE)) for line in (root / name).read_text().splitlines())
        if lines > limit:
            yield f"{name}: {lines} lines, the limit is {limit}"


def empty_elements(root):
    for path in all_files(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if EMPTY_ELEMENT.search(line):
                yield f"{path.relative_to(root)}:{number}: an empty element when LD_LIBRARY_PATH is not set: {line.strip()}"


def first_column(text, table):
    rows = text.partition(f"<!-- {table}:begin -->")[2].partition(f"<!-- {table}:end -->")[0]
    return NCCL_VARIABLE.findall("\n".join(row.split("|")[1] for row in rows.splitlines() if row.startswith("|")))


def wrong_variables(root):
    sources = root / "src/base/config.cc"
    if not sources.exists():  # the installed documents
        return
    used = set(ALIAS.findall(sources.read_text()))
    manual = (root / "plugin/REFERENCE.md").read_text()
    different = first_column(manual, "nccl-different")
    ignored = first_column(manual, "nccl-ignored")
    if not used or not different or not ignored:
        yield "plugin/REFERENCE.md: the tables of NCCL's variables, or those in src/base/config.cc, are not found"
    for name in different:
        if name not in used:
            yield f"plugin/REFERENCE.md: {name} is said to differ, but src/base/config.cc does not read it"
    for name in ignored:
        if any(one == name or (name.endswith("*") and one.startswith(name[:-1])) for one in used):
            yield f"plugin/REFERENCE.md: {name} is said to have no effect, but src/base/config.cc reads it"


def check_finds_wrong_variables():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        assert list(wrong_variables(root)) == []
        (root / "src/base").mkdir(parents=True)
        (root / "plugin").mkdir()
        (root / "src/base/config.cc").write_text('{"VERBATIM_A",\n "NCCL_IB_A", x}, number_row("VERBATIM_B", "NCCL_IB_B_C")')

        def found(different, ignored):
            tables = {"nccl-different": different, "nccl-ignored": ignored}
            lines = [f"<!-- {name}:begin -->\n| x |\n| {row} | `NCCL_IB_D` |\n<!-- {name}:end -->\n" for name, row in tables.items()]
            (root / "plugin/REFERENCE.md").write_text("".join(lines))
            return list(wrong_variables(root))

        assert found("`NCCL_IB_A`", "`NCCL_IB_E`, `NCCL_IB_F_*`") == []
        assert len(found("`NCCL_IB_E`, `NCCL_IB_A`", "`NCCL_IB_F`")) == 1
        assert len(found("`NCCL_IB_A`", "`NCCL_IB_A`, `NCCL_IB_B_*`")) == 2
        assert len(found("", "`NCCL_IB_E`")) == 1


def check_finds_empty_elements():
    name = "LD_LIBRARY_PATH"
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        wrong = [f"{name}=/a:${name}", f"{name}=/a:${{{name}}}", f"{name}=${name}:/a", f"{name}=${{{name}}}:/a"]
        right = [f"{name}=/a${{{name}:+:${name}}}", f"{name}=${{{name}:+${name}:}}/a", f"{name}=$NCCL/lib:/a"]
        (root / "script").write_text("\n".join([*wrong, *right]))
        assert len(list(empty_elements(root))) == len(wrong), list(empty_elements(root))


def check_finds_wrong_links():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        (root / "plugin").mkdir()
        (root / "plugin/README.md").write_text("# The plugin\n## QP order, and more\n[up](../README.md#none)\n")
        (root / "README.md").write_text(
            "# A\n[1](plugin/README.md#qp-order-and-more) [2](plugin) [3](#a) [4](https://example.org/x)\n[5](plugin/none.md)\n"
        )
        expected = ["README.md: no such file: plugin/none.md", "plugin/README.md: no such heading: ../README.md#none"]
        assert list(wrong_links(root)) == expected, list(wrong_links(root))
        for name, limit in PAGES.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(f"{'x' * LINE}\n" * limit)
        assert list(long_documents(root)) == []
        (root / "README.md").write_text("x" * LINE * PAGES["README.md"] + "x")
        assert len(list(long_documents(root))) == 1


def main():
    check_finds_wrong_links()
    check_finds_empty_elements()
    check_finds_wrong_variables()
    root = pathlib.Path(sys.argv[1]).resolve()
    found = [*wrong_links(root), *long_documents(root), *empty_elements(root), *wrong_variables(root)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
