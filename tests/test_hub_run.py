"""A run whose model and data are named by ids of a hub, on two ranks.

What it downloads, records and uploads."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.cli import convert, program
from rlmath.config.load import load_config
from rlmath.evals.plan import Plan, check_settings
from rlmath.evals.runner import _plan_after_rendezvous
from tests.hub_server import TOKEN, Hub, hub_server
from tests.programs import TRAIN, run, small_run, start_without_torch, torchrun_command
from tests.selection import matrix


@pytest.fixture(scope="module")
def place(arithmetic: Path) -> Path:
    return arithmetic


@pytest.fixture
def there(place: Path) -> Iterator[Hub]:
    """A hub with the demo's model, a pickle in it, and its prompts."""
    with hub_server() as server:
        files = {path.name: path.read_bytes() for path in (place / "base").iterdir()}
        server.add("org/base").commit({**files, "pytorch_model.bin": b"a pickle"})
        rows = (place / "data" / "train.jsonl").read_bytes()
        server.add("org/rows", "datasets").commit({"train.jsonl": rows})
        yield server


def overrides(place: Path, output: Path, *more: str) -> list[str]:
    ids = ["model.path=hf://org/base", "data.train_path=hf://datasets/org/rows/train.jsonl"]
    return [*small_run(place, output), *ids, "save.ckpt_freq_steps=1", *more]


