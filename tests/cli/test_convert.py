"""The converters as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from rlmath.checkpoint.directory import Progress, finish_partial, open_partial, write_progress
from rlmath.checkpoint.hf.weights import HFReader
from rlmath.cli import convert
from rlmath.config.load import config_as_yaml, load_config
from tests.programs import run
from tests.tiny_models import make_model_folder

LINE = r"Wrote .*out: 51 tensors in float32, 0\.00\d GB, in \d+\.\d s; peak memory 0\.\d+ GB\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "source")


def to_megatron(source: Path, output: Path, *more: str) -> int:
    return convert.main(["to-megatron", "--hf", str(source), "--output", str(output), *more])


def to_hf(checkpoint: Path, output: Path, *more: str) -> int:
    return convert.main(["to-hf", "--checkpoint", str(checkpoint), "--output", str(output), *more])


PROGRAMS = """
import runpy, sys
for words in sys.argv[1:3]:
    sys.argv = ["convert", *words.split("|")]
    try:
        runpy.run_module("rlmath.cli.convert", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0
print([name for name in ("megatron", "transformers", "vllm") if name in sys.modules])
"""


def test_both_programs_say_what_they_did_and_import_neither_megatron_nor_transformers(
    source: Path, tmp_path: Path
):
    megatron = tmp_path / "megatron" / "out"
    back = tmp_path / "hf" / "out"
    megatron_words = (
        f"to-megatron|--hf|{source}|--output|{megatron}|--tensor-parallel|2|--pipeline-parallel|2"
    )
    process = run("-c", PROGRAMS, megatron_words, f"to-hf|--checkpoint|{megatron}|--output|{back}")
    assert re.fullmatch(rf"{LINE}{LINE}\[\]\n", process.stdout) and process.stderr == ""
    before = HFReader(source)
    after = HFReader(back)
    assert before.files.keys() == after.files.keys() and len(before.files.keys()) == 51
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files)


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_checkpoint_without_metadata_files_needs_its_config(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
):
    assert to_megatron(source, tmp_path / "megatron") == 0
    shutil.rmtree(tmp_path / "megatron" / "hf")
    assert to_hf(tmp_path / "megatron", tmp_path / "out") == convert.MISTAKE
    assert "name the folder of the Hugging Face model by --config" in capsys.readouterr().err
    config = source if given == "folder" else source / "config.json"
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--config", str(config)) == 0
    assert HFReader(tmp_path / "out").files.keys() == HFReader(source).files.keys()
    assert (tmp_path / "out" / "tokenizer.json").exists() == (given == "folder")


def test_a_given_config_counts_before_that_beside_the_checkpoint(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert to_megatron(source, tmp_path / "megatron") == 0
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": None})
    )
    status = to_hf(
        tmp_path / "megatron", tmp_path / "out", "--config", str(tmp_path / "config.json")
    )
    assert status == convert.MISTAKE
    assert "config.json makes it (3, 256, 128)" in capsys.readouterr().err
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--base", str(source)) == convert.MISTAKE
    assert "has no adapters (LoRA) to merge into" in capsys.readouterr().err


def test_formats_and_sizes_are_those_asked_for(source: Path, tmp_path: Path):
    assert to_megatron(source, tmp_path / "megatron", "--dtype", "bfloat16") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "a", "--shard-gib", "0.0005") == 0
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    assert to_hf(tmp_path / "megatron", tmp_path / "b", "--dtype", "float32") == 0
    formats = [HFReader(tmp_path / name).tensor("model.norm.weight").dtype for name in "ab"]
    assert formats == [torch.bfloat16, torch.float32]


def run_with_checkpoint(source: Path, tmp_path: Path, settings: str | None = None) -> Path:
    """The folder of a run from `source` with a checkpoint after step 3.

    `settings` replaces the text of its config.yaml."""
    assert to_megatron(source, tmp_path / "megatron") == 0
    run_folder = tmp_path / "run"
    partial = open_partial(run_folder / "checkpoints", 3)
    shutil.copytree(tmp_path / "megatron" / "release", partial / "state", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "megatron" / "hf", partial / "hf", dirs_exist_ok=True)
    formats = {"": "bfloat16", "model.norm.weight": "float32"}
    progress = Progress(
        3, 0, 24, 6, 3, "TP1", 1, (), (), "model", "data", {}, model_formats=formats
    )
    write_progress(partial, progress)
    if settings is None:
        overrides = (
            f"run.output_dir={run_folder}",
            f"model.path={source}",
            "data.train_path=t.jsonl",
        )
        settings = config_as_yaml(load_config([], overrides))
    (partial / "config.yaml").write_text(settings)
    finish_partial(partial, 3, kept=False, known={})
    return run_folder


def test_a_checkpoint_of_a_run_gets_the_formats_of_the_model_that_it_began_with_and_a_card(
    source: Path, tmp_path: Path
):
    run_folder = run_with_checkpoint(source, tmp_path)
    assert to_hf(run_folder, tmp_path / "out") == 0
    reader = HFReader(tmp_path / "out")
    source_reader = HFReader(source)
    assert {name: reader.tensor(name).dtype for name in reader.files} == {
        name: torch.float32 if name == "model.norm.weight" else torch.bfloat16
        for name in source_reader.files
    }
    name = "model.embed_tokens.weight"
    assert torch.equal(reader.tensor(name), source_reader.tensor(name).to(torch.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert ": 3 steps.\n" in (tmp_path / "out" / "README.md").read_text()
    assert to_hf(run_folder, tmp_path / "as trained", "--dtype", "float32") == 0
    assert torch.equal(HFReader(tmp_path / "as trained").tensor(name), source_reader.tensor(name))


def test_settings_that_cannot_be_read_cost_the_card_and_not_the_model(source: Path, tmp_path: Path):
    run_folder = run_with_checkpoint(source, tmp_path, settings="run: {of_another_release: 1}\n")
    assert to_hf(run_folder, tmp_path / "out") == 0
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_mistake_ends_with_2_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    assert to_megatron(copy, tmp_path / "out") == convert.MISTAKE
    assert "has shape (192, 128), config.json makes it (100, 128)" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_size_that_cannot_be_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert to_megatron(source, tmp_path / "out", "--tensor-parallel", "0") == convert.MISTAKE
    assert "needed: at least 1" in capsys.readouterr().err


def test_what_is_no_folder_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert to_megatron(tmp_path / "nothing", tmp_path / "out") == convert.MISTAKE
    assert "--hf: there is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert to_megatron(tmp_path / "empty", tmp_path / "out") == convert.MISTAKE
    assert "has no config.json. --hf needs" in capsys.readouterr().err
    assert to_hf(tmp_path / "nothing", tmp_path / "out") == convert.MISTAKE
    assert "there is no folder" in capsys.readouterr().err
    assert to_hf(tmp_path / "empty", tmp_path / "out") == convert.MISTAKE
    assert "is no checkpoint; needed: " in capsys.readouterr().err
    assert to_hf(source, tmp_path / "out", "--shard-gib", "nan") == convert.MISTAKE
    assert "--shard-gib" in capsys.readouterr().err


def peak_gb(line: str) -> float:
    return float(re.search(r"peak memory (\S+) GB", line)[1])


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(source: Path, tmp_path: Path):
    # 0.46 GB, of which the largest tensor has 0.025 GB
    sizes = {
        "hidden_size": 384,
        "intermediate_size": 2560,
        "num_hidden_layers": 30,
        "vocab_size": 16_000,
    }
    make_model_folder(tmp_path / "model", **sizes)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0.4e9
    peaks = {}
    for name, model in (("small", source), ("large", tmp_path / "model")):
        state = str(tmp_path / f"{name}-megatron")
        back = str(tmp_path / f"{name}-hf")
        to_megatron_process = run(
            "-m", "rlmath.cli.convert", "to-megatron", "--hf", str(model), "--output", state
        )
        to_hf_process = run(
            "-m", "rlmath.cli.convert", "to-hf", "--checkpoint", state, "--output", back
        )
        peaks[name] = [peak_gb(to_megatron_process.stdout), peak_gb(to_hf_process.stdout)]
    assert max(large - small for small, large in zip(*peaks.values(), strict=True)) < 0.1
