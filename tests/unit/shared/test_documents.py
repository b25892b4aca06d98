"""What the documents say of themselves holds: README's program runs, and links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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


def test_the_program_of_the_readme_prints_what_it_says():
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {})
    assert said.getvalue() == "2\n"


def test_links_between_documents_lead_somewhere():
    broken = []
    for document in documents():
        text = FENCED.sub("", document.read_text(encoding="utf-8"))
        for path, heading in LINK.findall(text):
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {path}#{heading}")
    assert broken == []
