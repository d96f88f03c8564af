#!/usr/bin/env python3
#: test mutants args='{source} {compiler}'
"""tests/simulation/mutants on a tree of its own, and what it finds in the tree of the project.

usage: mutants_test.py SOURCE_ROOT COMPILER..."""
import contextlib
import importlib.machinery
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SOURCES = pathlib.Path(sys.argv[1])
COMPILER = sys.argv[2:]

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_loader(
    "mutants", importlib.machinery.SourceFileLoader("mutants", str(SOURCES / "tests/simulation/mutants"))
)
mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)

# By the body of a function: what can be changed there, as kind, before and after.
CHANGED = {
    "if (a) f();": [("negated", "a", "!(a)"), ("always", "a", "true"), ("never", "a", "false")],
    "if (const int c = f(); c > 1) f();": [
        *(("negated", "c > 1", "!(c > 1)"), ("always", "c > 1", "true"), ("never", "c > 1", "false")),
        ("off by one", "c > 1", "c >= 1"),
    ],
    "while (f(a) != 2) {\n}": [("negated", "f(a) != 2", "!(f(a) != 2)")],
    "do f(); while (a);": [("negated", "a", "!(a)")],
    "for (int i = 0; i < 3; ++i) f(i);": [("negated", "i < 3", "!(i < 3)"), ("off by one", "i < 3", "i <= 3")],
    "for (const int c : all(b == 1)) f(c);": [("the opposite", "b == 1", "b != 1")],
    "a = b ? f(1) : f(2);": [("negated", "b", "!(b)")],
    "return a ? f(1) : b >= 2 ? f(2) : f(3);": [
        ("negated", "a", "!(a)"),
        *(("negated", "b >= 2", "!(b >= 2)"), ("off by one", "b >= 2", "b > 2")),
    ],
    "const bool both = a == 1 && f(b, [&] { return a || b; });": [
        ("left operand left out", "a == 1 && f(b, [&] { return a || b; })", "f(b, [&] { return a || b; })"),
        ("the opposite", "a == 1", "a != 1"),
        ("right operand left out", "a == 1 && f(b, [&] { return a || b; })", "a == 1"),
        *(("left operand left out", "a || b", "b"), ("right operand left out", "a || b", "a")),
    ],
    "return f(static_cast<std::int32_t>(a - b) <= 0);": [
        ("off by one", "static_cast<std::int32_t>(a - b) <= 0", "static_cast<std::int32_t>(a - b) < 0")
    ],
    "a = b + 1;\nb -= a - 1U;": [("off by one", "+ 1", "+ 0"), ("off by one", "- 1U", "- 0")],
    "++a;\ntable.next.count--;": [("left out", "++a;", ";"), ("left out", "table.next.count--;", ";")],
    "one->due_ns = 7;\nnext = f(next);\na = 7;\none->next = f();": [
        ("left out", "one->due_ns = 7;", ";"),
        ("left out", "next = f(next);", ";"),
    ],
    "wake_worker();\nchanged.notify_all();\ntable.deadlines.set(a, b);\nchanged.wait(mutex);\nf();": [
        *(("left out", "wake_worker();", ";"), ("left out", "changed.notify_all();", ";")),
        *(("left out", "table.deadlines.set(a, b);", ";"), ("left out", "changed.wait(mutex);", ";")),
    ],
    "switch (a) {\n  case 1:\n    wake();\n  default:\n    break;\n}": [("left out", "wake();", ";")],
}
# Whole sources in which nothing can be changed.
UNCHANGED = (
    """
#define BOTH(a, b) ((a) && (b))
static_assert(sizeof(int) >= 4 && true);
constexpr int kOne = 2 > 1 ? 1 : 0;
constexpr bool f(int a) {
  return a < 1;
}
""",
    """
template <typename T>
bool f(T a) {
  if (a) return a < 1;
  return false;
}
template <typename T>
struct S {
  bool f() { return 1 > 2; }
};
""",
    """
void f() {
  if constexpr (sizeof(int) == 4) g();
  static_assert(1 < 2);
  constexpr int kOne = 1 < 2 ? 1 : 2;
  while (true) g();
}
""",
    """
struct S : public Base<int> {
  std::atomic<bool> is_there{false};
  std::map<int, int> all = {};
  bool f(int a = 1) const;
};
enum class E { kOne, kTwo };
void f(Comm&& comm, std::vector<std::vector<int>>& all) {
  struct T {
    int a = 1;
  };
  Comm& next = comm;
  const std::map<int, S*> other(all);
  delete next_;
}
""",
    """
void f() {
  VERBATIM_WARN("%s: a < b && c", a < 1 ? "x" : "y", b + 1);
  table.log(kWarn, [&] { return a == 1 ? x : y; });
  const char* const t = a == 1 ? "x" : "y";
  fail([&] {
    if (a) return Failure{};
  });
}
std::string S::text(int a) {
  if (a < 1) return {};
  return g(a + 1);
}
void log_change(int a) {
  if (a) g();
}
""",
    """
// if (a < b) f();
/* ++a; */
void f() {}
""",
)
PROGRAM = """
#include <cstdio>

namespace verbatim {

int runs(int a, int most) {
  int next = 0;
  for (int i = 0; i < a && i < most; ++i) next += i == 1 ? 10 : 1;
  if (a > 2) ++next; else next = 7;
  return next + 1;
}

}  // namespace verbatim

int main() {
  std::printf("%d", verbatim::runs(3, 5));
}
"""

