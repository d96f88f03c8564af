#!/usr/bin/env python3
#: test shape args={source}
"""What the sources have too much of becomes less, never more: shape_test.py SOURCE_DIR.

LIMITS has numbers of src without softverbs, and of plugin. A number above its limit is a failure: what is new can use what is there, or
replace it. A number below its limit is one, too: the commit that lowers the number lowers the limit, and a row follows a name that
changes. The rules are regular expressions over text without comments, and rely on the format of clang-format. Before that each is
tried on texts that it counts and on texts that it does not.
"""

import collections
import pathlib
import re
import sys
import tempfile

COMMENT = re.compile(r"//.*")
# What isend, irecv, iflush, test and the calls of RMA run. One wait there is of another call: that of ContextSet::finish, which closes.
DATA_PATH = r"src/net/transfer/|src/rma/context_(?!setup)"


def call(*names):
    """Not a declaration or a definition: these have the type of the result before the name."""
    return rf"(?<!Status )(?<!> )(?<!_t )\b(?:{'|'.join(names)})\("


THREAD = rf"\bstd::j?thread(?: \w+)?[({{]|{call('pthread_create', 'std::async')}"
# A poll without a timeout does not wait. Members named wait are those of condition variables and similar ones.
WAIT = (
    rf"{call('usleep', 'nanosleep', 'sched_yield', 'sleep_for', 'sleep_until', 'yield', 'epoll_wait')}"
    r"|(?<!\w)::p?(?:poll|select)\((?!(?:[^()]|\([^()]*\))*, 0\))|(?:\.|->)wait(?:_for|_until)?\("
)


def places(pattern, paths=""):
    """Each place, in the files whose path begins with `paths`."""
    found = re.compile(pattern, re.M)

    def count(texts):
        for path, text in texts.items():
            for match in found.finditer(text) if re.match(paths, path) else ():
                line = text.count("\n", 0, match.end()) + 1
                yield 1, f"{path}:{line}: {text.splitlines()[line - 1].strip()}"

    return count


def files(pattern):
    found = re.compile(pattern)
    return lambda texts: ((1, path) for path, text in texts.items() if found.search(text))


def functions(name, paths, kind=""):
    """Declarations of the class itself, not of types in it: two spaces, and a name before the first parenthesis."""
    body = re.compile(rf"^class {name}\b[^;{{]*\{{\n(.*?)^\}};", re.M | re.S)
    function = places(rf"^  (?=[\w~\[])(?!friend|static_assert){kind}[^;{{=(]*?(?:(?<![\w<])(?!VERBATIM_|alignas)\w+|operator\W+)\(", paths)

    def count(texts):
        for path, text in texts.items():
            for match in body.finditer(text):
                yield from function({path: "\n" * text.count("\n", 0, match.start(1)) + match[1]})

    return count


def code_lines(texts):
    """Neither blank nor only a comment; by folder."""
    folders = collections.Counter()
    for path, text in texts.items():
        folders[path.rpartition("/")[0]] += sum(1 for line in text.splitlines() if line.strip())
    return ((lines, f"{folder}: {lines}") for folder, lines in sorted(folders.items()))


def longest_file(texts):
    path = max(texts, key=lambda path: texts[path].count("\n"))
    yield texts[path].count("\n"), path


LIMITS = {
    "lines of code": (code_lines, 22_358),
    "lines of the longest file": (longest_file, 537),
    "functions of Comm": (functions("Comm", "src/net/"), 141),
    "virtual functions of Comm": (functions("Comm", "src/net/", "virtual "), 33),
    "functions of SendComm": (functions("SendComm", "src/net/"), 102),
    "functions of RecvComm": (functions("RecvComm", "src/net/"), 92),
    "functions of rma::ContextSet": (functions("ContextSet", "src/rma/"), 85),
    "functions of rma::Failover": (functions("Failover", "src/rma/"), 35),
    "places that move a QP to INIT": (places(call("to_init")), 2),
    "places that move a QP to RTR": (places(r"= IBV_QPS_RTR;"), 1),
    "places that make a thread": (places(THREAD), 1),
    "places that dial": (places(call("tcp_connect")), 2),
    "places that listen": (places(call("tcp_listen")), 2),
    "readers of partial messages": (places(call("receive_into")), 2),
    "blocking waits": (places(WAIT), 15),
    "blocking waits of the data path": (places(WAIT, DATA_PATH), 4),
    "files that ask for the time": (files(call("monotonic_ns")), 26),
    "files that name a lane": (files(r"(?<![Pp])[Ll]ane"), 63),
}


