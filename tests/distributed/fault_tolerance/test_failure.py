"""What a rank tells of the error that ends it."""

from __future__ import annotations

from pathlib import Path

from rlmath.distributed.fault_tolerance.failure import first_line


def error_of_writing(path: str) -> OSError:
    try:
        with Path(path).open("wb", buffering=0) as file:
            file.write(b"more than there is room for")
    except OSError as error:
        return error
    raise AssertionError(f"{path} took it")


def test_a_full_disk_that_the_kernel_does_not_name_is_looked_for() -> None:
    line = first_line(error_of_writing("/dev/full"))
    assert line.startswith("OSError: [Errno 28] No space left on device")
    assert "df -i" in line and "/dev/shm" in line
    named = OSError(28, "No space left on device", "/data/run/metrics.jsonl")
    assert first_line(named) == f"OSError: {named}"