# A unit test that finds 2, and 3 by its time limit; the simulation of mutant 2 fails at seed 7, that of 4 ends at once.
UNIT = """
import os, time
number = os.environ["MUTANT"]
if number == "2":
    print("[  FAILED  ] Suite.Case (0 ms)", flush=True)
    os.abort()
while number == "3":
    time.sleep(1)
"""
SIMULATION = """
import os, sys
first, count = int(sys.argv[4]), int(sys.argv[6])
number = os.environ["MUTANT"]
for seed in range(first, first + (0 if number == "4" else count)):
    failed = number == "2" and seed >= 7
    if failed:
        print(f"seed {seed}: the job has failed", file=sys.stderr)
    print(f"seed {seed}: {'FAILED' if failed else 'passed'}, hash", flush=True)
"""


class Tree(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)
        self.root = self.scratch / "root"
        for folder in ("src/base", "src/net/monitor", "src/rma"):
            (self.root / folder).mkdir(parents=True)

    def write(self, text, name="src/net/monitor/one.cc"):
        (self.root / name).write_text(text, encoding="utf-8")

    def found(self, text):
        self.write(text)
        return [(each.kind, each.before, each.after) for each in mutants.find_changes(self.root)]

    def make(self, name, seed=1, count=100):
        tree = self.scratch / name
        with contextlib.redirect_stdout(io.StringIO()):
            mutants.make(self.root, tree, seed, count)
        return tree, (tree / mutants.TABLE).read_text(encoding="utf-8")


