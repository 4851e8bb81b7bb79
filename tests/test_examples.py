"""docs/examples: each runs from an empty folder, as a user starts it, and shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import keeping

EXAMPLES = REPOSITORY / "docs" / "examples"
MOST_LINES = 80
IN_MATRIX = ["conversion", "custom_reward", "dapo"]


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def shows_conversion(text: str) -> bool:
    return re.search(r"^(\d+) of \1 tensors are the same", text, re.MULTILINE) is not None


def shows_custom_data_form(text: str) -> bool:
    return "90 prompts, 10 rows left out" in text and re.search(r"a prompt: '\d+\+\d+='", text) is not None


def shows_custom_reward(text: str) -> bool:
    rewards = numbers(r"step \d+: (-?[\d.]+), [\d.]+ digits", text)
    return len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2])


def shows_dapo(text: str) -> bool:
    return (
        "dynamic sampling may ask for up to 256 prompts more a step" in text
        and "No problem was found." in text
    )


def shows_evaluation_table(text: str) -> bool:
    return text.count("heldout") >= 3


def shows_hooks(text: str) -> bool:
    best = numbers(r"step \d+: best ([\d.]+), \d+ groups dropped by the rule", text)
    return len(best) == 6 and all(0 <= one <= 1 for one in best)


def shows_partial_rollouts(text: str) -> bool:
    flying = numbers(r"step \d+: (\d+) completions in flight", text)
    return len(flying) == 10 and max(flying) > 0 and flying[-1] == 0


def shows_sft_then_grpo(text: str) -> bool:
    (first, last) = re.search(r"loss ([\d.]+) to ([\d.]+)", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return float(last) < float(first) / 2 and len(numbers(r"([\d.]+)% right in step 1", text)) == 1


def shows_slurm_dry_run(text: str) -> bool:
    return "#SBATCH --nodes=2" in text and "configs/demo.yaml" in text


def shows_two_rewards(text: str) -> bool:
    lengths = numbers(r"step \d+: correctness -?[\d.]+, ([\d.]+) tokens", text)
    return len(lengths) == 8 and sum(lengths[-2:]) < sum(lengths[:2])


SHOWS = {
    name.removeprefix("shows_"): check for name, check in dict(globals()).items() if name.startswith("shows_")
}


def test_every_example_is_tested_short_and_described() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert files.keys() == SHOWS.keys()
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, name
        assert f"python docs/examples/{name}.py" in text
        assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", keeping([*IN_MATRIX, *sorted(SHOWS.keys() - set(IN_MATRIX))], others=len(IN_MATRIX))
)
def test_an_example_shows_what_it_promises(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    assert SHOWS[name](done.stdout), done.stdout
