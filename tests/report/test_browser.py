"""The page in a headless Chromium: no script but its own runs, nothing is an error, and figures are drawn."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from rlmath.report.write import write_report
from tests.report.folders import HOSTILE, group, make_run, write_samples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@dataclass(frozen=True)
class Opened:
    """A page as the browser had it after its scripts."""

    dom: str
    image: Image.Image
    console: list[str]


def opened(page: Path, folder: Path, dark: bool, height: int = 4000) -> Opened:
    assert CHROMIUM is not None
    scheme = 0 if dark else 1
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--window-size=1280,{height}",
        "--virtual-time-budget=8000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"--screenshot={folder / 'page.png'}",
    ]
    done = subprocess.run(
        [CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Opened(done.stdout, Image.open(folder / "page.png").convert("RGB"), console)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_are_drawn_and_nothing_hostile_runs(tmp_path: Path, dark: bool) -> None:
    folder = make_run(tmp_path / "one")
    write_samples(folder, 5, [group(HOSTILE, prompt=HOSTILE, prompt_id=HOSTILE)])
    page = write_report([folder])
    text = page.read_text(encoding="utf-8")
    page.write_text(  # what would run if escaping failed somewhere
        text.replace("<footer>", "<script>document.title='owned'</script><footer>"), encoding="utf-8"
    )
    got = opened(page, tmp_path, dark)
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


def test_a_page_of_two_runs_has_no_error_and_draws_what_is_in_view(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / name, steps, [f"run.seed={steps}"]) for name, steps in (("a", 3), ("b&lt;", 9))
    ]
    page = write_report(folders, tmp_path / "both.html")
    got = opened(page, tmp_path, dark=False, height=700)
    assert got.console == []
    (drawn,) = re.findall(r'data-drawn="(\d+)"', got.dom)
    assert 2 <= int(drawn) < got.dom.count('data-figure="') / 2
    legend = re.findall(r'<text class="legendtext"[^>]*>([^<]*)</text>', got.dom)
    assert {"a", "b&amp;lt;"} <= set(legend)
