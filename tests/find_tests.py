#!/usr/bin/env python3
"""Prints the test programs and tests that the first lines of the files in tests/ name: find_tests.py TESTS BIN SANITIZER FACT...

Meson runs it when it configures (bin/meson.build). A directive is a line "//: WORD ..." in the comments at the head of a source,
or "#: WORD ..." in those of a script or of a folder's meson.build; CONTRIBUTING.md shows them all. SANITIZER is Meson's b_sanitize
("none" without one), and BIN the folder of the test programs. A FACT says what this build has: KIND:NAME=VALUE, without the value
if it could have it, but has it not. KIND is "link" for what a program can be linked with, "target" for what is built, with its
path, "path" for other paths. A test that needs something that this build has not is left out.

Lines have fields between tabs, and lists in fields between "|":

  program NAME SOURCES LINKED DEFINES FLAGS
  test KIND NAME PROGRAM ARGUMENTS ENVIRONMENT SUITES TARGETS TIMEOUT PRIORITY PROTOCOL

KIND is "test" or "benchmark", with "-alone" if no other test may run beside it. PROGRAM is the path of a script or the name of a
test program.
"""

import dataclasses
import itertools
import pathlib
import re
import shlex
import sys

SUITES = ("full", "full-sanitized", "sanitized", "threads")  # beside the suite that a test belongs to; tests/README.md explains them
SANITIZERS = ("none", "any", "address", "undefined", "thread")
ONE_VALUE = {  # a setting that has one value: its form, and what a value of another form is
    "suite": (r"[a-z][\w-]*", "no word"),
    "timeout": (r"-?\d+", "no number"),
    "priority": (r"-?\d+", "no number"),
    "shards": (r"[1-9]\d*", "no number from 1"),
    "protocol": ("exitcode|gtest|tap|rust", "none of exitcode, gtest, tap, rust"),
    "under": (r"[\w-]+", "no name"),
}
DIRECTIVE = re.compile(r"^(?://|#):( +)(\S.*)$")
PLACEHOLDER = re.compile(r"\{([\w-]*)\}")


class Wrong(Exception):
    """A directive is wrong: (FILE:LINE, what is wrong)."""


class Said(str):
    """What a directive says, and where. Its lines may be shared by tests of other files."""

    def __new__(cls, text, where):
        said = super().__new__(cls, text)
        said.where = where
        return said

    def parts(self, separator=None):
        return [Said(part, self.where) for part in self.split(separator)]


@dataclasses.dataclass
class Settings:
    """What the words of one or several directives set. Its texts are Said, but for names of suites."""

    values: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    arguments: list = dataclasses.field(default_factory=list)
    wanted: list = dataclasses.field(default_factory=list)  # patterns of cases
    unwanted: list = dataclasses.field(default_factory=list)
    suites: list = dataclasses.field(default_factory=list)
    needs: list = dataclasses.field(default_factory=list)
    has: list = dataclasses.field(default_factory=list)
    used: list = dataclasses.field(default_factory=list)  # names of sets
    sanitizers: list = dataclasses.field(default_factory=list)
    crossed: dict = dataclasses.field(default_factory=dict)  # the name of a list: its values
    alone: bool = False

    def with_more(self, more):
        """These settings and then others, which replace single values and variables and add to the rest."""
        both = {}
        for field in dataclasses.fields(self):
            old, new = getattr(self, field.name), getattr(more, field.name)
            both[field.name] = {**old, **new} if isinstance(old, dict) else old + new if isinstance(old, list) else old or new
        return Settings(**both)


@dataclasses.dataclass
class Line:
    """A directive, with the indented lines below it."""

    where: str
    text: str
    more: list = dataclasses.field(default_factory=list)  # "when ..." lines
    variants: list = dataclasses.field(default_factory=list)

    @property
    def words(self):
        try:
            return shlex.split(self.text)
        except ValueError as error:
            raise Wrong(self.where, str(error)) from error