def sources(root):
    """Texts without comments, by path."""
    paths = [path for top in ("src", "plugin") for path in sorted((root / top).rglob("*")) if path.suffix in (".cc", ".h")]
    texts = {str(path.relative_to(root)): COMMENT.sub("", path.read_text()) for path in paths}
    return {path: text for path, text in texts.items() if not path.startswith("src/softverbs/")}


def faults(texts, limits):
    for name, (rule, limit) in limits.items():
        counted = list(rule(texts))
        number = sum(amount for amount, _ in counted)
        if number > limit:
            listed = "\n  ".join(where for _, where in counted)
            yield f"{name}: {number}, but the limit is {limit}; use what is there, or replace it. Counted:\n  {listed}"
        elif number < limit:
            yield f"{name}: {number}, but the limit is {limit}; lower the limit to {number}"


OTHER = "class NAMEd {\n  class NAME {\n  };\n  void f();\n};\n"
OF_A_CLASS = f"{OTHER}class NAME final : public Base<NAME> {{\n  struct Z {{\n  }};\nBODY\n}};\nvoid NAME::f() {{\n  g();\n}}\n{OTHER}"
FUNCTIONS = (
    *("  ~X();", "  X& operator=(const X&) = delete;", "  int operator()(int x) { return f(x); }", "  const int* f() { return x; }"),
    *("  template <typename T = int>\n  std::map<int, T> f(\n      int x);", "  [[noreturn]] void f() {\n    g();\n    h();\n  }"),
    *("  // Why.\n  int f() const VERBATIM_EXCLUDES(mutex_);", "  // f()\n\n  explicit X(int x) : x_(x) {}"),
)
NO_FUNCTIONS = (
    *("  int x_ = f();", "  int x_ VERBATIM_GUARDED_BY(mutex_) = 0;", "  alignas(sizeof(x)) int x_;", "  std::vector<int> x_{f(), g()};"),
    *("  function<void(int)> f_;", "  using F = void();", "  int x_;\n  friend void f();", "  struct Y {\n    int f();\n  };", " // f();"),
)
THREADS = ("t = std::thread(f);", "std::jthread worker(f);", "std::thread t{f};", "pthread_create(&t);", "x = std::async(f);")
NO_THREADS = ("std::thread thread_;", "std::thread::id id() {", "std::this_thread::get_id();", 'f("pthread_create", e);')
WAITS = (
    *("::usleep(1);", "::nanosleep(&t, &t);", "::sched_yield();", "std::this_thread::yield();", "n = ::epoll_wait(a, b, c, d);"),
    *("std::this_thread::sleep_for(x);", "std::this_thread::sleep_until(t);", "::select(a, b);", "::ppoll(&x, 1, &t, nullptr);"),
    *("if (::poll(&x, 1, ms) < 0) return f(\"poll\", 0);", "while (::poll(&x, 1, -1) < 0 && g(fd, 0) > 0) f();"),
    *("f(::poll(&x, 1, 10));", "if (::poll(&x, f(1, 0), ms) > 0) return;", "w.wait(m);", "w->wait_for(m, t);", "w.wait_until(m, t);"),
)
NO_WAITS = ("f(::poll(&x, 1, 0));", "if (::poll(&x, 1, 0) > 0) f();", "X::poll(a);", "poll(cq);", "void wait(int x);", "// w.wait(m);")
# By the name of a limit: a path, texts that count once, and texts that do not count.
EXAMPLES = {
    "lines of code": ("plugin/x.h", ("int x;", "\n\nint x;  // why\n // y\n", '#include "x.h"'), ("", "\n  \n", "  // x\n//\n")),
    "lines of the longest file": ("src/x.cc", ("\n", "// x\n"), ("",)),
    "places that make a thread": ("src/x.cc", THREADS, NO_THREADS),
    "blocking waits": ("src/x.cc", WAITS, NO_WAITS),
    "blocking waits of the data path": ("src/rma/context_lanes.cc", WAITS, NO_WAITS),
    "places that move a QP to RTR": ("src/x.cc", ("  rtr.qp_state = IBV_QPS_RTR;",), ("if (state == IBV_QPS_RTR) f();", "x = IBV_QPS_RTS;")),
    "files that ask for the time": ("src/x.cc", ("monotonic_ns();\n" * 2,), ("std::uint64_t monotonic_ns() {", "// monotonic_ns()")),
    "files that name a lane": ("src/x.cc", ("int lane;\nint lanes;", "f(kLaneDown);"), ("x.plane_id = 1;", "setPlaneId(1);", "// lane")),
}
CALLS = ("x = NAME(y);", "return NAME(y);", "if (Status moved = NAME(\n    y); !moved) return;")
NO_CALLS = ("Status NAME(int x);", "Result<bool> NAME(int x) {", "// NAME(x)", "unNAME(x);", "f(&NAME);")
FUNCTION_OF = {"INIT": "to_init", "dial": "tcp_connect", "listen": "tcp_listen", "messages": "receive_into"}


