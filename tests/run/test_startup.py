"""Nodes are compared by what they say; a difference is told with its hosts."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.config.hub import HubFailedError
from rlmath.config.load import config_as_yaml, load_config
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs
from rlmath.distributed import process
from rlmath.distributed.device_kind import CUDA_DEFAULTS
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MISTAKE, read_exit_status
from rlmath.distributed.fault_tolerance.failure import PeerFailedError
from rlmath.distributed.ranks import RankReport
from rlmath.distributed.rendezvous import Route, prefer_for_gloo, route_to
from rlmath.run import command_line
from rlmath.run.command_line import record_exit
from rlmath.run.join import refuse_shared_gpus
from rlmath.run.nodes import _compare_nodes, data_makers, differences, labelled, node_lines
from rlmath.run.prepare import read_inputs, try_data
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.hub_inputs import fetch_inputs, recorded_ids
from rlmath.run.run_dir import sole_user
from rlmath.run.startup import StartingRank, end_broken, prepare_grpo, prepare_sft
from tests.hub_server import hub_server
from tests.programs import start_without_torch
from tests.run.test_resume_choice import checkpoint
from tests.tiny_models import shape_of

GIVEN = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def write_sums(folder: Path) -> Path:
    """A file of eight problems."""
    file = folder / "sums.jsonl"
    file.write_text("\n".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}' for n in range(8)))
    return file


def said(facts: dict[str, str], nodes: int = 3, ranks_per_node: int = 2, **changes: dict[str, str]):
    """What the ranks of some nodes say; `changes` are facts of single hosts."""
    reports = {}
    for rank in range(nodes * ranks_per_node):
        node, local_rank = divmod(rank, ranks_per_node)
        node_facts = facts | changes.get(f"host{node}", {}) if local_rank == 0 else {}
        reports[rank] = RankReport(
            f"host{node}", node, facts=node_facts, address=f"10.0.0.{node} (eth{node})"
        )
    return reports


def test_equal_nodes_are_in_order_and_are_told_with_ranks_and_addresses() -> None:
    reports = said({"torch": "2.13.0"})
    assert _compare_nodes(reports).error is None
    assert node_lines(reports) == [
        "3 nodes, 6 ranks:",
        "  host0: ranks 0-1, 10.0.0.0 (eth0)",
        "  host1: ranks 2-3, 10.0.0.1 (eth1)",
        "  host2: ranks 4-5, 10.0.0.2 (eth2)",
    ]
    assert len(node_lines(said({}, nodes=64, ranks_per_node=8))) == 18
    assert node_lines(said({}, nodes=1)) == []


def test_every_difference_is_told_with_its_hosts_in_one_error() -> None:
    facts = {"torch": "2.13.0", "rlmath's code (hash)": "aa", "run.seed": "1"}
    reports = said(
        facts, host1={"torch": "2.12.0"}, host2={"rlmath's code (hash)": "bb", "run.seed": "2"}
    )
    decision = _compare_nodes(reports)
    assert decision.is_mistake
    assert (decision.error or "").splitlines() == [
        "The nodes differ, and must be alike in:",
        "  torch: 2.12.0 on host1; 2.13.0 on host0, host2",
        "  rlmath's code (hash): bb on host2; aa on host0, host1",
        "  run.seed: 2 on host2; 1 on host0, host1",
    ]


def test_what_only_some_nodes_have_is_a_difference() -> None:
    facts = {"a": {"torch": "2", "run.seed": "3"}, "b": {"torch": "2", "transformer-engine": "2.9"}}
    assert list(differences(facts)) == [
        "run.seed: 3 on a; its default on b",
        "transformer-engine: not there on a; 2.9 on b",
    ]


def test_nodes_with_one_name_are_told_apart_by_their_numbers() -> None:
    reports = {0: RankReport("same", 0), 1: RankReport("same", 1), 2: RankReport("other", 2)}
    assert list(labelled(reports)) == ["same (node 0)", "same (node 1)", "other"]


def test_ranks_that_read_other_prompts_than_rank_0_are_told() -> None:
    """This holds on one node, too.

    A function of the user's or a template may give its ranks different prompts."""
    reports = {
        rank: RankReport("host0", 0, facts={"torch": "2"} if rank == 0 else {}) for rank in range(4)
    }
    assert _compare_nodes(reports).error is None
    reports_of_data = {
        rank: replace(report, data="b" if rank in (1, 3) else "a")
        for rank, report in reports.items()
    }
    decision = _compare_nodes(reports_of_data)
    assert decision.is_mistake and "ranks 1, 3 read other prompts than rank 0" in (
        decision.error or ""
    )
    makers = data_makers(
        load_config([], ["data.template=chat", "data.chat_template=own.jinja", *GIVEN])
    )
    named_reports = {
        rank: replace(report, data_makers=makers) for rank, report in reports_of_data.items()
    }
    assert "clocks: data.chat_template=own.jinja" in (_compare_nodes(named_reports).error or "")
    assert (
        _compare_nodes({rank: replace(report, data="a") for rank, report in reports.items()}).error
        is None
    )


