"""tools/explain_sync.py: from a config and config.json alone to a table in words, plain data or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmath.rollout.weight_sync.reshard_plan import SHARED_BUCKET_BYTES
from tests import programs
from tools.explain_sync import GIB, main

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1001,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LAYER = (512 + 2 * 256) * (512 + 1) + 512 * 512 + 3 * 1024 * 512 + 2 * 512
EMBEDDING = 1001 * 512
WHOLE = 6 * LAYER + 2 * EMBEDDING + 512


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that holds nothing but config.json."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return f"model.path={tmp_path}"


def data_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "run.device=cuda", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_rank_copies_everything_and_sends_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = data_of(capsys, model)
    assert (found["element_bytes"], found["rounds"], found["sent"], found["lower_bound"]) == (2, 0, 0, 0)
    assert found["copied"] == found["ranks"][0]["copied"] == 2 * WHOLE
    assert main([model, "run.device=cuda"]) == 0
    assert "Nothing travels: every rank holds what its engine needs." in capsys.readouterr().out


def test_stages_send_each_other_their_layers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of two stages has 2 layers and the embedding, the other 4 layers, the last norm and the head."""
    found = data_of(capsys, model, "parallel.pipeline=2", "parallel.first_stage_layers=2")
    first, last = 2 * LAYER + EMBEDDING, 4 * LAYER + EMBEDDING + 512
    assert [(rank["sent"], rank["received"]) for rank in found["ranks"]] == [
        (2 * first, 2 * last),
        (2 * last, 2 * first),
    ]
    assert [rank["copied"] for rank in found["ranks"]] == [2 * first, 2 * last]
    assert found["reasons"] == {"stages": 2 * WHOLE} and found["lower_bound"] == found["sent"] == 2 * WHOLE
    assert found["stages"] == [[0, 1], [2, 3, 4, 5]]


