"""What the documents say of themselves holds: README's blocks run, and links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

from pipelines import cli
from serve_app.cluster import load_cluster

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents():
    found = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip("no clone: it is not known which documents belong to it")
    return [ROOT / name for name in found.stdout.split()]


def anchor(heading):
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower()).strip()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(document):
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def blocks(language=""):
    """The fenced blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def sentences(text):
    """Sentences of Markdown, without code, tables and pictures; a list's items end sentences."""
    prose = re.sub(r"^\|.*$|^!\[.*$|^#.*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    parts = re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE)
    return [one for part in parts for one in re.split(r"(?<=[.!?])\**\s", part)]


def test_the_readme_is_short_and_so_are_its_sentences():
    assert len(README.splitlines()) <= 120
    too_long = [one for one in sentences(README) if len(re.findall(r"\S*\w\S*", one)) > 30]
    assert too_long == []


def test_the_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    asked = set(re.findall(r"(?:^|[`;])make ([\w-]+)", README, re.MULTILINE))
    assert {"sweep", "test", "serve", "demo", "mlflow", "install"} <= asked <= targets
    scripts = set(re.findall(r"python (\S+\.py)", README))
    assert "pipelines/sweep.py" in scripts
    assert [one for one in scripts if not (ROOT / one).is_file()] == []
    asked_verbs = set(re.findall(r"(?:^|`)tokenyard (\w+)", README, re.MULTILINE))
    assert {"compare", "train", "serve", "arena"} <= asked_verbs <= set(cli.verbs())
    options = {"arena": {"--sealed-seed", "--entry"}, "serve": {"--cluster", "--policy"}}
    options["train"] = {"--fleet", "--trace", "--out"}
    options["compare"] = {"--fleet", "--trace", "--now", "--html"}
    options["autopilot"] = options["epp"] = set()
    for verb, line in re.findall(r"(?:^|`)tokenyard (\w+)([^`#]*)", README, re.MULTILINE):
        assert set(re.findall(r"--[\w-]+", line)) <= options[verb]


def test_the_cluster_of_the_readme_loads(tmp_path):
    (text,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    cluster = load_cluster(str(tmp_path / "mine.yaml"))
    assert not cluster.needs_ray
    assert len(cluster.pools[0].endpoints) == 2


def test_the_program_of_the_readme_prints_what_it_says():
    (program,) = blocks("python")
    (expected,) = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {})
    assert said.getvalue() == f"{expected}\n"


def test_links_between_documents_lead_somewhere():
    broken = []
    for document in documents():
        text = FENCED.sub("", document.read_text(encoding="utf-8"))
        for path, heading in LINK.findall(text):
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {path}#{heading}")
    assert broken == []
