"""What the documents point at is there: files, headings, pages of the site, settings."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rlmath.config.schema import Config
from tests.programs import REPOSITORY

DOCS = REPOSITORY / "docs"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md")), *NOTEBOOKS]
MARKDOWN = MarkdownIt("commonmark").enable("table")
SETTING = re.compile(r"(?<![\w./-])([a-z]+)\.([a-z_0-9]+)(?![\w/(])")


@cache
def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


@cache
def tokens_of(page: Path) -> list[Token]:
    return MARKDOWN.parse(text_of(page))


def inline(page: Path) -> Iterator[Token]:
    for token in tokens_of(page):
        yield from token.children or ()


def links_of(page: Path) -> list[str]:
    """The targets of links and pictures."""
    return [
        str(address)
        for token in inline(page)
        if (address := token.attrGet("href") or token.attrGet("src"))
    ]


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings, as file views of repositories make them.

    They have small letters, hyphens for spaces, and no other marks."""
    counts: Counter[str] = Counter()
    anchors = set()
    tokens = tokens_of(page)
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in content.children or ())
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            anchors.add(f"{name}-{counts[name]}" if counts[name] else name)
            counts[name] += 1
    return anchors


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere, each with the reason."""
    problems = []
    for link in links_of(page):
        path, _, anchor = unquote(link).partition("#")
        if re.match("https?:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(REPOSITORY) or path.startswith("/"):
            problems.append(f"{link}: outside the repository")
        elif not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            problems.append(f"{link}: no such heading")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    assert broken(page) == []


def test_the_navigation_of_the_site_names_pages_that_are_there() -> None:
    """Pages that it does not name are added when the site is built."""
    nav = (
        (DOCS / "site" / "mkdocs.yml")
        .read_text(encoding="utf-8")
        .partition("\nnav:")[2]
        .partition("\n\n")[0]
    )
    page_names = re.findall(r": ([\w/]+)\.md$", nav, re.MULTILINE)
    assert len(page_names) == len(set(page_names)) > 15
    assert [
        page_name
        for page_name in page_names
        if page_name != "index" and not (DOCS / f"{page_name}.md").exists()
    ] == [page.relative_to(DOCS).with_suffix("").as_posix() for page in NOTEBOOKS]


def test_readers_find_every_page_from_the_first() -> None:
    """Links alone lead to it, as in a file view, which has no navigation."""
    waiting_pages = [PAGES[0]]
    seen_pages = set()
    while waiting_pages:
        page = waiting_pages.pop()
        if page in seen_pages or page not in PAGES:
            continue
        seen_pages.add(page)
        waiting_pages += [
            (page.parent / link.partition("#")[0]).resolve() for link in links_of(page)
        ]
    assert [page.name for page in PAGES if page not in seen_pages] == [], "no page links to these"


def code_about_us(page: Path) -> Iterator[str]:
    """Code within lines.

    Of tables whose first column has other programs' keys it is that of the last column alone."""
    tokens = tokens_of(page)
    cells = []
    for before, token in pairwise(tokens):
        if before.type == "tr_open":
            cells = []
        if before.type in ("td_open", "th_open") and page.stem == "coming_from":
            cells.append(token)
            continue
        if token.type == "tr_close" and cells:
            yield from (
                child.content for child in cells[-1].children or () if child.type == "code_inline"
            )
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def test_settings_that_the_documents_name_are_there() -> None:
    config = Config()
    keys = {
        section.name: {field.name for field in dataclasses.fields(getattr(config, section.name))}
        for section in dataclasses.fields(config)
    }
    unknown_settings = []
    count = 0
    for page in PAGES:
        for code in code_about_us(page):
            for section, key in SETTING.findall(code):
                if section not in keys or key in ("json", "jsonl", "log", "yaml"):
                    continue
                count += 1
                shortened = key.endswith("_") and any(
                    known_key.startswith(key) for known_key in keys[section]
                )
                unknown_settings += (
                    [] if shortened or key in keys[section] else [f"{page.name}: {code}"]
                )
    assert unknown_settings == [] and count > 400


@pytest.mark.parametrize("name", ["README.md", "docs/rewards.md"])
def test_the_reward_function_that_a_page_shows_pays_right_answers(name: str) -> None:
    """The function is used as a user copies it.

    The solution 5 is not paid with 15, 50 or a box that is taken back, whether the file has it in a
    box or not, and a right answer is worth more than a wrong one at any length."""
    source = next(
        token.content
        for token in tokens_of(REPOSITORY / name)
        if token.type == "fence" and token.info == "python" and "def " in token.content
    )
    names: dict[str, Any] = {}
    exec(source, names)
    function = names["short"]

    def reward(completion: str, solution: str) -> float:
        reward_given = function(completion, [solution], {})
        return reward_given[0] if isinstance(reward_given, tuple) else reward_given

    for solution in ("5", r"\boxed{5}"):
        right = reward("2+3\n" * 1000 + r"so \boxed{\frac{10}{2}}", solution)
        answers = (r"2+3\boxed{15}", r"2+3\boxed{50}", "it is 5", r"\boxed{5}, no: \boxed{6}", "")
        for wrong_answer in (*answers, r"\boxed{5}, no: \boxed{\frac{1}{5}}"):
            assert reward(wrong_answer, solution) < right
