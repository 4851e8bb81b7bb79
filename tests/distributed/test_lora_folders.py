"""LoRA's checkpoints become PEFT's folders and merged models.

A run begins with such a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.hf.peft import ADAPTER_FILE, adapter_problems
from rlmath.cli import convert
from rlmath.config.run_files import ADAPTER_CONFIG
from rlmath.config.schema import LoraConfig, RolloutConfig
from tests.distributed import lora_cases
from tests.distributed.lora_cases import TOKENS, Trained, logits
from tests.distributed.policy_cases import LORA_ALPHA, LORA_RANK, Case
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix
from tests.tiny_models import make_model_folder, make_samples, shape_of

pytestmark = pytest.mark.distributed

SPLIT = Case(pipeline=2, virtual_pipeline=2, optimizer="adam", lr=1e-2, lora="all")
LORA = LoraConfig(rank=LORA_RANK, alpha=LORA_ALPHA)


@pytest.fixture(scope="module")
def trained(
    ranks: RankPool, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Trained]:
    """A folder with a checkpoint, and what is converted of it: merged/ and adapter/."""
    place = tmp_path_factory.mktemp("lora")
    arguments = untied_model, SPLIT, make_samples(12, seed=4, longest=40), place / "checkpoints"
    policy = ranks.run(SPLIT.ranks, lora_cases.save, *arguments)[0]
    to_hf = ["to-hf", "--checkpoint", str(place), "--output"]
    assert convert.main([*to_hf, str(place / "merged")]) == 0
    assert convert.main([*to_hf, str(place / "adapter"), "--adapter"]) == 0
    return place, policy


def test_a_checkpoint_is_converted_to_what_the_policy_was(
    trained: tuple[Path, Trained], untied_model: Path
) -> None:
    place, policy = trained
    for folder, tensors in (
        ("merged/model.safetensors", policy.merged),
        (f"adapter/{ADAPTER_FILE}", policy.adapters),
    ):
        loaded = load_file(place / folder)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()), folder
    card = (place / "adapter" / "README.md").read_text()
    assert "\nlibrary_name: peft\n" in card and "\n# LoRA adapters of " in card
    base = load_file(untied_model / "model.safetensors")
    moved = {name for name, tensor in policy.merged.items() if not torch.equal(base[name], tensor)}
    assert len(moved) == len(policy.adapters) / 2
    state = (place / "checkpoints" / "step-000002" / "state").glob("*.distcp")
    adapters = sum(tensor.nbytes for tensor in policy.adapters.values())
    assert 3 * adapters < sum(file.stat().st_size for file in state) < 3 * adapters + 2**18


@matrix
def test_peft_reads_the_adapter_and_computes_what_the_merged_model_does(
    trained: tuple[Path, Trained], untied_model: Path
) -> None:
    place, _ = trained
    merged = logits(place / "merged")
    torch.testing.assert_close(
        logits(untied_model, place / "adapter"), merged, atol=1e-5, rtol=1e-5
    )
    assert (logits(untied_model) - merged).abs().max() > 1e-2


def engine_logprobs(model: str, adapter: str) -> list[float]:
    """Log-probs of TOKENS but the first, by the engine of an evaluation; for its own process."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    from rlmath.rollout.engine import open_standalone
    from rlmath.rollout.engine_adapters import adapter_request

    llm = open_standalone(
        model, RolloutConfig(cpu_kv_cache_gib=0.1), 64, device_kind="cpu", adapter=Path(adapter)
    )
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate(
        [{"prompt_token_ids": list(TOKENS)}], sampling, lora_request=adapter_request(llm)
    )
    return [
        logprobs[token].logprob
        for logprobs, token in zip(output.prompt_logprobs[1:], TOKENS[1:], strict=True)
    ]


@matrix
def test_an_engine_with_a_peft_folder_has_the_log_probs_of_the_merged_model(
    trained: tuple[Path, Trained], untied_model: Path, tmp_path: Path
) -> None:
    """However the folder names its modules, as PEFT allows: the tensors say which there are."""
    place, _ = trained
    folder = shutil.copytree(place / "adapter", tmp_path / "adapter")
    of_config(target_modules=["self_attn.q_proj", "all the others"])(folder)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        logprobs = process.submit(engine_logprobs, str(untied_model), str(folder)).result()
    merged, base = (
        logits(model)[0, :-1].log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        for model in (place / "merged", untied_model)
    )
    torch.testing.assert_close(torch.tensor(logprobs), merged, atol=1e-5, rtol=0)
    assert (base - merged).abs().max() > 1e-2


def of_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def of_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_FILE)
        change(tensors)
        save_file(tensors, folder / ADAPTER_FILE)

    return changed


Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
WRONG = [
    (of_config(r=8), '"r" is 8; needed, by lora.rank, lora.alpha and lora.target: 3'),
    (
        of_config(lora_alpha=16),
        '"lora_alpha" is 16; needed, by lora.rank, lora.alpha and lora.target: 5',
    ),
    (of_config(target_modules=["q_proj"]), "\"target_modules\" is ['q_proj']; needed"),
    (of_config(peft_type="IA3"), '"peft_type" is'),
    (of_config(use_rslora=True), '"use_rslora" is true, which is not supported'),
    (of_config(use_dora=True), '"use_dora"'),
    (of_config(bias="all"), '"bias" is "all"'),
    (of_config(modules_to_save=["lm_head"]), '"modules_to_save"'),
    (of_config(rank_pattern={"q_proj": 2}), '"rank_pattern"'),
    (of_config(init_lora_weights="pissa_niter_4"), "changes the weights of the model, too"),
    (
        of_tensors(lambda tensors: tensors.pop(Q_A)),
        f"1 of 56 tensors are not in the weights: {Q_A}",
    ),
    (
        of_tensors(lambda tensors: tensors.update({Q_A: torch.zeros(3, 5)})),
        f"{Q_A} has shape (3, 5)",
    ),
    (
        of_tensors(lambda tensors: tensors.update(other=torch.zeros(1))),
        "are no adapters of this model: other",
    ),
    (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "cannot be read"),
    (
        lambda folder: (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin"),
        "has no adapter_model.safetensors",
    ),
    (lambda folder: shutil.rmtree(folder), "there is no such folder"),
]


def test_a_folder_that_does_not_fit_is_refused_before_the_start(
    trained: tuple[Path, Trained], untied_model: Path, tmp_path: Path
) -> None:
    for number, (change, text) in enumerate(WRONG):
        folder = shutil.copytree(trained[0] / "adapter", tmp_path / str(number))
        assert list(adapter_problems(folder, LORA, shape_of(untied_model))) == []
        change(folder)
        (problem,) = adapter_problems(folder, LORA, shape_of(untied_model))
        assert text in problem and "model.adapter_path" in problem


@matrix
def test_adapters_are_not_merged_into_another_model(
    trained: tuple[Path, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_model_folder(tmp_path / "other", tied=False, seed=7)
    arguments = [
        "to-hf",
        "--checkpoint",
        str(trained[0]),
        "--output",
        str(tmp_path / "out"),
        "--base",
    ]
    assert convert.main([*arguments, str(other)]) == convert.MISTAKE
    assert "for another model than that in" in capsys.readouterr().err
    assert convert.main([*arguments, str(tmp_path / "nothing")]) == convert.MISTAKE
    assert not (tmp_path / "out").exists()
