"""The fenced blocks of README and the pages of use, and what a comment above one says of it.

A block runs in a test, unless the comment gives a reason. Comments are, on lines of their own:

    <!-- not run: REASON -->   nobody can run it here, or it takes minutes
    <!-- file: NAME -->        what a reader saves under that name, before the blocks below
    <!-- stays: URL -->        a server: it goes on while the blocks below run, once the URL answers
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```(\w*)$")
MARK = re.compile(r"^ *<!-- (not run|file|stays): (.+) -->$")
REASONS = (
    "needs a GPU",
    "needs a cloud",
    "needs root",
    "takes minutes",
    "needs endpoints of yours",
)
LANGUAGES = ("shell", "python", "yaml", "json", "text")


@dataclass(frozen=True)
class Block:
    """One block, with the marks that stand above it."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def place(self) -> str:
        """Where it begins."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.language in ("shell", "python") and "not run" not in self.marks

    def commands(self) -> list[str]:
        """Lines of a shell block, each whole and without comments."""
        whole = self.text.replace("\\\n", "")
        lines = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in whole.splitlines())
        return [line for line in lines if line]


def pages_of_use() -> list[str]:
    """README, and pages that are neither results nor records of decisions."""
    found = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/serving/*.md")]
    found += [*ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("docs/reference/*.md")]
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page in their order, or those in one language."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    begin = None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if begin is None and fence:
            begin, indent, kind = number, fence[1], fence[2]
        elif begin is not None and line == f"{indent}```":
            text = textwrap.dedent("\n".join(lines[begin + 1 : number])) + "\n"
            marks, above = {}, begin - 1
            while above >= 0 and (mark := MARK.match(lines[above])):
                marks[mark[1]] = mark[2]
                above -= 1
            found.append(Block(page, begin + 1, kind, text, marks))
            begin = None
    assert begin is None, f"{page}:{begin}: a block without an end"
    return [one for one in found if language in (None, one.language)]


def all_blocks() -> list[Block]:
    """The blocks of all pages of use."""
    return [block for page in pages_of_use() for block in blocks(page)]