def test_a_first_node_whose_name_means_itself_is_told_unless_all_nodes_are_one_machine() -> None:
    reports = said({"torch": "2"})
    reports[0] = RankReport("host0", 0, facts={"torch": "2"}, address="127.0.1.1 (lo)")
    error = _compare_nodes(reports).error or ""
    assert "127.0.1.1 (lo) on host0" in error and "GLOO_SOCKET_IFNAME" in error
    chosen = RankReport("host0", 0, facts={"torch": "2"}, address="127.0.1.1 (lo), gloo over eth0")
    assert _compare_nodes(reports | {0: chosen}).error is None
    everywhere = {
        rank: RankReport(report.host, report.node, facts=report.facts, address="127.0.0.1 (lo)")
        for rank, report in reports.items()
    }
    assert _compare_nodes(everywhere).error is None


def test_gloo_listens_where_others_come_in_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set, so that it is taken back")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    prefer_for_gloo(Route("127.0.0.1", "lo"))
    prefer_for_gloo(None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    prefer_for_gloo(Route("10.0.0.7", "ens5"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ens5"
    prefer_for_gloo(Route("10.0.0.7", "eth0"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ens5"


def test_the_way_to_a_host_is_found_without_sending_anything() -> None:
    route = route_to("127.0.0.1")
    assert route is not None and route.is_loopback and str(route) == "127.0.0.1 (lo)"
    assert route_to("no-such-host.invalid") is None


def test_the_hash_of_the_code_changes_with_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "somecode"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "PACKAGES", ("somecode",))
    hashes = [process.code_hash()]
    for content in ("x = 1\n", "x = 2\n"):
        (package / "sub" / "a.py").write_text(content)
        hashes.append(process.code_hash())
    (package / "sub" / "a.py").rename(package / "sub" / "b.py")
    hashes.append(process.code_hash())
    assert len(set(hashes)) == 4


def test_the_environment_that_is_set_on_gpus_is_documented() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "clusters.md").read_text()
    for name, value in CUDA_DEFAULTS.items():
        assert f"- `{name}={value}`: " in page


def test_the_exit_status_keeps_the_list_of_mistakes(tmp_path: Path) -> None:
    """Bounded, and without what moves a terminal's cursor; of another failure the first line."""
    record_exit(tmp_path, MISTAKE, "2 problems with this run:\n  - a\x1b[2J\n  - b")
    assert read_exit_status(tmp_path).message == "2 problems with this run:\n  - a\\x1b[2J\n  - b"
    record_exit(tmp_path, MISTAKE, "x" * 5000)
    assert read_exit_status(tmp_path).message == "x" * 2000 + " [...]"
    record_exit(tmp_path, MISTAKE, "x" * 2000)
    assert read_exit_status(tmp_path).message == "x" * 2000
    record_exit(tmp_path, FAILURE, "lost\nits stack")
    assert read_exit_status(tmp_path).message == "lost"


def test_a_start_without_torchrun_is_refused(tied_model: Path, tmp_path: Path) -> None:
    """It is refused before torch is imported, and anything started or written.

    Only the exit status of a folder that is there is written. The refusal comes after other
    mistakes, of which it may be the cause."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    inputs = (f"model.path={tied_model}", f"data.train_path={rows}")
    (tmp_path / "2").mkdir()
    starts = [
        [
            f"launch/{program}.py",
            "--config",
            f"configs/{config}.yaml",
            *inputs,
            f"parallel.tensor={size}",
        ]
        for program, config in (("train_grpo", "demo"), ("train_sft", "demo_sft"))
        for size in (1, 2)
    ]
    starts = [
        [*arguments, f"run.output_dir={tmp_path / str(place)}"]
        for place, arguments in enumerate(starts)
    ]
    starts.append(["launch/train_grpo.py", "--config", "nothing.yaml"])
    starts.append(["rlmath/trainer/__main__.py", "replay", "nowhere"])
    messages = start_without_torch(starts)
    assert ["does not divide the 1 rank" in message for message in messages] == 2 * [
        False,
        True,
    ] + 2 * [False]
    assert "nothing.yaml" in messages[4] and '"nowhere" has no capture' in messages[5]
    for (program, *_), message in zip(starts, messages, strict=True):
        assert (
            message.count("started without torchrun: RANK, WORLD_SIZE") == 1
            and f"N {program}" in message
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "rows.jsonl"]
    assert "started without torchrun" in read_exit_status(tmp_path / "2").message


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (["--help"], 0, ["Train with GRPO.", "--config FILE", "algorithm   Advantages"]),
        (["--help", "algorithm"], 0, ["algorithm.clip_ratio"]),
        (["--seed", "3"], 2, ["unrecognized arguments: --seed"]),
        (["--ranks", "8"], 2, ["--ranks is for rlmath train and --dry-run"]),
        (["--oversubscribe"], 2, ["--oversubscribe is for rlmath train and --dry-run"]),
    ],
)
def test_only_rank_0_prints_help_and_a_mistake_of_the_command_line(
    words: list[str],
    status: int,
    printed: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "OTHER_RANKS_WAIT_SECONDS", 0.0)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as error:
            command_line.read_command_line("Train with GRPO.", words)
        assert error.value.code == status
        console = "".join(capsys.readouterr())
        assert console == "" if rank == "1" else all(text in console for text in printed)


# ---------------------------------------------------------------- what a start tells of the data


def test_a_start_shows_a_prompt_and_what_is_odd_about_the_data(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    rows[2]["answer"] = "see solution"
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    small = (
        "data.prompts_per_step=4",
        "data.template=raw",
        "data.max_prompt_tokens=64",
        "rollout.max_new_tokens=16",
    )
    paths = (
        f"model.path={tied_model}",
        f"data.train_path={file}",
        f"run.output_dir={tmp_path / 'run'}",
    )
    validation = ("validation.every_steps=1", f"validation.paths=[{file}]")
    config = load_config([], [*paths, *small, *validation, "run.device=cpu"])
    prepared = prepare_grpo(config)
    console = "\n".join((*prepared.lines, *prepared.warnings))
    assert (
        "A prompt as the model reads it: '0' of" in console
        and "\n    row        0│+│1│=│\n" in console
    )
    assert '8 of the 8 problems of validation "sums" are trained on, too' in console
    assert "1 of 8 training prompts have no usable reference" in console
    assert "1: the reference says that the answer is elsewhere ('2': 'see solution')" in console
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second_start = prepare_grpo(config)
    assert (
        "A prompt as the model reads it" not in "\n".join(second_start.lines)
        and second_start.warnings == ()
    )


def test_a_supervised_start_shows_what_is_learned(tied_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": f"{n}+1=", "completion": "2"}) for n in range(8))
    )
    paths = (
        f"model.path={tied_model}",
        f"data.train_path={file}",
        f"run.output_dir={tmp_path / 'run'}",
    )
    small = (
        "data.prompts_per_step=4",
        "sft.max_sequence_tokens=64",
        "run.device=cpu",
        f"sft.held_out_path={file}",
    )
    prepared = prepare_sft(load_config([], [*paths, *small]))
    console = "\n".join((*prepared.lines, *prepared.warnings))
    assert (
        "the 2 of lines with * are learned:\n    row        0│+│1│=│\n  * row        2│\n  * end  "
        "      <eos>│" in console
    )
    assert "8 of the 8 held-out sequences have a prompt that is trained on, too" in console


def test_a_gpu_whose_memory_an_engine_measures_has_one_rank() -> None:
    ranks = [RankReport("host", 0, gpu=gpu) for gpu in ("GPU-1", "GPU-2", "", "", "GPU-1")]
    assert refuse_shared_gpus(dict(enumerate(ranks[:4]))).error is None
    shared = refuse_shared_gpus(dict(enumerate(ranks)))
    assert "rollout.kv_cache_gib (of an evaluation --kv-cache-gib) is null" in str(shared.error)
    assert shared.is_mistake


def test_a_teacher_that_ends_otherwise_is_worth_knowing(tied_model: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tied_model, teacher)
    tokenizer_file = teacher / "tokenizer_config.json"
    values = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(values | {"eos_token": "<pad>"}))
    file = write_sums(tmp_path)
    settings = [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={tied_model}",
        f"data.train_path={file}",
        "data.template=raw",
        "data.prompts_per_step=4",
        "data.max_prompt_tokens=64",
    ]
    shape = shape_of(tied_model)

    def warnings(*overrides: str) -> list[str]:
        config = load_config([], [*settings, *overrides])
        data = try_data(config, shape, read_inputs(config, shape))
        return [warning for warning in data.warnings if "teacher" in warning]

    (warning,) = warnings(f"teacher.path={teacher}")
    assert "the policy ends with '<eos>' and the teacher with '<pad>'" in warning
    assert warnings() == []


# ---------------------------------------------------------------- how a rank begins, and breaks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has numbered this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_a_start_works_with_what_it_fetched_in_a_folder_that_is_its_own(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_sums(tmp_path)
    folder = tmp_path / "run"
    settings = [
        f"run.output_dir={folder}",
        "model.path=hf://org/base",
        f"data.train_path={file}",
        "data.template=raw",
        "data.prompts_per_step=4",
        "data.max_prompt_tokens=64",
        "rollout.max_new_tokens=16",
        "run.device=cpu",
    ]
    rank = StartingRank()
    with hub_server() as hub, ExitStack() as stack:
        hub.add("org/base").commit(
            {path.name: path.read_bytes() for path in tied_model.iterdir() if path.is_file()}
        )
        for name, value in hub.variables(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        prepared = rank.get_ready(lambda: load_config([], settings), prepare_grpo, stack)
        model = Path(prepared.config.model.path)
        assert (model / "model.safetensors").is_file() and tmp_path / "home" in model.parents
        assert rank.config == prepared.config
        with pytest.raises(ValueError, match="another run is working in"), sole_user(folder):
            pass
    with sole_user(folder):
        pass


def test_the_commits_of_a_run_that_may_go_on_are_those_in_its_folder(tmp_path: Path) -> None:
    paths = [f"run.output_dir={tmp_path}", "data.train_path=t"]
    commit = "0123456789" * 4
    earlier = load_config([], [*paths, f"model.path=hf://org/base@main#{commit}"])
    (tmp_path / "config.yaml").write_text(config_as_yaml(earlier))
    config = load_config([], [*paths, "model.path=hf://org/base@main"])
    assert [(hub_id.repo, hub_id.commit) for hub_id in recorded_ids(config)] == [
        ("org/base", commit)
    ]
    assert (
        recorded_ids(load_config([], [*paths, "model.path=m", "run.recover_mode=disabled"])) == []
    )


@pytest.mark.usefixtures("alone")
def test_a_start_waits_for_the_hub_as_long_as_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"run.output_dir={tmp_path}", "data.train_path=t", "model.path=hf://org/base"]
    limits = ["run.hub_timeout_seconds=3", "run.start_timeout_seconds=600"]
    with hub_server() as hub:
        hub.add("org/base").commit({"config.json": b"{}", "model.safetensors": b"0" * 99})
        hub.stalled = {"model.safetensors"}
        for name, value in hub.variables(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(HubFailedError, match=r"not done after 3 s \(run.hub_timeout_seconds\)"):
            fetch_inputs(load_config([], [*settings, *limits]), None)


@pytest.mark.usefixtures("alone")
def test_a_start_sees_what_another_run_left_while_it_read_its_inputs(
    tied_model: Path, tmp_path: Path
) -> None:
    file = write_sums(tmp_path)
    folder = tmp_path / "run"
    paths = [f"run.output_dir={folder}", f"model.path={tied_model}", f"data.train_path={file}"]
    small = ["data.template=raw", "data.prompts_per_step=4", "run.total_epochs=3"]
    lengths = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=16"]
    config = load_config([], [*paths, *small, *lengths, "run.device=cpu"])

    def prepare(config: Config) -> PreparedRun[Inputs]:
        prepared = prepare_grpo(config)
        origin = prepared.origin
        fingerprints = {"model_fingerprint": origin.model, "data_fingerprint": origin.data}
        tokenizer_files = read_metadata_files(str(tied_model))
        checkpoint(folder, 3, config, changed=fingerprints, files=tokenizer_files)
        return prepared

    with ExitStack() as stack:
        prepared = StartingRank().get_ready(lambda: config, prepare, stack)
    assert prepared.recovery is not None
    assert [checkpoint.step for checkpoint, _ in prepared.recovery.candidates] == [3]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ValueError("too long\nby one"), "ValueError: too long (its traceback is above)"),
        (PeerFailedError("rank 1 has ended"), None),
        (RuntimeError("Connection closed by peer"), None),
    ],
    ids=["of its own", "of a peer", "perhaps of a peer"],
)
def test_torchrun_gets_the_error_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reported: str | None
) -> None:
    """An error that follows from another rank's end would hide that one's in its report."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    child = os.fork()
    if child == 0:
        try:
            raise error
        except Exception:
            end_broken()
        finally:
            os._exit(MISTAKE)
    _, wait_status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(wait_status) == FAILURE
    message = json.loads(file.read_text())["message"]["message"] if file.exists() else None
    assert message == reported
