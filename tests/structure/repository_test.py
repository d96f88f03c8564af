#!/usr/bin/python3
#: test repository args={source}
"""The files that hosts of repositories read: repository_test.py SOURCE_DIR.

The pipelines are valid YAML, and run .ci/run with the whole history, which the check of new commits needs. The templates of issues are the
same for GitHub and GitLab, and the one for problems asks for verbatim-info and the lines of both ends. CITATION.cff has what its format
demands. Before that each check is tried on a tree with such mistakes. The system's Python is used, because PyYAML is installed for it.
"""

import pathlib
import re
import shutil
import sys
import tempfile

import yaml

GITHUB = ".github/workflows/check.yml"
GITLAB = ".gitlab-ci.yml"
CITATION = "CITATION.cff"
TEMPLATES = {"problem.md": ("verbatim-info", "lines of both ends", "SECURITY.md"), "change.md": ("verbatim-info",)}
FRONT = re.compile(r"---\nname: .+\nabout: .+\n---\n\n")


def wrong_github(pipeline):
    jobs = list(pipeline["jobs"].values())
    steps = [step for job in jobs for step in job["steps"]]
    if ".ci/run" not in [step.get("run") for step in steps]:
        yield "no step runs .ci/run"
    if not any(step.get("uses", "").startswith("actions/checkout@") and step.get("with", {}).get("fetch-depth") == 0 for step in steps):
        yield "the checkout does not have the whole history (fetch-depth: 0)"
    if not {"push", "pull_request"} <= set(pipeline[True]):  # YAML 1.1 reads "on" so
        yield "it does not run for pushes and pull requests"
    if [job["container"]["image"] for job in jobs] != ["debian:12"]:
        yield "it does not run on Debian 12 alone"


def wrong_gitlab(pipeline):
    job = pipeline["check"]
    if ".ci/run" not in job["script"]:
        yield "no line of the script is .ci/run"
    if job["variables"]["GIT_DEPTH"] != "0":
        yield 'the clone does not have the whole history (GIT_DEPTH: "0")'
    if job["image"] != "debian:12":
        yield "it does not run on Debian 12"


def wrong_citation(citation):
    if citation["cff-version"] != "1.2.0" or not all(citation.get(key) for key in ("message", "title", "authors")):
        yield "cff-version 1.2.0, message, title and authors are required"
    if citation["license"] != "Apache-2.0":
        yield "the licence is Apache-2.0"


def wrong_yaml(root):
    for name, check in ((GITHUB, wrong_github), (GITLAB, wrong_gitlab), (CITATION, wrong_citation)):
        try:
            yield from (f"{name}: {fault}" for fault in check(yaml.safe_load((root / name).read_text())))
        except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            yield f"{name}: is not what its reader expects: {type(error).__name__} {error}"


def wrong_templates(root):
    for name, texts in TEMPLATES.items():
        github = (root / ".github/ISSUE_TEMPLATE" / name).read_text()
        gitlab = (root / ".gitlab/issue_templates" / name).read_text()
        if not FRONT.match(github) or FRONT.sub("", github, 1) != gitlab:
            yield f"{name}: GitHub's template is not GitLab's behind name and about"
        yield from (f"{name}: does not ask for '{text}'" for text in texts if text not in gitlab)


def faults_of(root):
    return [*wrong_yaml(root), *wrong_templates(root)]


def check_finds_faults(source):
    changes = (
        (GITHUB, ".ci/run", "tools/check --quick"),
        (GITHUB, "fetch-depth: 0", "fetch-depth: 1"),
        (GITHUB, "  pull_request:\n", ""),
        (GITHUB, "debian:12", "debian:11"),
        (GITHUB, "    steps:", "   steps:"),
        (GITLAB, "- .ci/run", "- tools/check --quick"),
        (GITLAB, 'GIT_DEPTH: "0"', 'GIT_DEPTH: "20"'),
        (GITLAB, "debian:12", "debian:11"),
        (GITLAB, "  script:", "  scripts:"),
        (CITATION, "authors:", "author:"),
        (CITATION, "Apache-2.0", "MIT"),
        (".gitlab/issue_templates/problem.md", "How often", "When"),
        (".github/ISSUE_TEMPLATE/change.md", "about: ", "abouts: "),
    )
    for name, before, after in changes:
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for folder in (".github", ".gitlab"):
                shutil.copytree(source / folder, root / folder)
            for file in (GITLAB, CITATION):
                shutil.copy(source / file, root)
            text = (root / name).read_text()
            (root / name).write_text(text.replace(before, after))
            assert before in text and len(faults_of(root)) == 1, (name, before, faults_of(root))
            for file in (root / folder / "problem.md" for folder in (".github/ISSUE_TEMPLATE", ".gitlab/issue_templates")):
                file.write_text(file.read_text().replace("lines of both ends", "log"))
            assert "problem.md: does not ask for 'lines of both ends'" in faults_of(root)


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    found = faults_of(root)
    if not found:
        check_finds_faults(root)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
