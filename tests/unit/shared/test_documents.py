"""What the documents say of themselves holds: blocks run, and links lead somewhere.

Blocks that start processes are in tests/integration/shared/test_document_blocks.py."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import runpy
import shlex
import subprocess

import pytest
import tyro
import yaml
from document_blocks import LANGUAGES, REASONS, ROOT, all_blocks, blocks, pages_of_use
from scripts import load_script

from pipelines import cli
from serve_app.cluster import load_cluster
from tokenyard.figures import save_figures

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
AT_COMMIT = re.compile(r"\b(?:at|commit)\s+([0-9a-f]{7,40})\b")


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


def sentences(text):
    """Sentences of Markdown, without code, tables and pictures; a list's items end sentences."""
    prose = re.sub(r"<!--.*?-->", "", FENCED.sub("", text), flags=re.DOTALL)
    prose = re.sub(r"^ *\|.*$|^!\[.*$|^#.*$", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    parts = re.split(r"\n\s*\n|^ *(?:- |\d+\. )", prose, flags=re.MULTILINE)
    return [one for part in parts for one in re.split(r"(?<=[.!?])[*)]*\s", part)]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", pages_of_use())
def test_sentences_of_pages_of_use_are_short(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [one for one in sentences(text) if len(re.findall(r"\S*\w\S*", one)) > 30] == []


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


def test_every_block_has_a_language_and_a_reason_where_it_does_not_run():
    for block in all_blocks():
        assert block.language in LANGUAGES, block.place
        reason = block.marks.get("not run", REASONS[0])
        assert reason.startswith(REASONS), f"{block.place}: {reason}"


def test_files_of_blocks_can_be_read(tmp_path):
    clusters = []
    for block in all_blocks():
        if block.language == "json":
            json.loads(block.text)
        if block.language == "yaml":
            said = yaml.safe_load(block.text)
            if "file" in block.marks and "pools" in said:
                path = tmp_path / f"{len(clusters)}.yaml"
                path.write_text(block.text, encoding="utf-8")
                clusters.append(load_cluster(str(path)))
    assert len(clusters) >= 4
    assert not clusters[0].needs_ray  # README's.
    assert len(clusters[0].pools[0].endpoints) == 2


@pytest.mark.parametrize("page", [page for page in pages_of_use() if blocks(page, "python")])
def test_programs_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in (one for one in blocks(page, "python") if one.runs):
        expected = re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(block.text, block.place, "exec", dont_inherit=True), {"__name__": "block"})
        assert said.getvalue().splitlines() == expected, block.place


def test_commands_of_blocks_take_their_options():
    """Those of results, and those that run elsewhere, too: each is parsed, and not called."""
    verbs, parsed = cli.verbs(), 0
    pages = [str(path.relative_to(ROOT)) for path in documents()]
    for block in (one for page in pages for one in blocks(page) if one.language in ("shell", "")):
        for command in [] if AT_COMMIT.search(block.text) else block.commands():
            found = re.match(
                r"(?:\w+=\S+ )*(?:tokenyard (\w+)|python pipelines/(\w+)\.py)(.*)", command
            )
            if found is None or "$" in command:
                continue
            script = importlib.import_module(f"pipelines.{found[2] or verbs[found[1]]}")
            with contextlib.redirect_stderr(io.StringIO()) as refused:
                try:
                    tyro.cli(script.Args, args=shlex.split(found[3]))
                except SystemExit:
                    pytest.fail(f"{block.place}: {command}\n{refused.getvalue()}")
            parsed += 1
    assert parsed > 80


def test_a_script_that_a_page_names_is_here_or_in_the_commit_beside_it():
    absent = []
    for document in documents():
        for part in re.split(r"\n\s*\n", document.read_text(encoding="utf-8")):
            commit = AT_COMMIT.search(part)
            for name in re.findall(r"python ((?:[a-z]+/)+\w+\.py)\b", part):
                found = (ROOT / name).is_file() or (
                    commit and (is_in(commit[1], name) or not is_in(commit[1], "README.md"))
                )
                if not found:
                    absent.append(f"{document.relative_to(ROOT)}: {name}")
    assert absent == []


def is_in(commit, path):
    """Whether a commit has a file; a shallow clone lacks the commit."""
    command = ["git", "cat-file", "-e", f"{commit}:{path}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_notebooks_are_what_the_tutorials_say():
    for path, text in runpy.run_path(str(ROOT / ".ci" / "notebooks"))["notebooks"]().items():
        assert path.read_text(encoding="utf-8") == text, ".ci/notebooks"


def test_the_gains_of_the_readme_are_those_of_the_board():
    assert load_script("docs/figures/draw.py").readme() == README


def test_figures_are_drawn_from_the_rows_in_the_repository(tmp_path):
    script = load_script("docs/figures/draw.py")
    for path in save_figures(script.figures(), tmp_path):
        assert (script.RESULTS / path.name).exists()
        assert path.stat().st_size > 10_000


def test_links_between_documents_lead_somewhere():
    broken = []
    for document in documents():
        text = FENCED.sub("", document.read_text(encoding="utf-8"))
        for path, heading in LINK.findall(text):
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {path}#{heading}")
    assert broken == []
