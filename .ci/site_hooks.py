"""What the site needs beside docs/: files that its pages link to become pages of it.

Links on GitHub lead to files of the repository; on the site they lead to copies under `source/`.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=.?https?:|<link[^>]* href=.?https?:")
HEAD = "---\nsearch: {exclude: true}\n---\n\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def repository_path(page: str, link: str) -> str:
    """The path from the root of what a page's link names."""
    return os.path.normpath(PurePosixPath(page).parent / link).replace(os.sep, "/")


def links(page: str, text: str) -> list[str]:
    """Paths of the files that a page links to."""
    return [repository_path(page, found[2]) for found in LINK.finditer(CODE.sub("", text))]


def uri(path: str) -> str:
    """Where a file of the repository is, for the site."""
    return path[5:] if path.startswith("docs/") else f"source/{path}.md"


def copied(path: str) -> str:
    """A page that shows a file or the names in a folder."""
    if path.endswith(".md"):
        return HEAD + (ROOT / path).read_text(encoding="utf-8")
    if (ROOT / path).is_dir():
        names = sorted(one.name for one in (ROOT / path).iterdir() if one.name[0] not in "_.")
        return HEAD + f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return HEAD + f"# {path}\n\n``````{language}\n{text}``````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to."""
    decisions = [file.src_uri for file in files if re.match(r"decisions/\d", file.src_uri)]
    files.append(File.generated(config, "decisions/README.md", content=contents(sorted(decisions))))
    pages = files.documentation_pages()
    pending = [(f"docs/{file.src_uri}", file.content_string) for file in pages]
    known = {page for page, _ in pending}
    while pending:
        page, text = pending.pop()
        for path in links(page, text):
            if path in known or path.startswith(("docs/", "..")) or not (ROOT / path).exists():
                continue
            known.add(path)
            copy = File.generated(config, uri(path), content=copied(path))
            files.append(copy)
            if path.endswith(".md"):
                pending.append((path, copy.content_string))
    return files


def contents(decisions: list[str]) -> str:
    """The list of decision records, which GitHub shows as a folder."""
    lines = []
    for name in decisions:
        title = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({PurePosixPath(name).name})")
    head = "# Decisions\n\nEach is one page: the question, what was decided, and why.\n\n"
    return head + "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links between pages."""
    here = page.file.src_uri
    if here.startswith(("results/", "decisions/")):
        page.meta["search"] = {"boost": 0.5}  # Pages of use come first.
    is_copy = here.startswith("source/")
    source = here.removeprefix("source/").removesuffix(".md") if is_copy else f"docs/{here}"

    def moved(found: re.Match[str]) -> str:
        path = repository_path(source, found[2])
        target = uri(path)
        if path in ("docs/decisions", "docs/results"):
            target = f"{path[5:]}/README.md"
        link = os.path.relpath(target, PurePosixPath(here).parent).replace(os.sep, "/")
        anchor = "" if not path.endswith(".md") else found[3] or ""
        return found[1] + link + anchor + found[4]

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(moved, part) for part in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load something from elsewhere."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output
