"""The page in a headless Chromium: no script but its own runs, nothing is an error, and figures are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection

from rlmath.report.write import write_report
from tests.report.browser import CHROMIUM, browser, shown
from tests.report.folders import HOSTILE, group, make_run, write_samples

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
DRAWN = "Number(document.documentElement.dataset.drawn)"
PLACES = "document.querySelectorAll('[data-figure]').length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientConnection]:
    with browser(tmp_path_factory.mktemp("profile")) as connection:
        yield connection


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_are_drawn_and_nothing_hostile_runs(
    chromium: ClientConnection, tmp_path: Path, dark: bool
) -> None:
    folder = make_run(tmp_path / "one")
    write_samples(folder, 5, [group(HOSTILE, prompt=HOSTILE, prompt_id=HOSTILE)])
    page = write_report([folder])
    text = page.read_text(encoding="utf-8")
    page.write_text(  # what would run if escaping failed somewhere
        text.replace("<footer>", "<script>document.title='owned'</script><footer>"), encoding="utf-8"
    )
    got = shown(chromium, page, f"{DRAWN} === {PLACES}", dark, height=4000)
    assert "<title>one: report of a run</title>" in got.dom
    (refused,) = got.console
    assert "Content Security Policy" in refused and "script-src" in refused
    places = got.dom.count('data-figure="')
    assert places == 9 and f'data-drawn="{places}"' in got.dom
    assert len(re.findall(r'class="[^"]*js-line', got.dom)) >= 8
    assert got.dom.count('<div class="completion') == 2 and "\\u202e\\x00" in got.dom
    assert "&lt;/script&gt;&lt;script&gt;" in got.dom
    red, green, blue = got.image.getpixel((3, 3))
    assert max(red, green, blue) < 60 if dark else min(red, green, blue) > 200
    curve = (0x5C, 0xB8, 0xF0) if dark else (0x00, 0x72, 0xB2)
    near = sum(
        count
        for count, color in got.image.getcolors(2**24) or ()
        if sum(abs(part - wanted) for part, wanted in zip(color, curve, strict=True)) < 12
    )
    assert near > 5000


def test_a_page_of_two_runs_has_no_error_and_draws_what_is_in_view(
    chromium: ClientConnection, tmp_path: Path
) -> None:
    folders = [
        make_run(tmp_path / name, steps, [f"run.seed={steps}"]) for name, steps in (("a", 3), ("b&lt;", 9))
    ]
    page = write_report(folders, tmp_path / "both.html")
    got = shown(chromium, page, f"{DRAWN} >= 2", dark=False, height=700)
    assert got.console == []
    (drawn,) = re.findall(r'data-drawn="(\d+)"', got.dom)
    assert 2 <= int(drawn) < got.dom.count('data-figure="') / 2
    legend = re.findall(r'<text class="legendtext"[^>]*>([^<]*)</text>', got.dom)
    assert {"a", "b&amp;lt;"} <= set(legend)
