"""The merge of adapters into weights, and the share of their update that rounding keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from rlmath.checkpoint.convert.convert import adapters_to_hf, megatron_to_hf
from rlmath.checkpoint.hf import lora_merge
from rlmath.checkpoint.hf.headers import TensorFormats
from rlmath.checkpoint.hf.lora_merge import kept_share, merged_weight
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.weight_map import adapter_name
from rlmath.cli import convert
from rlmath.models.lora import Adapter
from rlmath.rollout.weight_sync.weight_sync import SourceMatrices
from tests.checkpoint.conversions import ALPHA, RANK, in_bfloat16, lora_checkpoint, weights
from tests.tiny_models import shape_of

SCALE = 2.0


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def matrices(size: float, dtype: torch.dtype, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """W, and B and A whose product has elements of about `size`."""
    torch.manual_seed(seed)
    a = torch.randn(4, 64) / 4
    return (
        (torch.randn(96, 64) * 0.02).to(dtype),
        (torch.randn(96, 4) * size).to(dtype),
        a.to(dtype),
    )


def update_of(b: Tensor, a: Tensor) -> Tensor:
    return SCALE * b.double() @ a.double()


def share(sums: Tensor) -> float:
    return (sums[0] / sums[1]).item()


@pytest.mark.parametrize(
    ("size", "written"),
    [(1e-2, None), (1e-5, None), (1e-5, torch.float32), (1e-5, torch.float16)],
)
def test_the_share_kept_is_the_projection_of_what_was_written_on_the_update(
    size: float, written: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_merge, "MERGED_BLOCK_BYTES", 8 * 64 * 20)  # five blocks of rows
    weight, b, a = matrices(size, torch.bfloat16)
    update = update_of(b, a)
    merged, sums = merged_weight(weight, b, a, scale=SCALE, written=written)
    rounded = (weight.double() + update).to(written or torch.bfloat16)
    assert torch.equal(merged.double(), (weight.double() + update).to(merged.dtype).double())
    change = rounded.double() - weight.double()
    torch.testing.assert_close(sums, torch.stack([(change * update).sum(), update.square().sum()]))


def test_a_small_update_is_lost_in_bfloat16_and_kept_in_float32() -> None:
    large = merged_weight(*matrices(1e-2, torch.bfloat16), scale=SCALE)[1]
    small = merged_weight(*matrices(1e-6, torch.bfloat16), scale=SCALE)[1]
    whole = merged_weight(*matrices(1e-6, torch.bfloat16), scale=SCALE, written=torch.float32)[1]
    assert share(large) == pytest.approx(1, abs=0.01)
    assert share(small) < 0.3
    assert share(whole) == pytest.approx(1, abs=1e-3)


def test_what_float16_may_not_hold_is_merged_in_float32() -> None:
    weight = torch.full((2, 2), 70000.0)
    merged, _ = merged_weight(
        weight, torch.ones(2, 1), torch.ones(1, 2), scale=1.0, written=torch.float16
    )
    assert merged.dtype == torch.float32 and torch.equal(merged, weight + 1)


def test_the_share_of_several_matrices_weighs_them_by_their_updates(one_rank: None) -> None:
    sums = torch.tensor([[1.0, 4.0], [3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert kept_share(sums) == 0.5
    assert kept_share(sums[2:]) == kept_share([]) == 1


def adapter_of(b: Tensor, a: Tensor) -> Adapter:
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, params_dtype=torch.bfloat16
    )
    adapter = Adapter(
        (1, *a.shape),
        tuple(b.shape),
        SCALE,
        splits_columns=False,
        config=config,
        device=torch.device("cpu"),
    )
    adapter.A.data[0] = a
    adapter.B.data.copy_(b)
    return adapter


def test_a_sync_tells_the_share_of_each_merged_matrix_once(one_rank: None) -> None:
    weight, small, a = matrices(1e-5, torch.bfloat16)
    plain = SourceMatrices({"plain": weight})
    assert torch.equal(plain.matrix("plain"), weight) and plain.kept_metrics() == {}
    large = 3 * small
    adapters = {"small": adapter_of(small, a), "large": adapter_of(large, a)}
    sources = SourceMatrices(dict.fromkeys(adapters, weight), merging=adapters, merges=True)
    merged, sums = merged_weight(weight, small, a, scale=SCALE)
    for _ in range(9):
        assert torch.equal(sources.matrix("small"), merged)
    assert sources.kept_metrics() == {"sync/lora_kept": pytest.approx(share(sums))}
    sources.matrix("large")
    both = sums + merged_weight(weight, large, a, scale=SCALE)[1]
    assert sources.kept_metrics() == {"sync/lora_kept": pytest.approx(share(both))}
    for name, adapter in adapters.items():
        adapter.B.data.zero_()
        assert torch.equal(sources.matrix(name), weight)
    assert sources.kept_metrics() == {"sync/lora_kept": 1}  # nothing has been learned


@pytest.mark.parametrize("dtype", [None, torch.float32, TensorFormats("bfloat16")])
def test_a_wider_format_has_all_that_the_adapters_learned(
    untied_model: Path, tmp_path: Path, dtype: torch.dtype | TensorFormats | None
) -> None:
    base = in_bfloat16(untied_model, tmp_path / "base")
    state = lora_checkpoint(base, tmp_path / "run" / "step-000001", torch.bfloat16)
    metadata_files = read_metadata_files(base)
    output = tmp_path / "out"
    megatron_to_hf(state, shape_of(base), metadata_files, output=output, dtype=dtype)
    adapters = weights_of_adapters(state, base, tmp_path / "adapter")
    written = torch.float32 if dtype == torch.float32 else torch.bfloat16
    converted = weights(output)
    for name, weight in weights(base).items():
        exact = weight.double()
        if adapter_name(name, "A") in adapters:
            a, b = (adapters[adapter_name(name, matrix)].double() for matrix in "AB")
            exact += ALPHA / RANK * b @ a
        assert torch.equal(converted[name], exact.to(written)), name


def test_a_conversion_and_its_card_say_what_rounding_has_lost(
    untied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = in_bfloat16(untied_model, tmp_path / "base")
    state = lora_checkpoint(base, tmp_path / "run" / "step-000001", torch.bfloat16)
    arguments = ["to-hf", "--checkpoint", str(state), "--output"]
    rounded = tmp_path / "rounded"
    assert convert.main([*arguments, str(rounded)]) == 0
    errors = capsys.readouterr().err
    sentence = r"ounded, the model keeps [\d.]+% of what was learned; the adapters have all of it: "
    sentence += "convert by to-hf --adapter, or by --dtype float32"
    assert re.fullmatch(f"{rounded}: r{sentence}\n", errors)
    assert re.search(f"\n\nR{sentence}\\.\n\n", (rounded / "README.md").read_text())
    assert convert.main([*arguments, str(tmp_path / "whole"), "--dtype", "float32"]) == 0
    assert capsys.readouterr().err == ""
    assert "the model keeps" not in (tmp_path / "whole" / "README.md").read_text()


def weights_of_adapters(state: Path, base: Path, output: Path) -> dict[str, Tensor]:
    adapters_to_hf(state, shape_of(base), output, dtype=None, card={})
    return load_file(output / "adapter_model.safetensors")
