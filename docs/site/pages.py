"""Hooks of mkdocs that add README.md as the first page, and pages of linked files outside docs/.

Links are written for the repository's file view, relative to the file that they are in. In the
site, one to README.md leads to its first page, one to a file or folder of the repository to a page
that shows it, under files/, and one to a notebook to a page of its cells. Links that lead nowhere,
and headings that are not there, are warnings of mkdocs, which `--strict` makes errors.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
SHOWN = "files"
"""Below it are the pages that show files of the repository."""
LONGEST = 200_000
"""Characters of a file that is shown."""
LINK = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)"  # a block of code
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"  # code in a line
    r"|(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])",
    re.MULTILINE | re.DOTALL,
)
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
LANGUAGES = {"py": "python", "yaml": "yaml", "sh": "bash", "toml": "toml", "json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and a last section of the pages that the navigation does not name."""
    waiting = [
        (f"{DOCS}/{file.src_uri}", file.content_string) for file in files.documentation_pages()
    ]
    texts_by_page: dict[str, str] = {}
    waiting.append(("README.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    texts_by_page["index.md"] = waiting[-1][1]
    for path in sorted((ROOT / DOCS / "examples").glob("*.ipynb")):
        name = path.relative_to(ROOT).as_posix()
        text = texts_by_page.setdefault(page_of(name), notebook_text(path))
        waiting.append((name, text))
    while waiting:
        source, text = waiting.pop()
        for target in local_targets(text):
            path = repository_path(source, target)
            page = page_of(path)
            inside = (ROOT / path).resolve().is_relative_to(ROOT) and (ROOT / path).exists()
            if page.startswith(f"{SHOWN}/") and page not in texts_by_page and inside:
                texts_by_page[page] = shown_text(path)
                if (ROOT / path).is_dir():
                    waiting.append((path + "/", texts_by_page[page]))
    for name, text in texts_by_page.items():
        files.append(File.generated(config, name, content=text))
    named = set(names_in(config.nav))
    unnamed_pages = sorted(
        file.src_uri
        for file in files.documentation_pages()
        if file.src_uri not in named and not file.src_uri.startswith(f"{SHOWN}/")
    )
    if unnamed_pages:
        config.nav.append({"More": unnamed_pages})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository become links of the site."""
    source = source_of(page.file.src_uri)

    def leads(match: re.Match) -> str:
        if (target := match["target"]) is None or not is_local(target):
            return match[0]
        path, _, anchor = target.partition("#")
        if not path:
            return target
        linked_page = page_of(repository_path(source, path))
        if files.get_file_from_path(linked_page) is None:
            return target  # mkdocs says so
        place = posixpath.relpath(linked_page, posixpath.dirname(page.file.src_uri) or ".")
        return f"{place}#{anchor}" if anchor else place

    return TABLE_ROW.sub(plain_pipes, LINK.sub(leads, markdown))


def plain_pipes(row: re.Match) -> str:
    r"""Replace `\|` within code by `|` in a row of a table.

    A file view needs the backslash; Python-Markdown does not, and shows it."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0])


def is_local(target: str) -> bool:
    return not re.match(r"[a-z]+:", target)


def local_targets(text: str) -> Iterator[str]:
    for match in LINK.finditer(text):
        target = (match["target"] or "").partition("#")[0]
        if target and is_local(target):
            yield target


def repository_path(source: str, target: str) -> str:
    """The file or folder that a link in `source` leads to, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def page_of(path: str) -> str:
    """The site's name of a file of the repository."""
    if path == "README.md":
        return "index.md"
    inside = path.removeprefix(f"{DOCS}/")
    if path.endswith(".ipynb"):
        return inside.removesuffix(".ipynb") + ".md"
    if inside != path and not path.endswith(".py"):
        return inside
    return f"{SHOWN}/{path}/index.md" if (ROOT / path).is_dir() else f"{SHOWN}/{path}.md"


def source_of(page: str) -> str:
    """The file of the repository that a page is made of; of a folder's page a name in it."""
    if page == "index.md":
        return "README.md"
    if page.startswith(f"{SHOWN}/"):
        return page.removeprefix(f"{SHOWN}/").removesuffix(".md")
    return f"{DOCS}/{page}"


def names_in(nav: Any) -> Iterator[str]:
    """Files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from names_in(entry)


def shown_text(path: str) -> str:
    """The page of a file, or of a folder with links to its files.

    The search leaves both out."""
    place = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if place.is_dir():
        names = sorted(
            file.name
            for file in place.iterdir()
            if file.is_file() and not file.name.startswith(".")
        )
        return head + "".join(f"- [{name}]({name})\n" for name in names)
    text = place.read_text(encoding="utf-8")[:LONGEST]
    return head + fenced(text, LANGUAGES.get(place.suffix[1:], "text"))


def fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def notebook_text(path: Path) -> str:
    """A notebook's cells, and the text that they printed; pictures are left out."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else fenced(text, "python"))
        for output in cell.get("outputs", ()):
            printed = output.get("text") or output.get("data", {}).get("text/plain")
            if printed and "text/html" not in output.get("data", {}):
                parts.append(fenced("".join(printed), "text"))
    return "\n\n".join(parts) + "\n"
