"""The objective that docs/algorithm.md adds, in a copy of the program: two files and a preset."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import REPOSITORY

PROGRAM = """
import math

import torch

from rlmath.algorithms.losses import LossSettings, TokenInputs, policy_loss
from rlmath.config.help import help_text, schema_problems
from rlmath.config.load import load_config
from rlmath.planning.sensible_values import doubtful_values
from rlmath.planning.setting_tables import without_effect

PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def config_of(*overrides):
    return load_config([], [*PATHS, *overrides])


assert "power: exponent of the importance ratio." in help_text("algorithm.power_exponent")
assert "dppo_kl, power; default clip" in help_text("algorithm.loss", width=1000)
preset = config_of("algorithm.preset=power")
assert (preset.algorithm.loss, preset.algorithm.power_exponent) == ("power", 0.25)
assert list(doubtful_values(preset)) == []
key = "algorithm.power_exponent"
other = config_of("algorithm.loss=sapo", "algorithm.n_minibatches=2")
print(*without_effect(other, [key]), *without_effect(preset, ["algorithm.dual_clip"]), sep="\\n")
print(*doubtful_values(config_of("algorithm.preset=power", f"{key}=50.0")), sep="\\n")
print(*schema_problems(config_of(f"{key}=0.0")), sep="\\n")

log_ratios_T = torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64)
logprobs_T = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
advantages_T = torch.tensor([2.0, -1.0, 7.0], dtype=torch.float64)
proximal_T = logprobs_T.detach() - log_ratios_T
sampled_T = torch.tensor([True, True, False])
tokens = TokenInputs(
    logprobs_T=logprobs_T,
    entropy_T=torch.zeros_like(proximal_T),
    proximal_logprobs_T=proximal_T,
    behaviour_logprobs_T=proximal_T,
    reference_logprobs_T=None,
    advantages_T=advantages_T,
    weights_T=torch.ones_like(proximal_T),
    sampled_T=sampled_T,
    learned_T=sampled_T,
    segments_T=torch.zeros(3, dtype=torch.int64),
    n_segments=1,
)
loss = policy_loss(tokens, LossSettings(preset.algorithm)).loss
powers = [math.exp(0.25 * 0.5), math.exp(0.25 * -0.25)]
assert math.isclose(loss.item(), (-2.0 * powers[0] + 1.0 * powers[1]) / 0.25)
loss.backward()
expected_T = torch.tensor([-2.0 * powers[0], 1.0 * powers[1], 0.0], dtype=torch.float64)
torch.testing.assert_close(logprobs_T.grad, expected_T)
"""
SAID = """\
algorithm.power_exponent: no effect without algorithm.loss=power.
algorithm.dual_clip: no effect without algorithm.loss=clip,gspo,dppo_tv,dppo_kl.
algorithm.power_exponent=50 is legal, and hardly what you mean: sensible is 0.1 to 1; usual is 0.5.
algorithm.power_exponent is 0.0; needed: above 0.
"""


def blocks_of_the_page() -> list[str]:
    """The setting, the record, the formula and the preset that the page shows."""
    page = (REPOSITORY / "docs/algorithm.md").read_text(encoding="utf-8")
    section = page.partition("### A new objective\n")[2].partition("\n## ")[0]
    return re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)


def insert(file: Path, text: str, before: str) -> None:
    """Write `text` into the file before the only place that reads `before`."""
    source = file.read_text(encoding="utf-8")
    assert source.count(before) == 1, before
    file.write_text(source.replace(before, text + before), encoding="utf-8")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A copy of the program with the page's objective."""
    for folder in ("rlmath", "configs/algorithms"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=ignore)
    setting, record, formula, preset = blocks_of_the_page()
    objectives = tmp_path / "rlmath/config/objectives.py"
    insert(
        objectives, ', "power"', before="]\n\n\n@dataclass(frozen=True)\nclass ObjectiveSettings"
    )
    insert(objectives, '; "power": a power of the ratio', before='."""\n    clip_ratio:')
    insert(objectives, setting, before="\n\n@dataclass(frozen=True)\nclass UsualRange")
    insert(objectives, record, before='}\n"""Every objective')
    losses = tmp_path / "rlmath/algorithms/losses.py"
    insert(losses, f"{formula}\n\n", before="SURROGATES: dict")
    insert(losses, '    "power": _power,\n', before='}\n"""The formula of every')
    (tmp_path / "configs/algorithms/power.yaml").write_text(preset, encoding="utf-8")
    return tmp_path


def test_a_new_objective_goes_from_its_preset_to_the_gradient(program: Path):
    """Settings, help, checks and loss have it from the two files and the preset alone."""
    environment = {"PYTHONPATH": str(program), "OMP_NUM_THREADS": "1", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=program,
        env=environment,
        check=False,
    )
    assert (run.stdout, run.returncode) == (SAID, 0), run.stderr