def examples(limit):
    if limit in EXAMPLES:
        return EXAMPLES[limit]
    kind, _, name = limit.rpartition(" ")
    if name in FUNCTION_OF:
        return "plugin/x.cc", *([text.replace("NAME", FUNCTION_OF[name]) for text in texts] for texts in (CALLS, NO_CALLS))
    path = "src/rma/x.h" if name.startswith("rma::") else "src/net/x.h"
    of_class = OF_A_CLASS.replace("NAME", name.removeprefix("rma::"))
    counted, others = FUNCTIONS, NO_FUNCTIONS
    if kind.startswith("virtual"):
        counted, others = [f"  virtual{text[1:]}" for text in FUNCTIONS[:4]], NO_FUNCTIONS + FUNCTIONS
    return path, *([of_class.replace("BODY", text) for text in texts] for texts in (counted, others))


def check_rules():
    for name, (rule, _) in LIMITS.items():
        path, *texts = examples(name)
        for text in (*texts[0], *texts[1]):
            number = sum(amount for amount, _ in rule({path: COMMENT.sub("", text)}))
            assert number == (text in texts[0]), (name, text, number)
    waits = "blocking waits of the data path"
    others = {"src/net/connect/x.cc": waits, "src/rma/context_setup.cc": waits, "src/rma/handshake.cc": waits}
    for path, limit in {**others, "src/rma/x.h": "functions of Comm", "src/net/x.h": "functions of rma::Failover"}.items():
        assert not list(LIMITS[limit][0]({path: examples(limit)[1][0]})), (path, limit)
    assert list(functions("X", "")({"x.h": "\n\nclass X {\n  template <int>\n  void f();\n};\n"})) == [(1, "x.h:5: void f();")]
    assert list(longest_file({"x": "\n", "y": "\n\n", "z": ""})) == [(2, "y")]


def check_faults():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for path in ("src/a/x.cc", "src/softverbs/x.cc", "plugin/x.h", "plugin/x.md", "tests/x.cc"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("// A file.\n\n  to_rtr(a);  // why\n")
        texts = sources(root)
    rule = places(call("to_rtr"))
    assert [where for _, where in code_lines(texts)] == ["plugin: 1", "src/a: 1"], texts
    assert not list(faults(texts, {"x": (rule, 2)}))
    (more,) = faults(texts, {"x": (rule, 1)})
    assert "x: 2, but the limit is 1;" in more and more.endswith("\n  src/a/x.cc:3: to_rtr(a);\n  plugin/x.h:3: to_rtr(a);"), more
    assert list(faults(texts, {"x": (rule, 3)})) == ["x: 2, but the limit is 3; lower the limit to 2"]


def main():
    check_rules()
    check_faults()
    found = list(faults(sources(pathlib.Path(sys.argv[1]).resolve()), LIMITS))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
