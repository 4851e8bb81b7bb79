"""Conversion between Hugging Face and torch_dist: refusals beforehand and failures midway."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.convert import convert
from rlmath.checkpoint.convert.convert import hf_to_megatron
from rlmath.checkpoint.hf.weight_map import hf_tensors
from tests.checkpoint.conversions import assert_same, drop, put, to_hf, to_megatron, weights
from tests.tiny_models import make_model_folder, shape_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "source")


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop(NORM), ["tensors are not in the weights", NORM]),
        (put(NORM, 64), [f"{NORM} has shape (64,), config.json makes it (128,)"]),
        (
            put("model.layers.4.input_layernorm.weight", 128),
            ["unknown to Qwen2ForCausalLM: model.layers.4"],
        ),
        (
            lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}),
            ["needed: float32, bfloat16", f"{NORM} in", "in I8"],
        ),
        (
            lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float16)}),
            ["several number formats"],
        ),
    ],
)
def test_a_model_that_is_not_what_config_json_says_is_refused_with_a_list(
    copy: Path, source: Path, tmp_path: Path, change: Any, told: list[str]
):
    edit(copy, change)
    with pytest.raises(ValueError) as error:
        hf_to_megatron(copy, shape_of(source), tmp_path / "out", 1, 1, None)
    assert all(part in str(error.value) for part in told), str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def in_norm(*numbers: float) -> Any:
    """Numbers put into one tensor."""
    return lambda tensors: tensors.update(
        {NORM: torch.cat([tensors[NORM][: -len(numbers)], torch.tensor(numbers)])}
    )


@pytest.mark.parametrize(
    ("numbers", "dtype", "told"),
    [
        (
            (float("nan"), float("inf")),
            None,
            "numbers that are NaN, infinite or too large for float32",
        ),
        (
            (float("-inf"),),
            torch.bfloat16,
            "numbers that are NaN, infinite or too large for bfloat16",
        ),
        (
            (torch.finfo(torch.float32).max,),
            torch.bfloat16,
            "numbers that are NaN, infinite or too large for bfloat16",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused_with_tensor_and_file(
    copy: Path, source: Path, tmp_path: Path, numbers: tuple[float, ...], dtype: Any, told: str
):
    edit(copy, in_norm(*numbers))
    with pytest.raises(ValueError) as error:
        hf_to_megatron(copy, shape_of(source), tmp_path / "out", 2, 1, dtype)
    assert f"{NORM} in {copy / 'model.safetensors'} has {told}" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(
    copy: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as earlier releases could save: here one that was written without the check."""
    edit(copy, in_norm(float("nan")))
    with monkeypatch.context() as unchecked:
        unchecked.setattr(convert, "all_finite", lambda tensor, dtype: True)
        state = to_megatron(copy, tmp_path / "out", 2)
    with pytest.raises(ValueError, match=f"{NORM} has numbers that are NaN"):
        to_hf(state, source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_tensors_that_older_releases_wrote_are_passed_over(tmp_path: Path):
    tied = make_model_folder(tmp_path / "tied", tied=True)
    copy = Path(shutil.copytree(tied, tmp_path / "copy"))
    edit(copy, put("model.layers.0.self_attn.rotary_emb.inv_freq", 16))
    edit(
        copy,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    state = to_megatron(copy, tmp_path / "out")
    assert_same(weights(to_hf(state, copy, tmp_path / "hf")), weights(tied))


# ---------------------------------------------------------------- what goes wrong in the middle


def test_an_output_that_is_there_is_left_alone(source: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        to_megatron(source, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    (tmp_path / "out" / "mine.txt").unlink()
    to_megatron(source, tmp_path / "out")


def test_a_checkpoint_that_is_damaged_in_the_middle_leaves_nothing(source: Path, tmp_path: Path):
    state = to_megatron(source, tmp_path / "megatron")
    size = (state / "__0_0.distcp").stat().st_size
    with (state / "__0_0.distcp").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged where .* is stored"):
        to_hf(state, source, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_too_little_room_is_told_before_anything_is_written(source: Path, tmp_path: Path):
    large = replace(shape_of(source), vocab_size=2**50)
    needed = convert._elements(hf_tensors(large).values())
    with (
        pytest.raises(ValueError, match="GB free; needed: "),
        convert._fresh_folder(tmp_path / "out", needed),
    ):
        pytest.fail("there is no such disk")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_in_the_middle_leaves_nothing(source: Path, tmp_path: Path, limit: None):
    for number, way in enumerate(
        (lambda out: to_megatron(source, out), lambda out: to_hf(state_of(tmp_path), source, out))
    ):
        with pytest.raises((OSError, RuntimeError)):
            way(tmp_path / f"out{number}")
        assert not list(tmp_path.glob("out*"))


@pytest.fixture
def limit(source: Path, tmp_path: Path) -> Iterator[None]:
    """A limit of 300 KB for every file: the kernel refuses to write more, as a full disk does."""
    import resource
    import signal

    to_megatron(source, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def state_of(place: Path) -> Path:
    return place / "whole" / "release"
