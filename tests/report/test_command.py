"""The command, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlmath.report.write
from rlmath.cli.report import main
from rlmath.config.load import load_config
from rlmath.report.write import write_run_report
from tests.report.folders import make_run

ROOT = Path(__file__).resolve().parents[2]


def test_it_writes_the_page_without_torch_and_without_rests(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    before = {path.name for path in folder.iterdir()}
    program = (
        "import sys; from rlmath.cli.report import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'vllm', 'megatron', 'numpy', 'pandas'} & set(sys.modules))); "
        "sys.exit(status)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(rf"Wrote {folder}/report\.html \(4\.\d MiB\)\n\[\]\n", process.stdout)
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("plotly.js v") == 1 and page.rstrip().endswith("</html>")


def test_a_bad_run_is_a_mistake_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a")
    assert main([str(folder), str(tmp_path / "b\x1b[2J")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "\x1b" not in err
    assert err.startswith(f'report: got "{tmp_path}/b') and "needed: the folder of a run" in err
    assert not (folder / "report.html").exists()


def test_output_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    assert main([str(folder), "--output", str(tmp_path)]) == 2
    assert "a folder; needed: a file to write" in capsys.readouterr().err
    assert main([str(folder), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").stat().st_size > 4 * 2**20
    assert main([str(folder), str(make_run(tmp_path / "b"))]) == 0
    assert (folder / "compared.html").exists() and not (folder / "report.html").exists()
    (tmp_path / "file").write_text("x")
    assert main([str(folder), "--output", str(tmp_path / "file" / "page.html")]) == 1
    assert capsys.readouterr().err.startswith("report: ")


def run_config(folder: Path, *more: str):
    return load_config([], [f"run.output_dir={folder}", "model.path=m", "data.train_path=t", *more])


def test_a_run_ends_with_its_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "a")
    write_run_report(run_config(folder, "telemetry.report=false"))
    assert not (folder / "report.html").exists()
    with caplog.at_level("INFO"):
        write_run_report(run_config(folder))
    assert (folder / "report.html").is_file()
    assert [record.getMessage() for record in caplog.records] == [
        f"The report is in {folder}/report.html"
    ]


def test_a_report_that_fails_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "report.html").mkdir()
    (folder / "report.html" / "x").touch()
    write_run_report(run_config(folder))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "could not be written: " in record.getMessage()
    assert not list(folder.glob(".*.tmp"))


def test_without_plotly_a_run_ends_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlmath.report.write, "find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        write_run_report(run_config(make_run(tmp_path / "a")))
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.getMessage().startswith(
        "No report: plotly is not installed"
    )
