"""What launch/slurm/submit.py queues, and what it refuses to queue.

With a Slurm and without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.slurm.cluster import Need, Partition, _ask, partition_problems, seconds_of
from launch.slurm.programs import training
from launch.slurm.script import BODY, Job
from rlmath.checkpoint.directory import Progress, finish_partial, open_partial, write_progress
from rlmath.config.load import load_config, save_config
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MEANINGS, write_exit_status
from rlmath.planning.checks import only_used
from tests.programs import REPOSITORY, small_run
from tests.slurm.cluster import Cluster
from tests.slurm.submitted import TWO_NODES, Submitter, called, config

EVALUATION = ("--program=evaluate", "--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1")
slurm_only = pytest.mark.slurm


@pytest.fixture
def run(arithmetic: Path, tmp_path: Path) -> list[str]:
    """The arguments of a run that may be queued."""
    return [config("demo.yaml"), *TWO_NODES, *small_run(arithmetic, tmp_path / "run")]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, where no Slurm is."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- with a Slurm


@slurm_only
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--partition=shor"],
            'There is no partition "shor"; there are: short, one, closed. Did you mean "short"?',
        ),
        (["--partition=closed"], '--partition "closed" is not up. These are: short, one.'),
        (
            ["--nodes=3", "--partition=one", "parallel.tensor=1"],
            '--nodes is 3; the partition "one" has 1.',
        ),
        (["--time=61"], '--time is 61 minutes; the partition "short" allows 60.'),
        (["--gpus-per-node=8"], 'in the partition "short" 0 of 2 nodes have as many'),
        (
            ["--sbatch=--account=nobody", "--sbatch=--no-such-option"],
            "sbatch says: sbatch: unrecognized option",
        ),
    ],
)
def test_what_slurm_would_not_run_is_not_queued(
    submitter: Submitter, run: list[str], options: list[str], told: str
) -> None:
    status, _, err = submitter.call(*run, *options)
    assert status == 2 and told in err, err
    assert submitter.queue() == []


@slurm_only
def test_a_second_run_of_the_same_name_or_folder_is_not_queued(
    submitter: Submitter, run: list[str], tmp_path: Path
) -> None:
    (job,) = submitter.submit(tmp_path / "run", *run, "--sbatch=--hold").jobs
    status, _, err = submitter.call(*run)
    assert status == 2
    assert f'a job of yours is named "rlmath-run" already: {job} PENDING' in err
    assert f'"{tmp_path}/run" is what another job writes: {job}' in err
    status, _, err = submitter.call(*run, "--name=another")
    assert status == 2 and "is named" not in err and "is what another job writes" in err
    status, _, err = submitter.call(*run, "run.output_dir=elsewhere/run")
    assert status == 2 and "is named" in err and "is what another job writes" not in err
    assert submitter.queue() == [job]
    assert (
        submitter.call(*run, "--name=another", "run.output_dir=elsewhere/run", "--dry-run")[0] == 0
    )


@slurm_only
def test_a_chain_is_queued_link_by_link(
    slurm: Cluster, submitter: Submitter, run: list[str], tmp_path: Path
) -> None:
    submitted = submitter.submit(tmp_path / "run", *run, "--chain=3", "--sbatch=--begin=now+1hour")
    first, second, third = submitted.jobs
    assert slurm.job(second, "Dependency").startswith(f"afterany:{first}")
    assert slurm.job(third, "Dependency").startswith(f"afterany:{second}")
    assert slurm.job(third, "Comment") == f"rlmath:{tmp_path}/run"


@slurm_only
def test_a_slurm_that_does_not_answer_is_told_and_a_dry_run_does_without(
    slurm: Cluster, run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "slurm.conf"
    broken.write_text("no setting\n")
    monkeypatch.setenv("SLURM_CONF", str(broken))
    status, out, err = called(*run)
    assert status == 2 and "sinfo says: " in err and out == ""
    status, out, err = called(*run, "--dry-run")
    assert status == 0 and "Partition and queue are not looked at: sinfo says: " in err
    assert out.startswith("#!/usr/bin/env bash")


# ---------------------------------------------------------------- without one


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--config=configs/none.yaml"], "configs/none.yaml"),
        (["parallel.tensor=3"], "does not divide the 2 ranks"),
        (["run.output_dir=/proc/run"], 'run.output_dir "/proc/run"'),
        (["run.output_dir=with space"], "for Slurm it may have only letters"),
        (["--time=soon"], '--time is "soon"'),
        (["--time=5"], "nothing is left to train in"),
        (["--nodes=0"], "--nodes is 0; needed: at least 1"),
        (["--gpus-per-node=1", "--ranks-per-node=2"], "every rank needs a GPU of its own"),
        (["--requeue", "run.recover_mode=disabled"], "every start of this job would begin anew"),
        (["--program=sft", "sft.held_out_path=nowhere"], "sft.held_out_path: "),
        (
            ["--runtime=docker", "--container=image", "--mount=/"],
            "--mount / would hide the image itself",
        ),
        (["--chain=0"], "--chain is 0; needed: from 1 to 100"),
        (["--name=a b"], '--name is "a b"'),
        (["--sbatch=account"], '--sbatch is "account"'),
        (
            ["--sbatch=--nodes 9"],
            '--sbatch is "--nodes 9"; needed: one option of sbatch without spaces',
        ),
        (
            ["--runtime=docker", "--container=--privileged"],
            '--container is "--privileged"; needed: the name',
        ),
        (["--container=image"], "a container needs an image and --runtime pyxis or docker"),
        (["--runtime=pyxis", "--container=image"], "is outside of what the container sees"),
        ([], "there is no sbatch here"),
    ],
)
def test_mistakes_are_told_before_anything_is_queued(
    run: list[str], alone: Path, options: list[str], told: str
) -> None:
    status, out, err = called(*run, *options)
    assert status == 2 and told in err and out == "", err
    assert list(alone.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [
        "comment=mine",
        "nodes=9",
        "chd=/tmp",
        "sig=INT@5",
        "no-req",
        "array=1-3",
        "tasks=8",
        "open-mode=truncate",
    ],
)
def test_options_that_the_script_relies_on_are_refused_also_abbreviated(
    run: list[str], option: str
) -> None:
    refusal = called(*run, "--dry-run", f"--sbatch=--{option}")[2]
    assert f'--sbatch is "--{option}", which the script sets itself or cannot have' in refusal


def test_the_environment_does_not_win_over_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ("ARRAY_INX", "OUTPUT", "ERROR", "GPUS", "GPUS_PER_NODE", "WAIT", "SIGNAL", "PARTITION")
    for name in (*taken, "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    passed_on = [line for line in _ask("env").splitlines() if line.startswith("SBATCH_")]
    assert passed_on == ["SBATCH_ACCOUNT=1"]


def test_other_options_of_sbatch_are_passed_on(run: list[str], alone: Path) -> None:
    """Options whose names begin with a reserved one's are passed on too.

    So are those for parts of nodes."""
    options = (
        "--account=math",
        "--mem=64G",
        "--exclusive=user",
        "--time-min=90",
        "--nodelist=n[1-2]",
    )
    status, out, err = called(*run, "--dry-run", *(f"--sbatch={option}" for option in options))
    assert status == 0, err
    lines = out.splitlines()
    memory_line = lines.index("#SBATCH --mem=0")  # what stands later wins
    assert all(f"#SBATCH {option}" in lines[memory_line:] for option in options)


def test_an_evaluation_takes_its_own_options(arithmetic: Path, alone: Path) -> None:
    path_options = (
        "--model",
        f"{arithmetic}/base",
        "--data-dir",
        f"{arithmetic}/data",
        "--output",
        "eval",
    )
    status, out, err = called(
        *EVALUATION, "--dry-run", "--", *path_options, "--benchmarks", "heldout"
    )
    assert status == 0, err
    assert "launch/evaluate.py\n" in out and "work_files=(generations '*.jsonl')" in out
    assert called(*EVALUATION, "--dry-run", "--", *path_options)[2].startswith(
        "--benchmarks must be given"
    )
    split = called(
        *EVALUATION,
        "--dry-run",
        "--",
        *path_options,
        "--benchmarks",
        "heldout",
        "--tensor-parallel",
        "3",
    )
    assert "--tensor-parallel is 3, which does not divide the 2 ranks" in split[2]
    outside = called(
        *EVALUATION, "--dry-run", "--", *path_options, "--benchmarks", "heldout,../../x"
    )
    assert outside[0] == 2 and "--benchmarks: '../../x' is no name of a benchmark" in outside[2]
    wrong = called(*EVALUATION, "--dry-run", "--", *path_options, "--benchmarks", "held_out")
    assert (
        wrong[0] == 2
        and "has no held_out.jsonl" in wrong[2]
        and 'Did you mean "heldout"?' in wrong[2]
    )
    assert "no --config and no overrides" in called(*EVALUATION, config("demo.yaml"))[2]


@pytest.mark.parametrize("runtime", ["none", "pyxis", "docker"])
@pytest.mark.parametrize("program", ["grpo", "sft"])
def test_the_script_has_no_mistakes_that_shellcheck_knows(
    arithmetic: Path, alone: Path, tmp_path: Path, program: str, runtime: str
) -> None:
    """Whatever the settings hold stays one word of the run's command line."""
    image = (
        ()
        if runtime == "none"
        else (f"--container=a/b:1 '$(touch {tmp_path}/hit)", f"--mount={arithmetic}")
    )
    evil = f"telemetry.wandb_name=it's `touch {tmp_path}/hit` $HOME"
    run = (*small_run(arithmetic, Path("run")), "sft.max_sequence_tokens=64")
    arguments = (config("demo.yaml"), *TWO_NODES, *run, "--dry-run")
    status, out, err = called(
        *arguments, f"--program={program}", f"--runtime={runtime}", *image, evil
    )
    assert status == 0, err
    path = tmp_path / "job.sh"
    path.write_text(out)
    head = out[: out.index(BODY.read_text())]
    shown = subprocess.run(
        ["/bin/bash", "-c", f'{head}\nprintf "%s\\n" "${{arguments[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines()[-1] == evil and not (tmp_path / "hit").exists()
    subprocess.run(["/bin/bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck", path=os.defpath)
    if shellcheck is not None:
        subprocess.run([shellcheck, "--severity=warning", str(path)], check=True)


def test_the_signal_leaves_the_run_its_grace(run: list[str], alone: Path) -> None:
    _, out, err = called(*run, "--dry-run", "run.stop_grace_seconds=1200")
    assert "#SBATCH --signal=USR1@1260\n" in out and "grace_seconds=1200\n" in out, err
    assert "#SBATCH --no-requeue\n" in out


@pytest.mark.parametrize(
    ("nodes", "word", "told"),
    [
        (3, "d8+d16", "nodes 1-2 train, node 3 generates"),
        (
            3,
            "d6t2+d12",
            "node 1 trains, node 2 does both (4 of its 8 ranks train), node 3 generates",
        ),
        (1, "d2t2+d4", "node 1 does both (4 of its 8 ranks train)"),
        (3, "d5t4+d4t1", "node 1 does both (4 of its 8 ranks train), nodes 2-3 generate"),
        (
            2,
            "d2t5+d6",
            "node 1 does both (6 of its 8 ranks train), node 2 generates, some engines have ranks "
            "on two nodes",
        ),
        (2, "d16", ""),
    ],
)
def test_which_nodes_train_and_which_generate_is_told(
    nodes: int, word: str, told: str, tmp_path: Path
) -> None:
    settings = ["run.output_dir=o", "model.path=m", "data.train_path=t", f"parallel={word}"]
    program = training("grpo", [], settings, 8 * nodes)
    assert Job(program, "name", nodes, 8, 8, tmp_path, tmp_path, "python").roles == told


def test_the_roles_of_nodes_stand_in_the_script(run: list[str], alone: Path) -> None:
    settings = ["parallel=d1+d1", "rollout.max_staleness=0"]
    status, out, err = called(*run, "--dry-run", *settings)
    assert status == 0, err
    assert "\n# node 1 trains, node 2 generates\n" in out
    assert "# node" not in called(*run, "--dry-run")[1].partition("# shellcheck")[0]
    assert "none is left to train" in called(*run, "--dry-run", "rollout.ranks=2")[2]
    sft = called(*run, "--dry-run", "--program=sft", "sft.max_sequence_tokens=64", *settings)
    assert "parallel.data is 1" in sft[2] and "this run has 2" in sft[2]


def test_slurms_times_are_read() -> None:
    times = {
        "90": 5400,
        "1:30": 90,
        "12:00:00": 43200,
        "2-00": 172800,
        "1-12:30": 131400,
        "1-0:0:1": 86401,
    }
    assert {time: seconds_of(time) for time in times} == times
    assert seconds_of("infinite") == float("inf")
    for wrong in ("", "1-", "1:2:3:4", "-5", "1h"):
        with pytest.raises(ValueError, match="needed: minutes"):
            seconds_of(wrong)


def test_nodes_are_counted_that_have_the_gpus() -> None:
    mixed = Partition("gpu", True, True, 3600.0, float("inf"), ((2, 8), (4, 4)))
    small = Partition("debug", False, True, 3600.0, 2, ((9, 8),))
    hour = Need(nodes=2, gpus=8, seconds=3600.0, signal_seconds=360)

    def told(names: str | None, known: list[Partition], **changes: float | None) -> list[str]:
        return partition_problems(names, known, replace(hour, **changes))

    assert told(None, [mixed]) == []
    assert told(None, [mixed], nodes=6, gpus=4, seconds=None) == []
    assert "2 of 6 nodes have as many" in told("gpu", [mixed], nodes=3)[0]
    assert "has 9 and allows a job 2" in told("debug", [small], nodes=3)[0]
    assert "no default partition" in told(None, [small])[0]
    assert told("debug,gpu", [mixed, small], nodes=6, gpus=0) == []
    assert len(told("debug,gpu", [mixed, small], nodes=7)) == 2
    (unknown,) = told("gpu,none", [mixed, small], nodes=1)
    assert 'There is no partition "none"' in unknown
    (problem,) = told("debug", [small], nodes=1, seconds=None, signal_seconds=3600)
    assert "nothing is left to work in" in problem
    assert told("debug", [small], nodes=1, seconds=3500.0, signal_seconds=3600) == []


def test_the_script_reads_how_a_run_ended_as_the_program_does(tmp_path: Path) -> None:
    """The functions of the script run without Python, and without its last line, which runs it."""
    functions = BODY.read_text().removesuffix("main\n")
    assert functions != BODY.read_text()

    def told(by: list[str]) -> tuple[int, str]:
        done = subprocess.run(by, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def both() -> list[tuple[int, str]]:
        bash = f"logs=l SLURM_JOB_ID=1 output={tmp_path}\n{functions}\nexit_status"
        program = [sys.executable, str(REPOSITORY / "launch/exit_status.py"), str(tmp_path)]
        return [told(["/bin/bash", "-c", bash]), told(program)]

    endings = both()
    assert endings[0] == endings[1] and endings[0][0] == FAILURE
    for status in MEANINGS:
        write_exit_status(
            tmp_path, status, 'run.output_dir "a\\b": stopped after step 3 $(touch x)'
        )
        endings = both()
        assert endings[0] == endings[1] and endings[0][0] == status
    (tmp_path / "exit_status.json").write_text("{")
    assert [status for status, _ in both()] == [FAILURE, FAILURE]


@pytest.mark.parametrize("program", ["grpo", "sft"])
def test_what_a_start_would_go_on_from_may_be_queued(
    arithmetic: Path, alone: Path, tmp_path: Path, program: str
) -> None:
    """A model that has moved, and settings that a supervised run has no use for."""
    output = tmp_path / "run"
    settings = [*small_run(arithmetic, output), "run.seed=3", "sft.max_sequence_tokens=64"]
    queued = (f"--program={program}", *TWO_NODES, config("demo.yaml"), "--dry-run")
    saved_config = load_config(
        [REPOSITORY / "configs" / "demo.yaml"], [*settings, "model.path=/elsewhere/base"]
    )
    saved_config = only_used(saved_config)[0] if program == "sft" else saved_config
    output.mkdir()
    save_config(saved_config, output / "config.yaml")
    refusal = "it belongs to a run with another config: model.path"
    assert refusal in called(*queued, *settings)[2]
    partial = open_partial(output / "checkpoints", 3)
    write_progress(partial, Progress(3, 0, 24, 6, 3, "TP1", 1, (), ("torch",), "model", "data", {}))
    save_config(saved_config, partial / "config.yaml")
    (partial / "state" / ".metadata").write_text("index")
    finish_partial(partial, 3, False, {})
    assert called(*queued, *settings)[0] == 0
    status, _, err = called(*queued, *settings, "run.seed=4", "data.shuffle=false")
    assert (
        status == 2
        and "cannot go on with other settings: run.seed: 3 there, 4 now; data.shuffle" in err
    )
    assert err.count("cannot go on") == 1, "one problem, however many settings"


def test_a_shipped_config_is_given_to_the_job_by_its_place(arithmetic: Path, alone: Path) -> None:
    """The job begins in the folder that it was submitted from, in which there is none."""
    settings = small_run(arithmetic, alone / "run")
    program = training("grpo", [Path("configs/demo.yaml")], settings, 2)
    place = program.arguments[program.arguments.index("--config") + 1]
    assert Path(place).is_absolute() and Path(place).is_file()
    assert Path(place) in program.reads


def test_the_nodes_wait_for_an_upload(arithmetic: Path, alone: Path) -> None:
    settings = small_run(arithmetic, alone / "run")
    plain = training("grpo", [], settings, 2).wait_seconds
    pushed = training(
        "grpo", [], [*settings, "save.push_to_hub=org/name", "run.hub_timeout_seconds=1000"], 2
    )
    assert pushed.wait_seconds == plain + 1000
