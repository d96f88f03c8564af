#!/usr/bin/env python3
"""Links between the Markdown files lead somewhere, and README.md is one page: documents_test.py SOURCE_DIR.

A link is to a file or folder of the tree, or to a heading of a Markdown file. Addresses of other hosts are not checked. Before
that the check is tried on a tree of two files with two wrong links.
"""

import os
import pathlib
import re
import sys
import tempfile

README_LINES = 160

LINK = re.compile(r"\[[^]\[]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)


def documents(root):
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(("build", ".git"))]
        yield from (pathlib.Path(folder) / name for name in sorted(files) if name.endswith(".md"))


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


def long_readme(root):
    lines = (root / "README.md").read_text().count("\n")
    if lines > README_LINES:
        yield f"README.md: {lines} lines, the limit is {README_LINES}"


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
        (root / "README.md").write_text("\n" * (README_LINES + 1))
        assert len(list(long_readme(root))) == 1


def main():
    check_finds_wrong_links()
    root = pathlib.Path(sys.argv[1]).resolve()
    found = [*wrong_links(root), *long_readme(root)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