class Places(Tree):
    def test_Body_EachKindOfPlaceIsFound(self):
        for body, changes in CHANGED.items():
            text = f"namespace verbatim {{\nint g(int a) {{\n{body}\n}}\n}}\n"
            self.assertEqual(sorted(self.found(text)), sorted(changes), body)

    def test_Bodies_OfMembersAndConstructors_AreFound(self):
        constructor = "C() : a_(1), b_{2} {\n    ++a_;\n  }\n"
        text = f"class C : public B {{\n public:\n  {constructor}  bool f() const noexcept {{ return a_ < 2; }}\n  int a_ = 0;\n}};\n"
        self.assertEqual(self.found(text), [("left out", "++a_;", ";"), ("off by one", "a_ < 2", "a_ <= 2")])

    def test_Source_WithoutConditions_IsUnchanged(self):
        for text in UNCHANGED:
            self.assertEqual(self.found(text), [], text)

    def test_Project_HasChangesInEachOfItsSources(self):
        changes = mutants.find_changes(SOURCES)
        for pattern in mutants.SOURCES:
            self.assertTrue(any(pathlib.PurePath(each.path).match(pattern) for each in changes), pattern)
        by_file = {}
        for each in changes:
            ends = by_file.setdefault(each.path, [])
            while ends and ends[-1] <= each.begin:
                ends.pop()
            self.assertFalse(ends and each.end > ends[-1], f"{each} ends behind the one around it")
            ends.append(each.end)
        for path, numbered in itertools.groupby(enumerate(changes), lambda each: each[1].path):
            text, numbered = (SOURCES / path).read_text(encoding="utf-8"), list(numbered)
            changed = mutants.render(text, 0, len(text), numbered)
            switched = {int(number) for number in re.findall(r"mutant\((\d+)\)", changed)}
            self.assertEqual(switched, {number for number, _ in numbered}, path)


