"""Local layers the way a GPU takes them, on a machine without one.

They run in processes that have Triton on their path."""

import json
from pathlib import Path

from tests.models.test_logprob_kernels import ROOT, run
from tests.selection import matrix

CASES = "tests.models.layer_kernel_cases"

pytestmark = matrix


def test_the_kernels_are_right_and_a_layer_starts_few_of_them(tmp_path: Path) -> None:
    file = str(ROOT / "tests/models/layer_kernel_cases.py")
    pytest_ = ["-m", "pytest", f"--rootdir={ROOT}", "-p", "no:cacheprovider", file]
    run(pytest_, tmp_path, TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")


def test_they_compile_for_gpus_without_spilling_and_load_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Nothing spills but one register of Qwen2.5-0.5B's norm on an A100."""
    compiled = [
        json.loads(line) for line in run(["-m", CASES], tmp_path, TRITON_INTERPRET="0").splitlines()
    ]
    assert len(compiled) == 48
    for *case, resources in compiled:
        assert resources["local"] == resources["narrow_rows"] == 0 and resources["stack"] <= 8, (
            case,
            resources,
        )
        assert resources["reg"] <= 110 and resources["wide_loads"] > 0, (case, resources)