@dataclasses.dataclass
class Program:
    where: str
    name: str
    sources: list = dataclasses.field(default_factory=list)
    linked: list = dataclasses.field(default_factory=list)
    defines: list = dataclasses.field(default_factory=list)
    flags: list = dataclasses.field(default_factory=list)
    is_named: bool = False  # by a test of any build
    is_used: bool = False  # by a test of this build; others are not built


def directives(path, root):
    """The directives at the head of a file. One below the head has no effect, so it is an error."""
    lines, in_head, above = [], True, None
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        in_head = in_head and (not text or text.startswith(("//", "#!", "#:", "# ")) or text == "#")
        where = f"{path.relative_to(root.parent)}:{number}"
        if not text.startswith(("//:", "#:")):
            continue
        found = DIRECTIVE.match(text)
        if not found:
            raise Wrong(where, "a space and a word must follow the colon")
        if "|" in text or "\t" in text:
            raise Wrong(where, "a directive has no '|' and no tab, which separate fields for Meson")
        if not in_head:
            raise Wrong(where, "a directive stands below the first lines of the file")
        word, _, rest = found[2].partition(" ")
        if len(found[1]) == 1:
            above = Line(where, found[2])
            lines.append(above)
        elif above is None:
            raise Wrong(where, "an indented line needs a directive above it")
        elif word == "+":
            above.text += " " + rest
        elif word == "when":
            above.more.append(Line(where, rest))
        elif not lines[-1].text.startswith(("test ", "benchmark ")):
            raise Wrong(where, "only a test has variants")
        else:
            above = Line(where, found[2])
            lines[-1].variants.append(above)
    return lines


