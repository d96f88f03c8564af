#!/usr/bin/env python3
"""Writes a manual page (roff) to stdout; the build calls it, so that a manual says what its program says.

make_manual.py RELEASE NAME SUMMARY PROGRAM [SUBCOMMAND...]   section 1, from PROGRAM --help and PROGRAM SUBCOMMAND --help
make_manual.py RELEASE --settings TEMPLATE PROGRAM            section 7: PROGRAM --variables prints the table of settings,
                                                              which takes the place of the line SETTINGS in TEMPLATE
"""

import os
import re
import subprocess
import sys

ENTRY = re.compile(r"^  (?P<name>\S.*?)(?:  +(?P<text>\S.*))?$")
SECTION = re.compile(r"^(Positionals|Options[a-z -]*|Subcommands):$")
LINK = re.compile(r"\[([^]]*)\]\(#[^)]*\)")


def roff(text):
    """`text` as roff prints it unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("^", "\\(ha").replace("~", "\\(ti")
    return "\\&" + text if text.startswith((".", "\\(aq")) else text


def output_of(program, *arguments):
    """The variable RUNNER says what runs programs of another machine. Scripts need nothing."""
    with open(program, "rb") as file:
        runner = os.environ.get("RUNNER", "").split() if file.read(4) == b"\x7fELF" else []
    return subprocess.run([*runner, program, *arguments], check=True, capture_output=True, text=True).stdout


def title(name, section, release):
    return [f'.TH {roff(name.upper())} {section} "" "Verbatim {release}" "Verbatim"']


def plain(lines):
    """Paragraphs; lines that are indented keep their form."""
    fixed = False
    for line in lines:
        if line.startswith("  ") != fixed:
            fixed = not fixed
            yield ".nf" if fixed else ".fi"
        yield roff(line) if line.strip() else ".PP" if not fixed else ""
    if fixed:
        yield ".fi"


def entries(lines):
    """The options (or arguments) with their text: a name may be followed by lines that are indented further."""
    for line in lines:
        entry = ENTRY.match(line)
        if entry:
            yield ".TP"
            yield f".B {roff(entry['name'])}".replace(",", ",\\:")  # may be broken there
            if entry["text"]:
                yield roff(entry["text"])
        elif line.strip():
            yield roff(line.strip())


class Help:
    """The parts of what --help prints."""

    def __init__(self, text):
        self.usage, self.sections, self.before, self.after = [], {}, [], []
        into = self.before
        for line in text.rstrip().split("\n"):
            section = SECTION.match(line)
            if line.lower().startswith("usage:"):
                self.usage.append(line.split(":", 1)[1].strip())
                into = self.usage
            elif section:
                into = self.sections.setdefault(section[1].upper(), [])
            elif into is self.usage and line.startswith("  "):
                into.append(line.strip())
            elif into is self.usage:
                into = self.after if any(self.before) else self.before
            elif not line.strip() and any(into is lines for lines in self.sections.values()):
                into = self.after
            elif into is self.before and self.usage and line.startswith("  --"):
                # A program without the heads of sections: its options are the lines that begin so.
                into = self.sections.setdefault("OPTIONS", [])
                into.append(line)
            else:
                into.append(line)
        self.before = "\n".join(self.before).strip().split("\n")
        self.after = "\n".join(self.after).strip().split("\n")


def describe(lines):
    return list(plain(lines)) if any(lines) else []


def program_page(release, name, summary, program, *subcommands):
    help_text = Help(output_of(program, "--help"))
    page = [*title(name, 1, release), ".SH NAME", f"{roff(name)} \\- {roff(summary)}", ".SH SYNOPSIS", ".nf"]
    page += [f".B {roff(line)}" for line in help_text.usage] + [".fi", ".SH DESCRIPTION"]
    page += describe(help_text.before)
    for section, lines in help_text.sections.items():
        page += [f".SH {'ARGUMENTS' if section == 'POSITIONALS' else section}", *entries(lines)]
    after = describe(help_text.after)
    page += [".SH NOTES", *after] if after else []
    for subcommand in subcommands:
        own, _, word = subcommand.rpartition("=")
        part = Help(output_of(own or program, word, "--help"))
        page += [".SH", roff(f"{name} {word}"), ".PP", f".B {roff(' '.join(part.usage))}", ".PP", *describe(part.before)]
        for section, lines in part.sections.items():
            page += [f".SS {'Arguments' if section == 'POSITIONALS' else section.capitalize()}", *entries(lines)]
        after = describe(part.after)
        page += [".PP", *after] if after else []
    return page + [".SH SEE ALSO", ".BR libnccl\\-net\\-verbatim (7)"]


def settings(table):
    """Rows of the Markdown table: variable, NCCL's variable, values, default, meaning."""
    for row in table.splitlines()[2:]:
        cells = [LINK.sub(r"\1 in plugin/README.md", cell).replace("`", "") for cell in row.strip("|\n ").split(" | ")]
        variable, alias, values, default, meaning = (cell.strip() for cell in cells)
        yield from (".TP", f".B {roff(variable)}", roff(meaning), ".br", roff(f"Values: {values}. Default: {default}."))
        if alias != "-":
            yield roff(f"NCCL's variable {alias} applies when this one is not set.")


def settings_page(release, template, program):
    rows = list(settings(output_of(program, "--variables")))
    for line in open(template, encoding="utf-8").read().splitlines():
        if line == "SETTINGS":
            yield from rows
        else:
            yield line.replace("RELEASE", release)


def main(release, name, *arguments):
    page = settings_page(release, *arguments) if name == "--settings" else program_page(release, name, *arguments)
    print("\n".join(page))


if __name__ == "__main__":
    main(*sys.argv[1:])
