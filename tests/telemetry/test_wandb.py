"""The offline log is read back from its own file.

What disturbs W&B's process is a program of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rlmath.config.schema import Config, RunConfig, TelemetryConfig
from rlmath.telemetry.metrics_writer import open_metrics, read_metrics
from rlmath.telemetry.wandb import run_id, wandb_problems

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="needs rlmath[wandb]"
)

PROGRAM = """
    import dataclasses, logging, os, sys, time
    import psutil
    from rlmath.config.schema import Config, RunConfig, TelemetryConfig
    from rlmath.telemetry import wandb
    from rlmath.telemetry.metrics_writer import open_metrics

    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
    wandb.FINISH_SECONDS, wandb.MOST_WAITING = 3.0, 100
    telemetry = TelemetryConfig(tensorboard=False, wandb="offline")
    config = dataclasses.replace(Config(), run=RunConfig(output_dir=sys.argv[1]), telemetry=telemetry)

    def service():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for child in psutil.Process().children():
                if child.is_running() and child.name() == wandb.SERVICE:
                    return child
            time.sleep(0.2)
        raise SystemExit("W&B's process did not start")

    def log_file_of(text):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for path in __import__("pathlib").Path(sys.argv[1]).glob("wandb/*/*.wandb"):
                if text in path.read_bytes():
                    return
            time.sleep(0.2)
        raise SystemExit(f"{text} is not in W&B's file")

    writer = open_metrics(config)
    for step in (1, 2):
        writer.write(step, {"task_reward": step / 2})
    child = service()
    log_file_of(b"task_reward")
"""


def config_of(folder: Path, **telemetry: object) -> Config:
    settings = TelemetryConfig(**{"tensorboard": False, "wandb": "offline", **telemetry})
    return dataclasses.replace(Config(), run=RunConfig(output_dir=str(folder)), telemetry=settings)


def program(folder: Path, then: str) -> subprocess.CompletedProcess:
    source = textwrap.dedent(PROGRAM) + textwrap.dedent(then)
    return subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
        check=False,
    )


def records(path: Path):
    """The records of a .wandb file.

    It has a 7-byte head, then a LevelDB log of 32 KiB blocks whose pieces have 7-byte heads (crc,
    length, and whether it is a whole record, or the first, middle or last part of one)."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    position = 7
    record = b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def history(path: Path) -> list[dict]:
    """The rows of a file, as W&B has them."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {
                    update.key or "/".join(update.nested_key): json.loads(update.value_json)
                    for update in items
                }
            )
    return rows


def service_processes_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["name", "environ"])
        if process.info["name"] == "wandb-core"
        and (process.info["environ"] or {}).get("RLMATH_TEST") == str(folder)
    ]


def test_offline_files_have_the_numbers_of_metrics_jsonl_and_the_config(tmp_path: Path):
    writer = open_metrics(config_of(tmp_path / "first", wandb_project="sums"))
    for step in range(1, 4):
        writer.write(
            step, {"task_reward": step / 3, "train/entropy_loss": 0.1 * step, "n_seqs": 8.0}
        )
    writer.write_validation(3, {"validation/aime24/accuracy": 0.25})
    writer.write(4, {"task_reward": math.nan, "train/entropy_loss": 1e-30})
    writer.close()
    (path,) = wandb_files(tmp_path / "first")
    local_rows = read_metrics(str(tmp_path / "first"))
    sent_rows = history(path)
    local_rows[2]["validation/aime24/accuracy"] = 0.25
    assert [row["_step"] for row in sent_rows] == [1, 2, 3, 4]
    for local_row, row in zip(local_rows, sent_rows, strict=True):
        sent_metrics = {
            name: float(value) for name, value in row.items() if not name.startswith("_")
        }
        local_row.pop("step")
        assert sent_metrics == pytest.approx(local_row, nan_ok=True, rel=0, abs=0)
    (run,) = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project, run.display_name) == (
        run_id(tmp_path / "first"),
        "sums",
        "first",
    )
    sent_config = {setting.key: json.loads(setting.value_json) for setting in run.config.update}
    assert (
        sent_config["optimizer"]["lr"] == Config().optimizer.lr
        and sent_config["telemetry"]["wandb_project"] == "sums"
    )


def test_nothing_but_numbers_and_settings_is_written(tmp_path: Path):
    writer = open_metrics(config_of(tmp_path))
    writer.write(1, {"task_reward": 1.0})
    print("a line of the console")
    writer.close()
    kinds = {
        record.WhichOneof("record_type")
        for path in wandb_files(tmp_path)
        for record in records(path)
    }
    assert not kinds & {"output", "output_raw", "stats", "artifact", "environment", "files"}
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not names & {"wandb-metadata.json", "requirements.txt", "output.log", "diff.patch"}
    assert not (tmp_path / "wandb" / "latest-run").exists()


def test_off_does_not_even_import_wandb(tmp_path: Path):
    source = (
        "import sys, rlmath.telemetry.metrics_writer as m, rlmath.config.schema as c, dataclasses "
        "as d\n"
        "config = d.replace(c.Config(), run=c.RunConfig(output_dir=sys.argv[1]),"
        " telemetry=c.TelemetryConfig(tensorboard=False))\n"
        "w = m.open_metrics(config); w.write(1, {'a': 1.0}); w.close()\n"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=True, timeout=300)
    assert not (tmp_path / "wandb").exists()


def test_its_process_ends_with_a_run_that_breaks_off_and_the_file_can_be_read(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("RLMATH_TEST", str(tmp_path))
    process = program(tmp_path, "os._exit(7)")
    assert process.returncode == 7, process.stdout
    psutil.wait_procs(service_processes_of(tmp_path), timeout=100)
    assert service_processes_of(tmp_path) == []
    (path,) = wandb_files(tmp_path)
    assert history(path)[0]["task_reward"] == 0.5


@pytest.mark.parametrize(
    ("trouble", "steps", "pause"),
    [("child.kill(); child.wait(10)", 5, 0.3), ("child.suspend()", 1000, 0.0)],
    ids=["killed", "hangs"],
)
def test_a_process_that_fails_costs_wandb_alone_and_is_told_once(
    tmp_path: Path, trouble: str, steps: int, pause: float
):
    """One that hangs gets more rows than its socket and the queue hold."""
    code = f"""
        {trouble}
        metrics = {{f"group/{{number}}": number / 7 for number in range(200)}}
        for step in range(3, {steps} + 1):
            writer.write(step, metrics)
            time.sleep({pause})
        writer.close()
        print("the run is done")
    """
    process = program(tmp_path, code)
    assert process.returncode == 0, process.stdout
    assert process.stdout.count("Weights & Biases is off from here") == 1, process.stdout
    assert "the run is done" in process.stdout and "Traceback" not in process.stdout
    assert [row["step"] for row in read_metrics(str(tmp_path))] == list(range(1, steps + 1))


def test_the_signals_stay_the_runs_own(tmp_path: Path):
    code = """
        import signal
        got = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            assert signal.getsignal(number) == signal.SIG_DFL
            signal.signal(number, lambda number, frame: got.append(number))
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        os.kill(os.getpid(), signal.SIGUSR1)
        wandb._quiet_settings()["stop_fn"]()  # the stop button of its pages
        while len(got) < 2:
            time.sleep(0.01)
        writer.write(3, {"task_reward": 1.5})
        writer.close()
        assert got == [signal.SIGUSR1, signal.SIGTERM], got
        print("both signals came")
    """
    process = program(tmp_path, code)
    assert process.returncode == 0 and "both signals came" in process.stdout, process.stdout
    assert len(history(wandb_files(tmp_path)[0])) == 3


# ---------------------------------------------------------------- before a run starts


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch):
    """A home without a login, and a server that nobody can reach."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("NETRC", raising=False)


