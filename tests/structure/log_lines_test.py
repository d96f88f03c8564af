#!/usr/bin/env python3
#: test log-lines args={source}
"""Whole log lines are compared in one table only: log_lines_test.py SOURCE_DIR.

No test has a string with ". Next: " and text behind it, unless it looks for a part of a line or prints the string; and none compares
warnings with strings of its own. The tools' output is no log, and the test of the log makes its own lines. The names in tests/log_lines.txt
are those of cases, in order, and the source of the case has the words behind its name. Before that the check is tried on a tree with such
mistakes.
"""

import ast
import pathlib
import re
import sys
import tempfile

TABLE = "tests/log_lines.txt"
OTHER_LINES = ("tests/unit/tools/", "tests/unit/base/log_test.cc")
STEP = re.compile(r"\. Next: \S")
# What takes a part of a line, or prints it.
PARTS = ("find", "rfind", "starts_with", "ends_with", "contains", "expect_contains", "for", "fprintf")
STRING = r'"(?:[^"\\\n]|\\.)*"'
TOKEN = re.compile(rf"//.*|(?P<text>{STRING}(?:\s*{STRING})*)|'(?:[^'\\]|\\.)'|(?P<call>\w*) ?\(|(?P<end>\))|\w+")
LOGGED = r"[\w.]*(?:only_warning\(\)|(?:warnings|infos|lines)(?:\(\))?(?:\[\d+\])?)"
COMPARED = re.compile(rf'_EQ\(\s*{LOGGED},(?:(?!<<)[^;"])*"[^"\n]')
CASE = re.compile(r"\bTEST(?:_F|_P)?\((\w+),\s*(\w+)\)")


def lines_in_source(text):
    places = [found.start() for found in COMPARED.finditer(text)]
    calls = [""]
    for token in TOKEN.finditer(text):
        if token["call"] is not None:
            calls.append(token["call"])
        elif token["end"] and len(calls) > 1:
            calls.pop()
        elif token["text"] and calls[-1] not in PARTS and STEP.search(re.sub(r'"\s*"', "", token["text"])[:-1]):
            places.append(token.start())
    return sorted({text.count("\n", 0, place) + 1 for place in places})


def lines_in_script(text):
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "assertEqual":
            if any(isinstance(part, ast.Constant) and STEP.search(str(part.value)) for part in ast.walk(call)):
                yield call.lineno


def faults(root):
    cases = {}
    for path in sorted((root / "tests").rglob("*")):
        name = str(path.relative_to(root))
        if path.suffix not in (".cc", ".h", ".py") or "corpus" in path.parts:
            continue
        text = path.read_text()
        cases.update({f"{suite}.{case}": text for suite, case in CASE.findall(text)})
        if not name.startswith(OTHER_LINES):
            find = lines_in_script if path.suffix == ".py" else lines_in_source
            yield from (f"{name}:{number}: a log line; instead: expect_log_lines, and the line in {TABLE}" for number in find(text))
    names = [line for line in (root / TABLE).read_text().splitlines() if not line.startswith(("#", "    "))]
    if names != sorted(set(names)):
        yield f"{TABLE}: the names are not in order, or a name is there twice"
    for name in names:
        case, _, which = name.partition(" ")
        if case not in cases:
            yield f"{TABLE}: no source has the case {case}"
        elif which and f'"{which}"' not in cases[case]:
            yield f'{TABLE}: the source of {case} has no "{which}"'


WRONG = (
    'EXPECT_EQ(line, "a failed. Next: do");',
    'const std::string next =\n    "a failed. "\n    "Next: do";',
    'EXPECT_EQ(lines, Lines{what + ". Next: do"});',
    'EXPECT_EQ(f(line.find("x"), \'"\'), g(1) + "a failed. Next: do");',
    'EXPECT_EQ(log_.only_warning(),\n          "a failed");',
    'EXPECT_EQ(log.warnings(), (std::vector<std::string>{"a failed"}));',
    'EXPECT_EQ(warnings[0], first + "a failed");',
)
RIGHT = (
    'EXPECT_NE(line.find("a failed. Next: " "do"), std::string::npos) << line;',
    'for (const char* part : {"a", ". Next: do"}) f(part);',
    'expect_parts({"a", ". Next: ", "do"});  // "a failed. Next: do"',
    'EXPECT_EQ(log.only_warning().rfind("a failed", 0), 0U);',
    'EXPECT_EQ(warnings, Lines()) << "a failed";',
    'EXPECT_EQ(warnings, "");',
)


def check_finds_faults():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        (root / "tests/unit/tools").mkdir(parents=True)

        def found(source, table="A.B\n    a failed. Next: do\n", name="a_test.cc", head='TEST_P(A, B) {\n  f("busy");\n}\n'):
            path = root / "tests" / name
            path.write_text(head + source)
            (root / TABLE).write_text("# Lines.\n" + table)
            lines = list(faults(root))
            path.unlink()
            return lines

        for source in WRONG:
            assert len(found(source)) == 1, (source, found(source))
        assert found("\n" + WRONG[0])[0].startswith("tests/a_test.cc:5: "), found("\n" + WRONG[0])
        assert found("\n".join(RIGHT)) == [], found("\n".join(RIGHT))
        assert found(WRONG[0], name="unit/tools/a_test.cc") == []
        assert len(found('self.assertEqual(line, f"{a} failed. Next: do")', "", "a_test.py", "")) == 1
        assert found('self.assertIn("a failed. Next: do", line)', "", "a_test.py", "") == []
        for table, expected in (
            ("A.B\nA.C\n", "no source has the case A.C"),
            ("A.B busy\nA.B late\n", 'the source of A.B has no "late"'),
            ("A.B busy\nA.B\n", "not in order"),
            ("A.B\nA.B\n", "twice"),
        ):
            lines = found("", table)
            assert len(lines) == 1 and expected in lines[0], lines


def main():
    check_finds_faults()
    found = list(faults(pathlib.Path(sys.argv[1]).resolve()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
