"""The kernels for a GPU, on a machine without one.

They are interpreted against the textbook in float64, and compiled. Triton is in an environment of
its own (requirements/triton.txt), so this happens in processes that have it on their path."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.selection import matrix

ROOT = Path(__file__).parents[2]
CASES = "tests.models.logprob_kernel_cases"

pytestmark = matrix


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    """What Python printed, with Triton; a test without Triton is skipped, but not in CI."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = ROOT / ".venv-triton/lib" / version / "site-packages"
    if find_spec("triton") is None and not (packages / "triton").is_dir():
        assert "CI" not in os.environ, "CI installs Triton: make venv-triton"
        pytest.skip("needs Triton: make venv-triton")
    environment |= {
        "PYTHONPATH": f"{ROOT}:{packages}",
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder),
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_chunks_must_do_the_kernels_do_in_the_interpreter(tmp_path: Path) -> None:
    files = [
        f"tests/models/{name}.py"
        for name in ("logprob_kernel_cases", "test_logprobs", "test_teacher_kl")
    ]
    # Of rounding to bfloat16, which the interpreter does wrongly; the cases have one of their own.
    left_out = "not gradient_rounded_once"
    pytest_ = [
        "-m",
        "pytest",
        f"--rootdir={ROOT}",
        "-p",
        CASES,
        "-p",
        "no:cacheprovider",
        "-k",
        left_out,
    ]
    run([*pytest_, *(str(ROOT / file) for file in files)], tmp_path, TRITON_INTERPRET="1")


def test_they_compile_for_gpus_without_spilling_and_load_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Threads of 32 to 64 registers leave room for 32 or more warps.

    A multiprocessor has 64 Ki registers."""
    compiled = [
        json.loads(line) for line in run(["-m", CASES], tmp_path, TRITON_INTERPRET="0").splitlines()
    ]
    assert len(compiled) == 26
    for _, _, grads, _, name, resources in compiled:
        assert resources["reg"] <= 64 and resources["stack"] == resources["local"] == 0, (
            name,
            resources,
        )
        assert resources["wide_loads"] > 0 or grads == [None, None], (name, resources)