def problems_of(*environments: dict[str, str]) -> list[list[str]]:
    """The problems of a run that is online, by these variables.

    Each is found in a process of its own, as wandb keeps what it once read."""
    source = """
import json, os, sys
from rlmath.config.schema import TelemetryConfig
from rlmath.telemetry.wandb import _import_wandb, wandb_problems
_import_wandb()
for environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ |= environment
        print(json.dumps(wandb_problems(TelemetryConfig(wandb="online"))), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    process = subprocess.run(
        [sys.executable, "-c", source, json.dumps(environments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]


@pytest.mark.usefixtures("no_account")
def test_a_key_is_found_in_the_environment_and_in_netrc_and_none_or_a_short_one_is_refused(
    tmp_path: Path,
):
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine 127.0.0.1:9 login user password {'0' * 40}\n")
    netrc.chmod(0o600)
    nowhere = {"NETRC": str(tmp_path / "none")}
    keys = ({"WANDB_API_KEY": "0" * 40} | nowhere, {"WANDB_API_KEY": "0" * 5} | nowhere)
    of_environment, short, of_netrc, missing = problems_of(*keys, {}, nowhere)
    assert of_environment == of_netrc == []
    assert "cannot be used" in short[0] and "wandb login" in short[0] and len(short) == 1
    assert (
        "no API key for http://127.0.0.1:9" in missing[0]
        and "telemetry.wandb=offline" in missing[0]
    )


def test_a_missing_package_is_told_with_how_to_install_it(tmp_path: Path, monkeypatch):
    """A folder "wandb", such as W&B itself leaves where it is run, is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not hasattr(f, "MAPPING")])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    for mode in ("offline", "online"):
        (problem,) = wandb_problems(TelemetryConfig(wandb=mode))
        assert "pip install rlmath[wandb]" in problem
    assert wandb_problems(TelemetryConfig(wandb="off")) == []
