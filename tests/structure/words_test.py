#!/usr/bin/env python3
#: test words args={source}
"""Words have one meaning, and some are not used: words_test.py SOURCE_DIR.

RULED_OUT has words that are images, or that say nothing of what a thing is, each with what is written in its place. They are also
found in identifiers: kLaneMail has the word "mail". src/GLOSSARY.md has one row for each term, in which a term of
ONE_MEANING is what that table says; no other document defines the term again; and the sources use it. Before that each check is tried on a
tree with such mistakes.
"""

import pathlib
import re
import sys
import tempfile

sys.dont_write_bytecode = True  # the folder is the source tree
from documents_test import all_files, documents

FOLDERS = ("src", "plugin", "include", "tools", "tests", "examples", "packaging")
GLOSSARY = "src/GLOSSARY.md"

RULED_OUT = {
    "comm signal": "comm event, because a signal is RMA's",
    "helper": "what it does",
    "helpers": "what they do",
    "letters": "messages; of the alphabet: characters, a to z",
    "mail": "messages",
    "mailbox": "the class that keeps the messages",
    "manager": "what it does",
    "managers": "what they do",
    "news": "a message, or what has arrived",
    "silence": "no message, or no acknowledgement",
    "silent": "sends nothing, acknowledges nothing, or prints nothing",
    "silently": "without a line, or without an error",
    "told": "informed, or what was said and by which message",
    "util": "what it does",
    "utils": "what they do",
}
# Names that others have given.
FOREIGN = re.compile(r"\b(subnet|connection|package) managers?\b|\bimportlib\.util\b|\b(ibverbs|ucx)-utils\b|\bbogus-mail-host\b")
# A word of the definition in the glossary, where it has the term.
ONE_MEANING = {"probe": "nic", "signal": "rma"}

WORD = re.compile(rf"\b({'|'.join(RULED_OUT)})\b")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
TERM_TABLE = re.compile(r"^\| term \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.M)


def words_of(text):
    """Lower case, with identifiers as the words that they are made of."""
    return HUMP.sub(" ", text).lower()


def is_ours(name):
    return name.parts[0] in FOLDERS or len(name.parts) == 1 and name.suffix == ".md"


def ruled_out_words(root):
    for path in all_files(root):
        name = path.relative_to(root)
        if path == pathlib.Path(__file__).resolve() or not is_ours(name):
            continue
        lines = [str(name), *path.read_text(errors="replace").splitlines()]
        for number, line in enumerate(lines):  # line 0 is the name of the file
            for word in WORD.findall(FOREIGN.sub("", words_of(line))):
                yield f"{name}:{number}: not '{word}'; instead: {RULED_OUT[word]}"


def terms_of(document):
    """(term, meaning) of the tables whose first column is "term"; a row may have several terms."""
    for table in TERM_TABLE.findall(document.read_text() + "\n"):
        for row in table.splitlines():
            terms, meaning = row.strip("| ").split("|", 1)
            yield from ((term.strip().lower(), meaning.lower()) for term in terms.split(","))


def wrong_terms(root):
    defined = {}
    for document in documents(root):
        name = document.relative_to(root)
        for term, meaning in terms_of(document) if is_ours(name) else ():
            if term in defined:
                yield f"{name}: '{term}' is also defined in {defined[term]}"
            defined[term] = name
            if not re.search(rf"\b{ONE_MEANING.get(term, '')}\b", words_of(meaning)):
                yield f"{name}: '{term}' is {ONE_MEANING[term]}'s word"
            if FOREIGN.sub("", term) in RULED_OUT:
                yield f"{name}: '{term}' is ruled out: {RULED_OUT[term]}"
    if not any(name == pathlib.Path(GLOSSARY) for name in defined.values()):
        yield f"{GLOSSARY}: no table of terms"
    yield from (f"{GLOSSARY}: no row of '{term}'" for term in ONE_MEANING if term not in defined)
    sources = " ".join(words_of(path.read_text()) for path in all_files(root / "src") if path.suffix in (".cc", ".h"))
    for term, name in defined.items():
        if not re.search(rf"\b{re.escape(term)}", sources):
            yield f"{name}: no source uses the term '{term}'"


def check_finds_ruled_out_words():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory).resolve()
        (root / "src/base").mkdir(parents=True)
        wrong = ["// the news stay", "class LaneMail {};", "int letters_ = 0;", "void set(CommSignal signal);", "BufferManager m;"]
        right = ["newspaper = mailed;", "int letter;", "const char* kNoSubnetManager;", "import importlib.util", "RmaSignal signal;"]
        (root / "src/base/a.cc").write_text("\n".join([*wrong, *right]))
        (root / "src/base/file_utils.h").touch()
        (root / "notes").write_text("news")  # not of the project's folders
        found = list(ruled_out_words(root))
        places = [line.split(" not ")[0] for line in found]
        assert places == [*(f"src/base/a.cc:{n + 1}:" for n in range(5)), "src/base/file_utils.h:0:"], found


def check_finds_wrong_terms():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory).resolve()
        (root / "src").mkdir()
        (root / "src/a.h").write_text("class SideChannel; // lanes, bursts and blocks, signals, probes")

        def found(*rows):
            (root / GLOSSARY).write_text("# Page\n| term | meaning |\n|---|---|\n" + "\n".join(rows))
            return list(wrong_terms(root))

        right = ["| side channel | TCP |", "| block, burst | QPs |", "| signal | an atomic of RMA |", "| probe | asks a NIC |"]
        assert found(*right) == [], found(*right)
        for wrong in ("| Block | memory |", "| slot | an element |", "| mail | lanes |"):
            assert found(*right, wrong), wrong
        assert found(*right[:2], "| signal | a bit of a comm, with information |", right[3])
        assert found(*right[:3])
        (root / "b.md").write_text("| term | meaning |\n|---|---|\n| burst | bytes |\n")
        assert len(found(*right)) == 1
        (root / GLOSSARY).write_text("# Page\n")
        assert any(GLOSSARY in line for line in wrong_terms(root))


def main():
    check_finds_ruled_out_words()
    check_finds_wrong_terms()
    root = pathlib.Path(sys.argv[1]).resolve()
    found = [*ruled_out_words(root), *wrong_terms(root)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