class Copies(Tree):
    def test_Seed_DecidesWhichChangesAreDrawn(self):
        self.write("#include <x>\nvoid f(int a) {\n" + "  if (a < 1) g();\n" * 100 + "}\n")
        tables = [self.make(f"tree{i}", seed, 20)[1] for i, seed in enumerate((1, 1, 2))]
        self.assertEqual(tables[0].count("\n"), 20)
        self.assertEqual(tables[0], tables[1])
        self.assertNotEqual(tables[0], tables[2])

    def test_Table_HasPlaceAndChange(self):
        self.write("// One.\n#include <x>\n\nvoid f(int a) {\n  ++a;\n}\n")
        self.assertEqual(self.make("tree")[1], "1\tsrc/net/monitor/one.cc:5\tleft out\t++a;\t;\n")

    def test_Copy_HasAllButBuilds_AndTheOriginalStays(self):
        text = "#include <x>\nvoid f(int a) {\n  ++a;\n}\n"
        self.write(text)
        self.write("void g(bool a) {\n  if (a) f();\n}\n", "src/rma/other.cc")
        for name in ("build-x/one", ".git/one", "src/rma/build_test.py"):
            (self.root / name).parent.mkdir(exist_ok=True)
            self.write("", name)
        before = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        tree, _ = self.make("tree")
        self.assertEqual({path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}, before)
        copied = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
        sources = {"src/net/monitor/one.cc", "src/rma/other.cc", "src/rma/build_test.py"}
        self.assertEqual(copied, sources | {mutants.TABLE, mutants.HEADER})
        self.assertIn("{ if (!mutant(1)) ++a; }", (tree / "src/net/monitor/one.cc").read_text(encoding="utf-8"))

    def test_Program_NumberSwitchesOneChange(self):
        self.write(PROGRAM)
        tree, table = self.make("tree")
        program = self.scratch / "program"
        source = tree / "src/net/monitor/one.cc"
        command = [*COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", tree / "src", source, "-o", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        results = {}
        for line in ("0\t\tno change\t\t", *table.splitlines()):
            number, _, kind, before, after = line.split("\t")
            shown = subprocess.run([program], env={"MUTANT": number}, capture_output=True, text=True, check=True, timeout=60)
            results[kind, before, after] = int(shown.stdout)
        expected = {
            ("no change", "", ""): 14,  # 1 + 10 + 1 in the loop, one more for a > 2, and one for the last line
            ("negated", "i < a && i < most", "!(i < a && i < most)"): 2,
            ("left operand left out", "i < a && i < most", "i < most"): 16,
            ("right operand left out", "i < a && i < most", "i < a"): 14,
            ("off by one", "i < a", "i <= a"): 15,
            ("off by one", "i < most", "i <= most"): 14,
            ("left out", "next += i == 1 ? 10 : 1;", ";"): 2,
            ("negated", "i == 1", "!(i == 1)"): 23,
            ("negated", "a > 2", "!(a > 2)"): 8,
            ("always", "a > 2", "true"): 14,
            ("never", "a > 2", "false"): 8,
            ("off by one", "a > 2", "a >= 2"): 14,
            ("left out", "++next;", ";"): 13,
            ("left out", "next = 7;", ";"): 14,
            ("off by one", "+ 1", "+ 0"): 13,
        }
        self.assertEqual(results, expected)


class Runs(Tree):
    def write_build(self):
        """As meson describes one that was moved from /elsewhere. "lib" has a library."""
        build = self.scratch / "build"
        (build / "lib").mkdir(parents=True)
        (build / "lib/one.so").touch()
        (build / "meson-info").mkdir()
        described = {"meson-info": {"directories": {"build": "/elsewhere"}}, "intro-tests": (tests := [])}
        for name, script, suite in (
            *(("unit-net-one", UNIT, "unit"), ("unit-net-full", "raise SystemExit(1)", "full")),
            *(("other", "raise SystemExit(1)", "unit"), ("simulation-seeds", SIMULATION, "simulation")),
        ):
            (build / name).write_text(f"#!{sys.executable}\n{script}", encoding="utf-8")
            os.chmod(build / name, 0o755)
            command = [f"/elsewhere/{name}", "--plugin", "x"][: 3 if "simulation" in name else 1]
            environment = {"LD_LIBRARY_PATH": "/usr/lib:/elsewhere/lib"}
            tests.append({"name": name, "cmd": command, "env": environment, "timeout": 60, "suite": [f"verbatim:{suite}"]})
        for name, content in described.items():
            (build / f"meson-info/{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return build

    def run_mode(self, *arguments):
        command = [SOURCES / "tests/simulation/mutants", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_Files_AreThoseOfTheTests(self):
        shown = self.run_mode("files", self.write_build()).split()
        described = [f"meson-info/{name}.json" for name in ("intro-tests", "meson-info")]
        self.assertEqual(shown, ["lib/one.so", *described, "simulation-seeds", "unit-net-one"])

    def test_Results_NameWhatHasFoundEachChange(self):
        self.write("#include <x>\nvoid f(int a) {\n  ++a;\n  if (a) f(1);\n}\n")
        tree, _ = self.make("tree")
        build, results = self.write_build(), self.scratch / "results"
        self.run_mode("run", "--mutants", "0-1", "--parts", "unit", "--jobs", "2", build, results)
        self.run_mode("run", "--mutants", "3", "--parts", "unit", "--patience", "0.01", build, results)
        self.run_mode("run", "--mutants", "0,2-4", "--seeds", "260", "--jobs", "1", build, results)
        ran = [tuple(line.split("\t")[:2]) for line in results.read_text(encoding="utf-8").splitlines()]
        seeds = ["seeds 1", "seeds 251"]
        expected = [(number, "unit-net-one") for number in "01234"]
        expected += [(number, part) for number in "03" for part in seeds] + [("2", "seeds 1"), ("4", "seeds 1")]
        self.assertEqual(sorted(ran), sorted(expected))
        place = "src/net/monitor/one.cc:"
        shown = self.run_mode("show", tree, results)
        self.assertEqual(
            shown.splitlines(),
            [
                "0\tno change\t\t => \t-\t-",
                f"1\t{place}3\tleft out\t++a; => ;\t-\t-",
                f"2\t{place}4\tnegated\ta => !(a)\tunit-net-one Suite.Case\t7",
                f"3\t{place}4\talways\ta => true\tunit-net-one does not end\t-",
                f"4\t{place}4\tnever\ta => false\t-\t?",
                "4 changes: unit tests find 2, of these the simulation 1, 50.0 %; it finds 1",
            ],
        )
        self.assertIn("\t7: seed 7: the job has failed\n", results.read_text(encoding="utf-8"))
        self.assertIn("\t?: ends or is ended after seed 0: \n", results.read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