def test_rows_between_two_paddings_of_the_vocabulary_are_told_as_such(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1001 rows on two ranks: 501 on Megatron's first, 512 on vLLM's."""
    arguments = (model, "parallel.tensor=2", "rollout.tensor_parallel=2")
    found = data_of(capsys, *arguments)
    assert found["reasons"] == {"vocabulary": 2 * 2 * 11 * 512}
    assert main([*arguments, "run.device=cuda"]) == 0
    text = capsys.readouterr().out
    assert "Megatron fills the vocabulary of 1001 up to a multiple of 2, vLLM to one of 64" in text


def test_a_text_says_what_the_layouts_are_and_why_something_travels(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=3", "--ranks", "8"]
    assert main([model, *arguments, "--ranks-per-node", "4", "run.device=cuda"]) == 0
    text = capsys.readouterr().out
    assert "on 8 ranks, TP2 x PP2 x VPP3 x DP2, 8 engines of TP1" in text
    assert "split" in text and "stage 0: 0, 2, 4; stage 1: 1, 3, 5." in text
    assert "Each engine has the whole model, split over 1 rank, in bfloat16." in text
    rows = [
        line.split() for line in text.splitlines() if line.strip()[:1].isdigit() and "because" not in line
    ]
    assert [row[:3] for row in rows[:8]] == [[str(n), str(n // 4), str(n)] for n in range(8)]
    assert "because other pipeline stages train these layers" in text
    assert "because training splits tensors over 2 ranks, engines over 1 rank" in text
    assert "GiB of it between nodes." in text


@pytest.mark.parametrize("ranks_per_node", [None, 4])
def test_rows_and_reasons_add_up(
    model: str, capsys: pytest.CaptureFixture[str], ranks_per_node: int | None
) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "rollout.tensor_parallel=4", "--ranks", "8"]
    extra = [] if ranks_per_node is None else ["--ranks-per-node", str(ranks_per_node)]
    found = data_of(capsys, model, *layout, *extra)
    total = sum(found["reasons"].values())
    for column in ("sent", "received"):
        assert sum(rank[column] for rank in found["ranks"]) == total == found["sent"] == found["lower_bound"]
    assert found["reasons"].keys() == {"stages", "split"}
    # Nodes are stages here: what other stages hold comes from the other node, and nothing else does.
    assert found["between_nodes"] == (found["reasons"]["stages"] if ranks_per_node else 0)


def test_without_ranks_it_is_the_least_that_the_layout_takes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data_of(capsys, model, "parallel.pipeline=3", "rollout.tensor_parallel=2")
    assert len(found["ranks"]) == 6 and found["layout"] == "TP1 x PP3 x DP2, 3 engines of TP2"


def test_on_cpu_weights_travel_in_float32_through_smaller_buckets(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "parallel.tensor=2", "run.device=cpu", "sync.bucket_mib=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["element_bytes"] == 4 and found["device"] == "cpu"
    assert found["bucket"] == SHARED_BUCKET_BYTES >= found["largest_bucket"]


def test_a_named_gpu_has_its_own_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "parallel.tensor=2", "run.device=cpu", "memory.gpu=H100-80GB"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["element_bytes"], found["bucket"]) == ("cuda", 2, 64 * 2**20)
    assert main(arguments) == 0
    assert "GiB travel in 1 round of at most" in capsys.readouterr().out


def test_smaller_buckets_make_more_rounds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [
        data_of(capsys, model, "parallel.tensor=2", f"sync.bucket_mib={size}")["rounds"] for size in (64, 1)
    ]
    assert rounds[0] == 1 < rounds[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["parallel.tensor=3"], "parallel.tensor is 3; it must divide the model's 8 attention heads"),
        (["parallel.pipeline=4"], "parallel.pipeline is 4; it must divide the model's 6 layers"),
        (["parallel.tensor=2", "--ranks", "3"], "does not divide the 3 ranks of this run"),
        (["rollout.tensor_parallel=2", "--ranks", "3"], "rollout.tensor_parallel is 2"),
        (["--ranks", "0"], "--ranks is 0; needed: at least 1"),
        (["--ranks-per-node", "0"], "--ranks-per-node is 0; needed: at least 1"),
        (["run.device=tpu"], "run.device"),
        (["parallel.tesnor=2"], 'did you mean "parallel.tensor"'),
    ],
)
def test_settings_without_a_plan_are_refused_as_the_trainer_refuses_them(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main([model, *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""


def test_it_runs_as_a_program_with_a_config_file(model: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("parallel:\n  pipeline: 2\nrun:\n  device: cuda\n", encoding="utf-8")
    done = programs.run("tools/explain_sync.py", "--config", str(config), model)
    assert f"{2 * WHOLE / GIB:.3f} GiB travel in" in done.stdout


def test_to_engines_on_ranks_of_their_own_everything_travels_once_to_every_rank(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two engines of two ranks, and two stages that train: the plan of the first engine."""
    own = ("parallel.pipeline=2", "rollout.ranks=4", "rollout.tensor_parallel=2")
    found = data_of(capsys, model, *own)
    assert found["layout"] == "TP1 x PP2 x DP1, 2 engines of TP2 on ranks of their own"
    ranks = found["ranks"]
    assert [(rank["stage"], rank["engine"], rank["engine_part"]) for rank in ranks] == [
        (0, None, None),
        (1, None, None),
        (None, 0, 0),
        (None, 0, 1),
    ]
    # norms go to both ranks of the engine: 6 x 2 of layers and the last
    twice = 13 * 512
    assert found["copied"] == 0 and found["sent"] == found["lower_bound"] == 2 * (WHOLE + twice)
    assert [rank["received"] for rank in ranks][:2] == [rank["sent"] for rank in ranks][2:] == [0, 0]
    assert found["reasons"] == {"own": found["sent"]}
    assert main([model, *own, "run.device=cuda"]) == 0
    text = capsys.readouterr().out
    assert "on 6 ranks, TP1 x PP2" in text and "because engines have ranks of their own" in text
    assert "For the first of 2 engines; each of the others gets the same." in text