@pytest.mark.distributed
@matrix
def test_a_run_downloads_once_resumes_with_its_commits_and_uploads(
    place: Path, there: Hub, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    variables = there.variables(tmp_path / "home")
    commits = [
        there.add("org/base").branches["main"],
        there.add("org/rows", "datasets").branches["main"],
    ]
    there.refuses_commits = True
    save_settings = ("save.export_hf=true", "save.push_to_hub=me/trained")
    command = torchrun_command(
        2, *TRAIN, *overrides(place, output, "run.total_steps=1", *save_settings)
    )
    first = run(*command, variables=variables, timeout=1800)
    weights = there.downloads()
    assert (
        weights["model.safetensors"] == 1
        and weights["train.jsonl"] == 1
        and set(weights.values()) == {1}
    )
    assert "pytorch_model.bin" not in weights
    errors = [
        line
        for line in (first.stdout + first.stderr).splitlines()
        if "was not uploaded to me/trained" in line
    ]
    assert len(errors) == 1 and "status 403" in errors[0]
    assert json.loads((output / "exit_status.json").read_text())["status"] == 0
    config_text = (output / "config.yaml").read_text()
    assert f"path: hf://org/base#{commits[0]}\n" in config_text
    assert f"train_path: hf://datasets/org/rows#{commits[1]}/train.jsonl\n" in config_text
    settings = next((output / "checkpoints").glob("step-*/config.yaml"))
    assert load_config([settings], [], saved=True).model.path == f"hf://org/base#{commits[0]}"

    files = there.add("org/base").commits[commits[0]]
    there.add("org/base").commit(
        {**files, "model.safetensors": files["model.safetensors"][:-1] + b"\0"}
    )
    there.add("org/rows", "datasets").commit(
        {"train.jsonl": b'{"question": "1+1?", "answer": "2"}\n'}
    )
    there.refuses_commits = False
    command = torchrun_command(
        2, *TRAIN, *overrides(place, output, "run.total_steps=2", *save_settings)
    )
    second = run(*command, variables=variables, timeout=1800)
    assert there.downloads() == weights
    assert "Resuming from" in second.stdout + second.stderr
    pushed = there.add("me/trained")
    assert pushed.private
    files = pushed.commits[pushed.branches["main"]]
    assert files["model.safetensors"] == (output / "hf_model" / "model.safetensors").read_bytes()
    assert set(read_metadata_files(output / "hf_model")) <= set(files)
    console = first.stdout + first.stderr + second.stdout + second.stderr
    console += "".join(path.read_text() for path in output.glob("*.*") if path.is_file())
    assert TOKEN not in console


def test_a_dry_run_says_what_would_be_downloaded(
    place: Path,
    there: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in there.variables(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    arguments = ["--dry-run", "--config", "configs/demo.yaml", *overrides(place, tmp_path / "run")]
    assert program.main(["grpo", *arguments]) == 0
    plan = capsys.readouterr().out
    size = len(
        there.add("org/base").commits[there.add("org/base").branches["main"]]["model.safetensors"]
    )
    commit = there.add("org/base").branches["main"]
    line = f"Hub: hf://org/base#{commit}: a start downloads {size / 1e9:.3f} GB of weights"
    assert line in plan.splitlines()
    assert "A start needs the whole model, which is not here." in plan
    assert "model.safetensors" not in there.downloads() and there.downloads()["config.json"] == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
@matrix
def test_an_evaluation_goes_on_with_the_commit_that_it_began_with(
    there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in there.variables(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    base = there.add("org/base")
    commit = base.branches["main"]
    plan = Plan(
        model="hf://org/base", benchmarks=("a",), data_dir=tmp_path, output=tmp_path / "out"
    )
    placed, store = _plan_after_rendezvous(plan)
    assert placed.model == f"hf://org/base#{commit}" and store is None
    plan.output.mkdir()
    check_settings(plan.output, {"about_model": placed.model, "model": "x"}, None)
    base.commit({**base.commits[commit], "model.safetensors": b"moved"})
    assert _plan_after_rendezvous(plan)[0].model == placed.model
    (plan.output / "settings.json").unlink()
    assert _plan_after_rendezvous(plan)[0].model == f"hf://org/base#{base.branches['main']}"


PROGRAM = """
import sys
from rlmath.config.load import load_config, shown_values
from rlmath.distributed.rendezvous import open_rendezvous
from rlmath.run.recovery.hub_inputs import SharedMistakeError, fetch_inputs
rendezvous = open_rendezvous(120.0)
try:
    config = fetch_inputs(load_config([], sys.argv[1:]), rendezvous)
except SharedMistakeError as error:
    sys.exit(str(error))
print(config.model.path, shown_values(config)["model.path"])
sys.stdin.read()
"""
"""What a rank does with ids at its start; no engine and no group. It keeps its store until its
input ends."""


def start_rank(
    rank: int, nodes: int, port: int, *, home: Path, there: Hub, **variables: str
) -> subprocess.Popen[str]:
    """The only rank of the node with its number, of so many."""
    ranks = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    ranks |= {"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = (
        f"run.output_dir={home}/run",
        "model.path=hf://org/base",
        "data.train_path=rows.jsonl",
    )
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *settings],
        env=os.environ | there.variables(home) | ranks | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("caches", "offline"),
    [(("first", "own"), {}), (("own",), {"HF_HUB_OFFLINE": "1"})],
    ids=["shared and own", "own, offline"],
)
def test_nodes_have_the_first_one_s_commit_in_the_cache_that_they_see(
    there: Hub, tmp_path: Path, caches: tuple[str, ...], offline: dict[str, str]
) -> None:
    """`caches`: of the second node and the third."""
    base = there.add("org/base")
    commit = base.branches["main"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    homes = [tmp_path / name for name in ("first", *caches)]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(start_rank(0, len(homes), port, home=homes[0], there=there))]
        while there.downloads()["model.safetensors"] < 1 and ranks[0].poll() is None:
            time.sleep(0.05)
        base.commit({**base.commits[commit], "model.safetensors": b"moved"})
        for rank, home in enumerate(homes[1:], start=1):
            process = start_rank(rank, len(homes), port, home=home, there=there, **offline)
            ranks.append(stack.enter_context(process))
        outputs = [
            rank.communicate(timeout=600) for rank in reversed(ranks)
        ]  # the first one has the store
    if offline:
        assert [rank.returncode for rank in ranks] == [1, 1]
        for _, error in outputs:
            assert (
                f"rank 1): hf://org/base#{commit}: the hub cannot be asked (OfflineModeIsEnabled)"
                in error
            )
            assert (
                f'Or run "hf download org/base --revision {commit}" where there is a network'
                in error
            )
        return
    for home, (output, error) in zip(reversed(homes), outputs, strict=True):
        place, written = output.split() or [error, ""]
        assert place == str(home / "hub" / "models--org--base" / "snapshots" / commit), error
        assert written == f"hf://org/base#{commit}"
        assert (Path(place) / "model.safetensors").read_bytes() == base.commits[commit][
            "model.safetensors"
        ]
    assert there.downloads()["model.safetensors"] == len(set(homes))


def test_a_converter_reads_a_model_of_the_hub(
    there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in there.variables(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    assert (
        convert.main(["to-megatron", "--output", f"{tmp_path}/out", "--hf", "hf://org/base"]) == 0
    )
    assert (tmp_path / "out" / "release").is_dir()


@pytest.mark.distributed
def test_a_hub_that_fails_is_no_mistake(
    place: Path,
    there: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The status is 1, with which a job is started again, on all ranks.

    A dry run's and a conversion's is, too."""
    variables = there.variables(tmp_path / "home")
    output = tmp_path / "run"
    there.status = 503
    output.mkdir()
    command = torchrun_command(2, *TRAIN, *overrides(place, output))
    process = run(*command, variables=variables, expect=1)
    text = process.stdout + process.stderr
    assert "hf://org/base: the hub cannot be asked" in text and "status 503" in text
    exit_status = json.loads((output / "exit_status.json").read_text())
    assert exit_status["status"] == 1 and "status 503" in exit_status["message"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert program.main(["grpo", "--dry-run", *overrides(place, tmp_path / "other")]) == 1
    assert "status 503" in capsys.readouterr().err
    assert (
        convert.main(["to-megatron", "--output", f"{tmp_path}/out", "--hf", "hf://org/base"]) == 1
    )
    message = capsys.readouterr().err
    assert "status 503" in message and "could not be written" not in message


def test_a_mistake_of_an_id_ends_before_anything_is_asked(
    place: Path, there: Hub, tmp_path: Path
) -> None:
    variables = there.variables(tmp_path / "home")
    wrong_settings = ("model.path=hf:/org/base", "data.history_path=hf://org/x", "optimizer.lr=-1")
    starts = [
        [*TRAIN, *overrides(place, tmp_path / "run", *settings)]
        for settings in (wrong_settings, ["optimizer.lr=-1"])
    ]
    names, learning_rate = start_without_torch(starts, variables)
    assert "2 problems with the names of the Hugging Face hub" in names
    assert "optimizer.lr is -1" in learning_rate
    assert there.asked == []
    (tmp_path / "run").mkdir()
    variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = (*TRAIN, *overrides(place, tmp_path / "run", "model.path=hf://org/none"))
    console = run(*command, variables=variables, expect=2).stderr
    assert "hf://org/none: the hub refuses it (RepositoryNotFoundError, status 401)" in console
    assert json.loads((tmp_path / "run" / "exit_status.json").read_text())["status"] == 2
