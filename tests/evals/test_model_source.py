from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.convert.convert import adapters_to_hf, megatron_to_hf
from rlmath.checkpoint.directory import finish_partial, partial_of
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.cli.api import Run
from rlmath.evals.benchmarks import check_head_dim, find_benchmark, model_positions
from rlmath.evals.command import input_problems, parse, plan_of
from rlmath.evals.model_source import resolve_model
from tests.checkpoint.conversions import assert_same, lora_checkpoint, to_megatron, weights
from tests.tiny_models import make_model_folder, shape_of


@pytest.fixture(scope="module")
def checkpoint(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch_dist checkpoint of the model, with its config and tokenizer beside."""
    return to_megatron(untied_model, tmp_path_factory.mktemp("megatron") / "model").parent


def test_a_hugging_face_folder_is_used_as_it_is(untied_model: Path, tmp_path: Path) -> None:
    model = resolve_model(untied_model, tmp_path)
    assert model.folder == untied_model and list(tmp_path.iterdir()) == []
    model_copy = shutil.copytree(untied_model, tmp_path / "copy")
    assert resolve_model(model_copy, tmp_path).fingerprint == model.fingerprint
    (model_copy / "tokenizer.json").write_text((model_copy / "tokenizer.json").read_text() + " ")
    assert resolve_model(model_copy, tmp_path).fingerprint != model.fingerprint
    assert model_positions(model_copy) == 256


def test_a_checkpoint_is_converted_once(
    untied_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    model = resolve_model(checkpoint, tmp_path)
    assert model.folder == tmp_path / "converted_model"
    assert_same(weights(model.folder), weights(untied_model))
    written_at = (model.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(checkpoint, tmp_path) == model
    assert (model.folder / "model.safetensors").stat().st_mtime_ns == written_at
    other = make_model_folder(tmp_path / "other", seed=6)
    with pytest.raises(ValueError, match="Give another --output"):
        resolve_model(to_megatron(other, tmp_path / "other_megatron").parent, tmp_path)


def test_a_checkpoint_whose_file_has_another_size_is_another(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The checkpoint has no checksums, and the file has the time that it had."""
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    resolve_model(changed, tmp_path)
    (index,) = changed.rglob(".metadata")
    times = index.stat().st_atime_ns, index.stat().st_mtime_ns
    index.write_bytes(index.read_bytes() + b" ")
    os.utime(index, ns=times)
    with pytest.raises(ValueError, match="Give another --output"):
        resolve_model(changed, tmp_path)


def test_a_conversion_that_was_killed_is_made_again(checkpoint: Path, tmp_path: Path) -> None:
    model = resolve_model(checkpoint, tmp_path)
    (tmp_path / "converted_from.json").unlink()
    (model.folder / "model.safetensors").write_bytes(b"half")
    assert resolve_model(checkpoint, tmp_path) == model
    assert torch.isfinite(weights(model.folder)["model.norm.weight"]).all()


def test_a_runs_folder_stands_for_its_newest_model(
    untied_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """A run that is done has a summary.

    Without one, its checkpoints are newer than a model that it exported."""
    run = tmp_path / "run"
    shutil.copytree(untied_model, run / "hf_model")
    assert resolve_model(run, tmp_path / "out").folder == run / "hf_model"
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint"):
        resolve_model(run, tmp_path / "out")
    (run / "summary.json").write_text("{}")
    assert resolve_model(run, tmp_path / "out").folder == run / "hf_model"


def test_what_is_no_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model: there is no folder"):
        resolve_model(tmp_path / "nothing", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint"):
        resolve_model(tmp_path / "empty", tmp_path)


@pytest.fixture(scope="module")
def lora_state(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch_dist folder of a LoRA run's checkpoint."""
    return lora_checkpoint(untied_model, tmp_path_factory.mktemp("lora") / "step-000001")


@pytest.fixture
def lora_run(lora_state: Path, untied_model: Path, tmp_path: Path) -> Path:
    """The folder of a finished run with its own copy of the model that it began with.

    Its export has the adapters merged, and a chat template of the run's."""
    base = shutil.copytree(untied_model, tmp_path / "base")
    run = tmp_path / "run"
    shutil.copytree(lora_state.parent, run / "checkpoints" / "step-000001")
    for folder in (run / "checkpoints" / "step-000001" / "hf", base):
        (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    shape = shape_of(base)
    metadata_files = read_metadata_files(base) | {"chat_template.jinja": b"{{ messages }}"}
    megatron_to_hf(lora_state, shape, metadata_files, output=run / "hf_model", dtype=None)
    adapter = run / "hf_model" / "adapter"
    adapters_to_hf(lora_state, shape, adapter, dtype=None, card={})
    change_config(adapter, base_model_name_or_path=str(base))
    (run / "summary.json").write_text("{}")
    return run


def change_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def record(output: Path, fingerprint: str) -> None:
    """What an earlier evaluation of a model leaves in its folder."""
    output.mkdir()
    (output / "settings.json").write_text(json.dumps({"common": {"model": fingerprint}}))


def test_a_lora_run_is_evaluated_with_its_adapters_as_they_are(
    lora_run: Path, tmp_path: Path
) -> None:
    export = lora_run / "hf_model"
    model = resolve_model(lora_run, tmp_path / "out")
    assert (model.folder, model.adapter) == (tmp_path / "base", export / "adapter")
    assert model.tokenizer == model.stop_tokens == export  # with the run's chat template
    merged = resolve_model(export, tmp_path / "out")
    assert (merged.folder, merged.adapter, merged.tokenizer) == (export, None, export)
    assert len({model.fingerprint, merged.fingerprint}) == 2
    alone = resolve_model(export / "adapter", tmp_path / "out")
    assert alone == model


def test_the_fingerprint_is_of_base_adapters_and_metadata_in_any_place(
    lora_run: Path, tmp_path: Path
) -> None:
    first = resolve_model(lora_run, tmp_path / "out").fingerprint
    moved = shutil.move(tmp_path / "base", tmp_path / "moved")
    adapter = lora_run / "hf_model" / "adapter"
    change_config(adapter, base_model_name_or_path=str(moved))
    assert resolve_model(lora_run, tmp_path / "out").fingerprint == first
    changed = set()
    for file, change in (
        (adapter / "adapter_config.json", lambda: change_config(adapter, lora_alpha=7)),
        (adapter / "adapter_model.safetensors", lambda: spoil(adapter)),
        (moved / "model.safetensors", lambda: spoil(moved)),
        (lora_run / "hf_model" / "chat_template.jinja", lambda: None),
    ):
        content = file.read_bytes()
        if file.suffix == ".jinja":
            file.write_text("{{ messages[0] }}")
        change()
        changed.add(resolve_model(lora_run, tmp_path / "out").fingerprint)
        file.write_bytes(content)
    assert len(changed | {first}) == 5


def spoil(folder: Path) -> None:
    """Change the last number of the folder's weights."""
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x3d")


def test_a_lora_checkpoint_gives_its_adapters(
    lora_state: Path, untied_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    model = resolve_model(lora_state, output)
    assert (model.folder, model.adapter) == (untied_model, output / "converted_model")
    assert model.tokenizer == lora_state.parent / "hf" and model.stop_tokens == model.tokenizer
    assert not (model.adapter / "config.json").exists()
    assert resolve_model(lora_state, output) == model


def test_an_evaluation_of_a_merged_model_goes_on_with_it(
    lora_run: Path, lora_state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merged = resolve_model(lora_run / "hf_model", tmp_path / "none")
    for number, fingerprint in enumerate((merged.fingerprint, merged.older_fingerprint)):
        record(tmp_path / f"begun{number}", fingerprint)
        model = resolve_model(lora_run, tmp_path / f"begun{number}")
        assert model == merged and model.named_as(fingerprint) == fingerprint
        assert f"goes on with the model in {lora_run}/hf_model" in caplog.text
    record(tmp_path / "other", "0123456789abcdef")
    assert resolve_model(lora_run, tmp_path / "other").adapter is not None
    # An earlier release converted a checkpoint to a merged model.
    output = tmp_path / "converted"
    adapter = resolve_model(lora_state, output).adapter
    shutil.rmtree(adapter)
    shutil.copytree(lora_run / "hf_model", adapter)
    model = resolve_model(lora_state, output)
    assert (model.folder, model.adapter) == (adapter, None)


def test_without_the_model_that_a_run_began_with_the_merged_one_is_evaluated(
    lora_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tmp_path / "base")
    export = lora_run / "hf_model"
    model = resolve_model(lora_run, tmp_path / "out")
    assert (model.folder, model.adapter) == (export, None)
    assert "with its adapters merged" in caplog.text and f"{tmp_path}/base" in caplog.text
    for file in export.glob("*.*"):
        file.unlink()
    for folder in (lora_run, export, export / "adapter"):
        with pytest.raises(ValueError, match=r"without their model.*base_model_name_or_path"):
            resolve_model(folder, tmp_path / "out")


def complete(run: Path) -> Path:
    """Give the run's checkpoint a manifest, with which it is complete."""
    root = run / "checkpoints"
    partial = (root / "step-000001").rename(partial_of(root, 1))
    return finish_partial(partial, 1, kept=False, known={}).folder


def test_adapters_are_not_put_on_another_model_than_the_run_began_with(
    lora_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    complete(lora_run)
    assert resolve_model(lora_run, tmp_path / "out").folder == tmp_path / "base"
    spoil(tmp_path / "base")
    export = lora_run / "hf_model"
    model = resolve_model(lora_run, tmp_path / "out")
    assert (model.folder, model.adapter) == (export, None)
    assert "with its adapters merged" in caplog.text
    assert f'for another model than that in "{tmp_path}/base"' in caplog.text
    for file in export.glob("*.*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"for another model than .*base_model_name_or_path"):
        resolve_model(lora_run, tmp_path / "out")


def test_the_model_that_a_run_had_from_the_hub_is_taken_from_the_cache_alone(
    lora_run: Path,
    untied_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    commit = "0123456789" * 4
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    checkpoint = lora_run / "checkpoints" / "step-000001"
    settings = (checkpoint / "config.yaml").read_text()
    settings = settings.replace(str(untied_model), f"hf://org/name#{commit}")
    for folder in (lora_run, checkpoint):
        (folder / "config.yaml").write_text(settings)
    adapter = lora_run / "hf_model" / "adapter"
    change_config(adapter, base_model_name_or_path="org/name")
    assert resolve_model(lora_run, tmp_path / "out").folder == lora_run / "hf_model"
    with pytest.raises(ValueError, match=f"for a model that is not in .*/snapshots/{commit}"):
        resolve_model(checkpoint / "state", tmp_path / "none")
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    shutil.copytree(tmp_path / "base", snapshot)
    model = resolve_model(lora_run, tmp_path / "out")
    assert (model.folder, model.adapter) == (snapshot, adapter)
    assert resolve_model(checkpoint / "state", tmp_path / "later").folder == snapshot
    assert "Asking the Hugging Face hub" not in caplog.text


def test_adapters_without_a_tokenizer_take_that_of_their_run_else_of_the_base_with_a_warning(
    lora_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = complete(lora_run)
    export = lora_run / "hf_model"
    for file in export.glob("*.*"):
        file.unlink()
    model = resolve_model(lora_run, tmp_path / "out")
    assert model.tokenizer == model.stop_tokens == checkpoint / "hf"
    assert "chat template" not in caplog.text
    assert resolve_model(export, tmp_path / "out").tokenizer == tmp_path / "base"
    assert f"prompts follow the chat template of {tmp_path}/base" in caplog.text


def test_lengths_that_the_model_of_adapters_cannot_have_are_refused_before_it_is_loaded(
    lora_run: Path, tmp_path: Path
) -> None:
    adapter = shutil.copytree(lora_run / "hf_model" / "adapter", tmp_path / "theirs")
    paths = f"--benchmarks none --data-dir docs --output {tmp_path}/out".split()
    arguments = parse(["--model", str(adapter), "--max-new-tokens", "256", *paths])
    problems = input_problems(plan_of(arguments))
    assert any("--max-new-tokens is 256; the model has 256 positions" in text for text in problems)


def test_adapters_of_another_tool_may_be_of_some_matrices(lora_run: Path, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(lora_run / "hf_model" / "adapter", tmp_path / "theirs"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if ".1.self_attn.q_proj." in name}
    save_file(some, adapter / "adapter_model.safetensors")
    change_config(adapter, target_modules=["q_proj"], layers_to_transform=[1])
    assert len(some) == 2
    model = resolve_model(adapter, tmp_path / "out")
    assert (model.adapter, model.tokenizer) == (adapter, model.folder)
    (adapter / "tokenizer_config.json").write_text("{}")
    model = resolve_model(adapter, tmp_path / "out")
    assert (model.tokenizer, model.stop_tokens) == (adapter, model.folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"r": 513}, '"r" is 513; needed: "LORA" and a rank from 1 to 512'),
        ({"r": 8}, "56 of 56 tensors are no A and B of rank 8"),
        ({"peft_type": "IA3"}, "\"peft_type\" is 'IA3'"),
        ({"lora_alpha": None}, '"lora_alpha" is None; needed: a finite number'),
        ({"lora_alpha": 10**400}, "; needed: a finite number"),
        ({"target_modules": None}, '"target_modules" in adapter_config.json is missing'),
        ({"target_modules": []}, '"target_modules" in adapter_config.json is missing'),
        ({"use_dora": True}, '"use_dora" is true, which is not supported'),
        ({"init_lora_weights": "pissa"}, "changes the weights of the model, too"),
    ],
)
def test_adapters_that_an_engine_cannot_take_are_refused_before_it_is_built(
    lora_run: Path, tmp_path: Path, values: dict[str, object], text: str
) -> None:
    adapter = lora_run / "hf_model" / "adapter"
    change_config(adapter, **values)
    with pytest.raises(ValueError, match=re.escape(text)):
        resolve_model(lora_run, tmp_path / "out")
    paths = "--benchmarks none --data-dir docs --output".split()
    arguments = parse(["--model", str(adapter), *paths, str(tmp_path / "out")])
    assert any(text in problem for problem in input_problems(plan_of(arguments)))


def test_half_of_an_adapter_is_refused(lora_run: Path, tmp_path: Path) -> None:
    file = lora_run / "hf_model" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"1 of 55 tensors .*: .*\.0\.mlp\.up_proj\.lora_A"):
        resolve_model(lora_run, tmp_path / "out")


def test_adapters_without_their_model_are_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "hf_model" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name"}')
    for folder in (adapter, adapter.parent):
        with pytest.raises(
            ValueError,
            match=r"without their model: .*org/name.* edit that field to name a local folder of",
        ):
            resolve_model(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=r"only its adapters \(save.merged=false\)"):
        _ = Run(tmp_path).model


def test_a_model_that_cannot_be_loaded_is_refused(untied_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(untied_model, tmp_path / "copy"))
    os.truncate(copy / "model.safetensors", 5000)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        resolve_model(copy, tmp_path / "out")


def test_benchmarks_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text("{}")
    (tmp_path / "math_500").mkdir()
    assert find_benchmark("aime24", tmp_path) == tmp_path / "aime24.jsonl"
    assert find_benchmark("math_500", tmp_path) == tmp_path / "math_500"
    with pytest.raises(ValueError, match="Did you mean") as error:
        find_benchmark("aime_24", tmp_path)
    assert "aime24, math_500" in str(error.value)
    for name in ("../aime24", "", "a/b", ".", "x" * 200):
        with pytest.raises(ValueError, match="no name of a benchmark"):
            find_benchmark(name, tmp_path)
    with pytest.raises(ValueError, match="--data-dir"):
        find_benchmark("aime24", tmp_path / "nowhere")


def test_heads_that_config_does_not_say_are_not_judged(tmp_path: Path) -> None:
    for values in (
        {},
        {"hidden_size": 64},
        {"hidden_size": 64, "num_attention_heads": 0},
        {"head_dim": 64},
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        check_head_dim(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    with pytest.raises(ValueError, match="--model: the model's head dim is 16"):
        check_head_dim(tmp_path)


def test_positions_that_config_does_not_say_are_unknown(tmp_path: Path) -> None:
    for value in (None, "512", True, -1):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
        assert model_positions(tmp_path) is None


def test_a_name_of_the_hub_is_told_how_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"--local-dir models/Qwen3-0\.6B.*and give --model models/Qwen3-0\.6B"
    ):
        resolve_model(Path("Qwen/Qwen3-0.6B"), tmp_path / "out")
