"""The programs and the notebook of docs/examples.

Each runs from an empty folder, as a user starts it, and shows what it promises."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import left_over
from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import keeping

EXAMPLES = REPOSITORY / "docs" / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
MOST_BYTES = 100_000
ELSEWHERE = {"real_model"}
"""Tested in tests/real_model."""
IN_MATRIX = ["conversion", "dapo"]


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


def shows_conversion(text: str) -> bool:
    return re.search(r"^(\d+) of \1 tensors are the same", text, re.MULTILINE) is not None


def shows_custom_data_form(text: str) -> bool:
    return (
        "90 prompts, 10 rows left out" in text
        and re.search(r"a prompt: '\d+\+\d+='", text) is not None
    )


def shows_custom_reward(text: str) -> bool:
    rewards = numbers(r"step \d+: (-?[\d.]+), [\d.]+ digits", text)
    return len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2])


def shows_dapo(text: str) -> bool:
    return (
        "dynamic sampling may ask for up to 128 prompts more a step" in text
        and "No problem was found." in text
    )


def shows_evaluation_table(text: str) -> bool:
    return text.count("heldout") >= 3


def shows_hooks(text: str) -> bool:
    best = numbers(r"step \d+: best ([\d.]+), \d+ groups dropped by the rule", text)
    return len(best) == 6 and all(0 <= reward <= 1 for reward in best)


def shows_partial_rollouts(text: str) -> bool:
    flying = numbers(r"step \d+: (\d+) completions in flight", text)
    return len(flying) == 10 and max(flying) > 0 and flying[-1] == 0


def shows_slurm_dry_run(text: str) -> bool:
    return "#SBATCH --nodes=2" in text and "configs/demo.yaml" in text


def shows_two_rewards(text: str) -> bool:
    lengths = numbers(r"step \d+: correctness -?[\d.]+, ([\d.]+) tokens", text)
    return len(lengths) == 8 and sum(lengths[-2:]) < sum(lengths[:2])


SHOWS = {
    name.removeprefix("shows_"): check
    for name, check in dict(globals()).items()
    if name.startswith("shows_")
}


def test_every_example_is_tested_and_described() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert files.keys() == SHOWS.keys() | ELSEWHERE
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        assert f"python docs/examples/{name}.py" in text
        assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", keeping([*IN_MATRIX, *sorted(SHOWS.keys() - set(IN_MATRIX))], others=len(IN_MATRIX))
)
def test_an_example_shows_what_it_promises(tmp_path: Path, name: str) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert process.returncode == 0, process.stdout
    assert SHOWS[name](process.stdout), process.stdout


def printed_by(cell: dict[str, Any]) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


def test_the_notebook_has_the_small_outputs_of_one_run_from_top_to_bottom() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [
        output for cell in cells for output in cell.outputs if output.output_type == "error"
    ]
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert not re.search(
        r"site-packages|(?<![\w.])/(home|root|tmp|work)/", NOTEBOOK.read_text(encoding="utf-8")
    )


@pytest.mark.full
@pytest.mark.distributed
def test_the_notebook_runs_in_a_new_kernel_which_ends_with_it(tmp_path: Path) -> None:
    """Its kernel imports no torch: what a run needs is in processes of the run."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(
        nbformat.v4.new_code_cell("sorted({'megatron', 'torch', 'vllm'} & sys.modules.keys())")
    )
    before = set(left_over.left_over(0))
    client = nbclient.NotebookClient(
        notebook,
        timeout=500,
        coalesce_streams=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    variables = {"PYTHONPATH": str(REPOSITORY), "PLOTLY_RENDERER": "plotly_mimetype"}
    try:
        client.execute(env=ENVIRONMENT | variables)
    finally:
        processes = set(left_over.left_over(left_over.GRACE_SECONDS)) - before
        lines = [left_over.described(process) for process in processes]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert lines == []
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "[]"
    printed_text = "\n".join(map(printed_by, notebook.cells))
    rewards = numbers(r"^step \d+: reward ([\d.]+),", printed_text)
    assert len(rewards) == 8 and sum(rewards[-2:]) > 2 * sum(rewards[:2])
    assert 'unknown key "rollout.groupsize"' in printed_text and "\n8 steps, " in printed_text
    bundles = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    (figure,) = [
        bundle["application/vnd.plotly.v1+json"] for bundle in bundles if "text/plain" not in bundle
    ]
    assert figure["data"][0]["x"] == list(range(1, 9))
