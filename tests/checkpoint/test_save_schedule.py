"""When checkpoints are due, and how much disk a run asks for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.hf.headers import TensorFormats, formats_from_json
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.checkpoint.hf.weights import write_hf_folder
from rlmath.checkpoint.save_schedule import (
    FIRST_POINT,
    Frequency,
    SaveTimes,
    export_bytes,
    export_formats,
    export_note,
    most_models,
    output_bytes,
)
from rlmath.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    RunConfig,
    SaveConfig,
    StagesConfig,
    ValidationConfig,
)
from rlmath.data.order import PromptOrder, Rollback
from rlmath.distributed.mesh import Mesh
from rlmath.run.recovery.checkpointing import Checkpointer
from rlmath.run.recovery.resume import Origin
from tests.tiny_models import shape_of

NEVER = Frequency(None, None, None)


def due(times: SaveTimes, steps: int, seconds_per_step: float = 1.0) -> list[int]:
    return [step for step in range(1, steps + 1) if times.due(step, step * seconds_per_step)]


def test_by_steps_and_by_epochs() -> None:
    assert due(SaveTimes(Frequency(None, 4, None), 10, 0.0), 12) == [4, 8, 12]
    assert due(SaveTimes(Frequency(2, None, None), 3, 0.0), 13) == [6, 12]
    assert due(SaveTimes(Frequency(1, 4, None), 3, 0.0), 9) == [3, 4, 6, 8, 9]


def test_by_seconds_since_the_last_time() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0), 10, 250.0) == [3, 6, 9]


def test_a_first_one_is_due_whatever_the_frequency() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0, FIRST_POINT), 8, 250.0) == [2, 5, 8]


def test_never_is_never() -> None:
    assert NEVER.never
    assert due(SaveTimes(NEVER, 3, 0.0, FIRST_POINT), 100, 1e6) == []


def test_a_checkpoint_says_where_the_run_stands() -> None:
    """Every number is another one: none is taken for another."""
    trainer = SimpleNamespace(
        order=PromptOrder(20, 4, seed=1, shuffle=False),
        actor=SimpleNamespace(learner=SimpleNamespace(updates=31, loss_scale_state=(8.0, 40))),
        weight_syncs_per_step=1,
        mesh=Mesh(3, 8, 2, 2, 1),
        complete_progress=partial(
            replace, critic_updates=32, critic_loss_scale=(16.0, 41), entropy=(0.42, 43.0)
        ),
        rollbacks=(Rollback(1, 33, 34), Rollback(2, 35, 36)),
    )
    divergence = SimpleNamespace(
        discarded_steps=37, learned_step=38, good_step=39, rewards=[0.4, 0.5]
    )
    checkpointer = object.__new__(Checkpointer)
    vars(checkpointer).update(
        _trainer=trainer,
        _divergence=divergence,
        _origin=Origin("model", "data", "reward", "hooks", adapter="adapter"),
        _model_formats={"": "bfloat16"},
    )
    progress = checkpointer._progress(13)
    assert (progress.step, progress.epoch, progress.position, progress.updates, progress.syncs) == (
        13,
        2,
        12,
        31,
        13,
    )
    assert (progress.critic_updates, progress.discarded_steps) == (32, 37)
    assert (progress.loss_scale, progress.critic_loss_scale, progress.entropy) == (
        (8.0, 40),
        (16.0, 41),
        (0.42, 43.0),
    )
    assert (progress.learned_step, progress.good_step, progress.rewards) == (38, 39, (0.4, 0.5))
    assert (progress.rollback_steps, progress.rollback_draw_steps) == ((33, 35), (34, 36))
    assert (progress.layout, progress.world_size) == ("TP2 x PP2 x DP2", 8)
    fingerprints = (
        progress.model_fingerprint,
        progress.data_fingerprint,
        progress.reward_fingerprint,
        progress.hooks_fingerprint,
    )
    assert progress.model_formats == {"": "bfloat16"}
    assert (*fingerprints, progress.adapter_fingerprint) == (
        "model",
        "data",
        "reward",
        "hooks",
        "adapter",
    )


def test_models_of_stages_and_the_best_one_count_until_they_are_there(
    tied_model: Path, tmp_path: Path
) -> None:
    shape = shape_of(tied_model)
    plain = Config(
        run=RunConfig(output_dir=str(tmp_path), device="cpu"), save=SaveConfig(ckpt_freq_secs=None)
    )
    model = export_bytes(plain, shape)
    assert output_bytes(plain, read_run_shapes(plain, shape)) == model and most_models(plain) == 1
    staged = replace(
        plain,
        stages=StagesConfig(steps=[1, 1, 1], max_new_tokens=[8, 8, 8]),
        validation=ValidationConfig(keep_best=True),
    )
    shapes = read_run_shapes(staged, shape)
    assert output_bytes(staged, shapes) == 6 * model and most_models(staged) == 6
    for name in ("models/stage-1", "best_model"):
        (tmp_path / name).mkdir(parents=True)
    assert output_bytes(staged, shapes) == 4 * model and most_models(staged) == 6


def mixed_folder(model: Path, folder: Path) -> Path:
    """The model in bfloat16, but for its norms."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    mixed = {
        name: tensor if "norm" in name else tensor.to(torch.bfloat16)
        for name, tensor in tensors.items()
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_export_has_the_formats_of_the_source_and_the_disk_is_planned_for_them(
    tied_model: Path, tmp_path: Path
) -> None:
    source = mixed_folder(tied_model, tmp_path / "mixed")
    shape = shape_of(source)
    run_config = RunConfig(output_dir=str(tmp_path), device="cpu")
    config = Config(run=run_config, model=ModelConfig(path=str(source)))
    formats = export_formats(config)
    assert formats.most == "bfloat16" and formats.of("model.norm.weight") == "float32"
    assert formats_from_json(formats.as_json()) == formats
    tensors = load_file(source / "model.safetensors")
    assert export_bytes(config, shape) == sum(tensor.nbytes for tensor in tensors.values())
    stream = ((name, tensor.float()) for name, tensor in tensors.items())
    write_hf_folder(stream, read_metadata_files(source), tmp_path / "out", formats, writes=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    float32_config = replace(config, save=SaveConfig(export_dtype="float32"))
    assert export_formats(float32_config) == TensorFormats("float32")
    assert export_bytes(float32_config, shape) == sum(
        4 * tensor.numel() for tensor in tensors.values()
    )


def test_a_merged_model_has_a_format_of_its_own_and_the_disk_is_planned_for_it(
    tied_model: Path, tmp_path: Path
) -> None:
    source = mixed_folder(tied_model, tmp_path / "mixed")
    shape = shape_of(source)
    config = Config(
        run=RunConfig(output_dir=str(tmp_path), device="cpu"),
        model=ModelConfig(path=str(source)),
        save=SaveConfig(export_dtype="bfloat16", merged_dtype="float32"),
    )
    lora = replace(config, lora=LoraConfig(rank=2))
    alone = replace(lora, save=replace(config.save, merged=False))
    assert export_formats(config) == TensorFormats("bfloat16")  # without LoRA it has no effect
    assert export_formats(lora) == TensorFormats("float32")
    elements = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert export_bytes(lora, shape) - export_bytes(alone, shape) == 4 * elements
    assert export_bytes(config, shape) == 2 * elements
    assert export_note(lora, 10**9) == (
        ", in float32, 1.000 GB; that of model.path has bfloat16 (save.merged_dtype)"
    )
    assert "(save.export_dtype)" in export_note(config, 10**9)


def test_what_float16_cannot_hold_is_exported_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"fits": torch.tensor([1.0, 65504.0]), "large": torch.tensor([1.0, 70000.0])}
    write_hf_folder(
        iter(tensors.items()), {}, tmp_path / "out", TensorFormats("float16"), writes=True
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [written[name].dtype for name in tensors] == [torch.float16, torch.float32]
    assert torch.equal(written["large"], tensors["large"]) and "large has numbers" in caplog.text


def test_without_weights_the_format_is_that_of_config_json_or_of_training(tmp_path: Path) -> None:
    config = Config(run=RunConfig(device="cpu"), model=ModelConfig(path=str(tmp_path)))
    assert export_formats(config) == TensorFormats("float32")
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert export_formats(config) == TensorFormats("bfloat16")