class Finder:
    def __init__(self, root, programs_dir, sanitizer, facts):
        self.root = root
        self.programs_dir = programs_dir
        self.sanitizer = sanitizer
        self.facts = {}  # NAME: (KIND, VALUE)
        for fact in facts:
            kind, _, rest = fact.partition(":")
            name, _, value = rest.partition("=")
            self.facts[name] = (kind, value)
        self.programs = {}
        self.program_of_folder = {}  # the one that a folder's meson.build names last, or None
        self.parts = {}  # a source that has no program of its own: (the name of its program, where this is said)
        self.named = {}  # the name of a test: where
        self.sets = {}  # a file: its named settings
        self.common = {}  # a folder: what its meson.build sets for all tests
        self.lines = []

    # What a build has.

    def sanitizer_is(self, kinds):
        """Whether a list of conditions holds: none, any, or a sanitizer's name."""
        of_build = self.sanitizer.split(",")
        return all(kind in of_build or (kind == "any" and of_build != ["none"]) for kind in kinds)

    def is_there(self, name, where):
        if name in self.programs:
            return self.is_built(self.programs[name])
        if name not in self.facts:
            raise Wrong(where, f"'{name}' is unknown: tests/bin/meson.build has no such name, and no test program has it")
        return self.facts[name][1] != ""

    def is_built(self, program):
        return all([self.is_there(name, program.where) for name in program.linked])

    def value_of(self, name, where):
        """The path of something that is built or installed."""
        if name in self.programs:
            return f"{self.programs_dir}/{name}"
        kind, value = self.facts[name]
        if kind == "link":
            raise Wrong(where, f"'{name}' has no path")
        return value

    # Reading.

    def settings(self, words, where):
        result = Settings()
        for word in words:
            key, equals, value = word.partition("=")
            value = Said(value, where)
            if not equals:
                if key in SUITES:
                    result.suites.append(key)
                elif key == "alone":
                    result.alone = True
                else:
                    raise Wrong(where, f"unknown word '{key}'")
            elif re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
                result.environment[key] = value
            elif key in ONE_VALUE:
                form, otherwise = ONE_VALUE[key]
                if not re.fullmatch(form, value):
                    raise Wrong(where, f"{key}={value} is {otherwise}")
                result.values[key] = value
            elif key == "args":
                result.arguments += value.parts()
            elif key == "filter":
                for patterns, text in zip((result.wanted, result.unwanted), value.split("-", 1)):
                    patterns += [pattern for pattern in Said(text, where).parts(":") if pattern]
            elif key in ("needs", "has", "use", "sanitizer"):
                if key == "sanitizer" and not set(value.split(",")) <= set(SANITIZERS):
                    raise Wrong(where, f"{key}={value} is none of {', '.join(SANITIZERS)}")
                field = {"use": "used", "sanitizer": "sanitizers"}.get(key, key)
                getattr(result, field).extend(value.parts(","))
            elif re.fullmatch(r"[a-z]\w*", key):
                result.crossed[key] = value.parts(",")
            else:
                raise Wrong(where, f"unknown setting '{key}'")
        return result

    def all_settings(self, line, words):
        """The settings of a directive's words, and of those lines "when ..." below it that hold."""
        result = self.settings(words, line.where)
        for more in line.more:
            added = self.settings(more.words, more.where)
            if not added.has and not added.sanitizers:
                raise Wrong(more.where, "'when' needs a condition: has=NAME or sanitizer=NAME")
            if all([self.is_there(name, more.where) for name in added.has]) and self.sanitizer_is(added.sanitizers):
                result = result.with_more(dataclasses.replace(added, has=[], sanitizers=[]))
        return result

    def shared_settings(self, line, words):
        result = self.all_settings(line, words)
        for key, values in result.crossed.items():
            raise Wrong(values[0].where, f"unknown setting '{key}'")
        return result

    def source(self, name, folder, where):
        """A source is named from the folder of its program, from tests/, or from the root of the sources."""
        for base in (folder, self.root, self.root.parent):
            if (base / name).is_file():
                return base / name
        raise Wrong(where, f"there is no source {name}")

    def read_program(self, line, path):
        name = line.words[1]
        if name in self.programs or name in self.facts:
            build = "tests/meson.build" if self.facts.get(name, ("",))[0] == "path" else "tests/bin/meson.build"
            other = self.programs[name].where if name in self.programs else build
            raise Wrong(line.where, f"there is another '{name}' in {other}")
        program = Program(line.where, name)
        for word in line.words[2:]:
            key, _, value = word.partition("=")
            if key == "sources":
                program.sources += [self.source(part, path.parent, line.where) for part in value.split(",")]
            elif key == "link":
                program.linked += value.split(",")
            elif key == "define":
                program.defines.append(value)
            elif word in ("optimized", "export_dynamic"):
                program.flags.append(word)
            else:
                raise Wrong(line.where, f"a program has no '{word}'")
        if path.suffix == ".cc":
            program.sources.append(path)
        self.programs[name] = program
        return program

    def read(self, path):
        """Reads the directives of a file. Returns its tests, as (directive, settings before it in the file, program or None)."""
        program, common, tests = None, Settings(), []
        is_folder = path.name == "meson.build"
        is_source = path.suffix == ".cc"
        self.sets[path] = {}
        for line in directives(path, self.root):
            word = line.words[0]
            if word != "all" and len(line.words) < 2:
                raise Wrong(line.where, f"'{word}' needs a name")
            if line.more and word in ("program", "in"):
                raise Wrong(line.more[0].where, f"'{word}' has no conditions")
            if word == "program" and (is_folder or is_source):
                program = self.read_program(line, path)
            elif word == "in" and is_source and len(line.words) == 2:
                self.parts[path] = (line.words[1], line.where)
            elif word == "all":
                common = common.with_more(self.shared_settings(line, line.words[1:]))
            elif word == "set":
                self.sets[path][line.words[1]] = self.shared_settings(line, line.words[2:])
            elif word in ("test", "benchmark"):
                tests.append((line, Settings() if is_folder else common, program))
            else:
                raise Wrong(line.where, f"unknown directive '{' '.join(line.words[:3])}'")
        if is_folder:
            self.common[path.parent] = common
            self.program_of_folder[path.parent] = program
        elif program is None and path not in self.parts and re.search(r"_test\.(cc|py)$", path.name):
            self.find_owner(path, tests)
        return tests

    def find_owner(self, path, tests):
        """A source without a program belongs to that of its folder, or of the next folder above, unless meson.build builds it."""
        build = path.parent / "meson.build"
        if build.is_file() and f"'{path.name}'" in build.read_text(encoding="utf-8"):
            return
        where = f"{path.relative_to(self.root.parent)}:1"
        if path.suffix == ".py":
            if not tests:
                raise Wrong(where, "no test is named. Next: add a line '#: test NAME suite=SUITE'")
            return
        owner = next((self.program_of_folder[folder] for folder in path.parents if self.program_of_folder.get(folder)), None)
        if owner is None:
            raise Wrong(where, "it belongs to no program. Next: add the lines '//: program NAME link=gtest' and '//: test NAME'")
        self.parts[path] = (owner.name, where)

    # Tests.

    def inherited(self, path):
        """What the meson.build files of a file's folders set, the outer folders' first, and their sets."""
        common, sets = Settings(), {}
        for folder in reversed([folder for folder in path.parents if folder in self.common or folder / "meson.build" in self.sets]):
            common = common.with_more(self.common.get(folder, Settings()))
            sets.update(self.sets.get(folder / "meson.build", {}))
        return common, {**sets, **self.sets[path]}

    def expand(self, line, runs, common, path):
        """Makes the tests of one directive: each variant, with each value of the lists that the name mentions."""
        inherited, sets = self.inherited(path)
        common = inherited.with_more(common)
        template = self.all_settings(line, line.words[2:])
        variants = [(variant, variant.words[0], self.all_settings(variant, variant.words[1:])) for variant in line.variants]
        if variants and "{}" not in line.words[1]:
            raise Wrong(line.where, "the name of a test with variants needs '{}' in their place")
        for variant, word, own in variants or [(line, "", Settings())]:
            own = template.with_more(own)
            name = line.words[1].replace("{}", word)
            for key, values in own.crossed.items():
                if f"{{{key}}}" not in name:
                    raise Wrong(values[0].where, f"unknown setting '{key}', or a list that the name does not mention")
            others = dict.fromkeys(pattern for _, other, more in variants if other != word for pattern in more.wanted)
            for values in itertools.product(*own.crossed.values()):
                texts = dict(zip(own.crossed, values))
                settings = common
                for text in common.used + own.used:
                    set_name = replaced(text, texts, text.where)
                    if set_name not in sets:
                        raise Wrong(text.where, f"there is no set '{set_name}'")
                    settings = settings.with_more(sets[set_name])
                test_name = replaced(name, texts, variant.where)
                texts.update(variant=replaced(word, texts, variant.where), others=":".join(others))
                self.add_shards(line.words[0], test_name, runs, settings.with_more(own), texts, variant.where)

    def add_shards(self, kind, name, runs, settings, texts, where):
        """A test, or several tests that share its cases."""
        shards = int(settings.values.get("shards", "1"))
        if shards == 1:
            self.add_test(kind, name, runs, settings, texts, where)
            return
        for shard in range(shards):
            variables = {"GTEST_TOTAL_SHARDS": Said(shards, where), "GTEST_SHARD_INDEX": Said(shard, where)}
            part = settings.with_more(Settings(environment=variables))
            self.add_test(kind, f"{name}-{shard}", runs, part, texts, where)

    def add_test(self, kind, name, runs, settings, texts, where):
        """Adds a test unless this build leaves it out."""
        needs = {}  # what the test needs: whether this build has it

        def text_of(text):
            def value(found):
                key = found[1]
                if key in texts:
                    return texts[key]
                needs[key] = self.is_there(key, text.where)
                return self.value_of(key, text.where)

            return PLACEHOLDER.sub(value, text)

        arguments = [text_of(argument) for argument in settings.arguments]
        cases = [":".join(map(text_of, settings.wanted)), "-" + ":".join(map(text_of, settings.unwanted))]
        cases = ":".join(part for part in cases if part not in ("", "-"))
        if cases:
            arguments.append("--gtest_filter=" + cases)
        environment = [f"{key}={text_of(value)}" for key, value in settings.environment.items()]
        values = settings.values
        program = runs
        if isinstance(runs, Program):
            program = Said(runs.name, where)
            for define in runs.defines:
                text_of(Said(define, runs.where))
            if "under" in values:
                arguments.insert(0, text_of(Said(f"{{{program}}}", where)))
                program = values["under"]
            needs[program] = self.is_there(program, program.where)
        else:
            for key, said in [("filter", text) for text in settings.wanted + settings.unwanted] + list(values.items()):
                if key in ("filter", "under", "shards"):
                    raise Wrong(said.where, f"'{key}' has no effect on a script")
        for need in settings.needs:
            needs[need] = self.is_there(need, need.where)
        has_all = all([self.is_there(name, name.where) for name in settings.has])
        is_here = has_all and all(needs.values()) and self.sanitizer_is(settings.sanitizers)
        for used in [self.programs[need] for need in needs if need in self.programs]:
            used.is_named = True
            used.is_used = used.is_used or is_here
        if not is_here:
            return
        if name in self.named:
            raise Wrong(where, f"the test '{name}' is also in {self.named[name]}")
        self.named[name] = where
        if "suite" not in values:
            raise Wrong(where, f"the test '{name}' has no suite")
        lists = (
            arguments,
            environment,
            dict.fromkeys([values["suite"], *settings.suites]),
            [need for need in needs if need in self.programs or self.facts[need][0] == "target"],
        )
        self.lines.append(
            [
                "test",
                kind + ("-alone" if settings.alone else ""),
                name,
                str(program),
                *map("|".join, lists),
                values.get("timeout", "120"),
                values.get("priority", "0"),
                values.get("protocol", "exitcode"),
            ]
        )

    def find(self):
        """Returns the lines to print."""
        files = [path for path in self.root.rglob("*") if path.suffix in (".cc", ".py", "") or path.name == "meson.build"]
        files = [path for path in files if path.is_file() and "corpus" not in path.parts]
        # The meson.build files first: sources of their folders refer to their programs and sets.
        files.sort(key=lambda path: (path.name != "meson.build", str(path)))
        tests = [(path, *test) for path in files for test in self.read(path)]
        for source, (name, where) in self.parts.items():
            if name not in self.programs:
                raise Wrong(where, f"there is no program '{name}'")
            self.programs[name].sources.append(source)
        for path, line, common, program in tests:
            if program is None and path in self.parts:
                program = self.programs[self.parts[path][0]]
            elif program is None and (path.suffix == ".cc" or path.name == "meson.build"):
                raise Wrong(line.where, f"there is no program for this {line.words[0]} to run")
            self.expand(line, program or path, common, path)
        for program in self.programs.values():
            if not program.is_named:
                raise Wrong(program.where, f"no test runs the program '{program.name}'. Next: add a line '//: test NAME'")
        programs = [program for program in self.programs.values() if program.is_used]
        return [self.program_line(program) for program in programs] + self.lines

    def program_line(self, program):
        if not program.sources:
            raise Wrong(program.where, f"the program '{program.name}' has no source")
        for name in program.linked:
            if self.facts.get(name, ("",))[0] != "link":
                raise Wrong(program.where, f"nothing is linked with '{name}'")
        defines = []
        for define in program.defines:
            name, _, value = define.partition("=")
            paths = {key: self.value_of(key, program.where) for key in PLACEHOLDER.findall(value) if self.is_there(key, program.where)}
            defines.append(f'-D{name}="{replaced(value, paths, program.where)}"')
        sources = sorted({str(source) for source in program.sources})
        return ["program", program.name, *map("|".join, (sources, program.linked, defines, program.flags))]


def replaced(text, values, where):
    def value(found):
        if found[1] not in values:
            raise Wrong(where, f"'{found[0]}' is unknown")
        return values[found[1]]

    return PLACEHOLDER.sub(value, text)


def main():
    root, programs_dir, sanitizer, *facts = sys.argv[1:]
    try:
        lines = Finder(pathlib.Path(root), programs_dir, sanitizer, facts).find()
    except Wrong as error:
        sys.exit("{}: {}".format(*error.args))
    print("\n".join("\t".join(line) for line in lines))


if __name__ == "__main__":
    main()
