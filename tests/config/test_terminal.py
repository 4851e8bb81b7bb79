"""No text that others wrote brings control characters to a terminal, whatever its way there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlmath.cli import samples
from tests.programs import run

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x7f\x9b31m\u202e\u2066\ud800\rend"
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

WAYS = """
import argparse, logging, sys, threading, warnings
from pathlib import Path
from rlmath.telemetry.console import setup_logging
hostile = %a
setup_logging(0)
print(hostile)
print(hostile, file=sys.stderr)
sys.stderr.writelines(["written " + hostile])
logging.getLogger("rlmath").warning("own %%s", hostile)
logging.getLogger("vllm.config").error("vllm %%s", hostile)
from transformers.utils import logging as theirs
theirs.get_logger("transformers.models.auto").error("transformers %%s", hostile)
warnings.warn("warned " + hostile)
def fail(): raise ValueError("thread " + hostile)
thread = threading.Thread(target=fail); thread.start(); thread.join()
try: argparse.ArgumentParser(prog="parsed").parse_args(["--" + hostile])
except SystemExit: pass
try: fail()
except ValueError: logging.exception("logged")
raise LookupError("uncaught " + hostile)
"""


def test_every_way_to_the_terminal_shows_control_characters_as_escapes() -> None:
    process = run("-c", WAYS % HOSTILE, expect=1)
    assert not RAW.search(process.stdout + process.stderr)
    for way in (
        "own",
        "vllm",
        "transformers",
        "warned",
        "ValueError: thread",
        "--",
        "uncaught",
        "written",
    ):
        assert (
            way + (" " if way != "--" else "") + r"\x1b[2J\x1b]0;owned\x07\x7f\x9b31m\u202e"
            in process.stderr
        )
    assert process.stdout.startswith(r"\x1b[2J") and process.stdout.endswith("end\n")
    assert process.stderr.count("Traceback (most recent call last):\n") == 3, "lines stay lines"


BAR = """
import logging, sys
{}
from tqdm import tqdm
for _ in tqdm(range(3), desc="rollout", file=sys.stderr, ncols=40, mininterval=0, bar_format="{{l_bar}}{{bar}}"): pass
logging.warning("a\\tline\\nand é 漢 another")
"""


def test_what_progress_bars_and_lines_show_stays() -> None:
    screens = [
        run("-c", BAR.format(call)).stderr
        for call in ("", "from rlmath.config.terminal import escape_terminal; escape_terminal()")
    ]
    assert (
        screens[0] == screens[1]
        and screens[0].count("rollout") > 2
        and "é 漢 another" in screens[0]
    )


@pytest.mark.parametrize("field", ["length", "prompt_id", "verdict"])
def test_crafted_samples_are_shown_harmlessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    completion = {"reward": 1, "advantage": 0, "correct": True, "verdict": "x", "extracted": "1"}
    completion |= {"length": 1, "finish_reason": "stop", "text": HOSTILE}
    row = {"prompt_id": "p", "prompt": HOSTILE, "solutions": [HOSTILE], "completions": [completion]}
    (row if field in row else completion)[field] = HOSTILE
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    status = samples.main([str(tmp_path)])
    streams = capsys.readouterr()
    assert status == (2 if field == "length" else 0)
    assert streams.out + streams.err and not RAW.search(streams.out + streams.err)
