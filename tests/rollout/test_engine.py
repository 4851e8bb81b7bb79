"""What an engine sets for the device before vLLM is imported, and how it ends.

It is tested against a stand-in for vLLM; with vLLM itself in tests/distributed/test_engine.py."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rlmath.distributed.device_kind import DeviceKind
from rlmath.rollout.engine import end_engine, prepare_environment

RUNNERS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
)
SET = ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_LOGGING_LEVEL")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment without what is to be set; it is afterwards as before."""
    before = dict(os.environ)
    for name in (*SET, "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("kind", "found"), [("cuda", ("0", "WARNING")), ("cpu", (None, "ERROR"))])
def test_on_gpu_flashinfer_reduces_nothing_and_a_program_without_our_logging_hears_warnings(
    environment: pytest.MonkeyPatch, kind: DeviceKind, found: tuple[str | None, str]
) -> None:
    torch_log = logging.getLogger("torch")
    torch_log.addHandler(logging.NullHandler())  # as its import does
    prepare_environment(kind)
    assert tuple(os.environ.get(name) for name in SET) == found
    assert torch_log.handlers == [] and torch_log.propagate


def test_what_the_user_has_set_stays_and_our_logging_needs_no_level(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("VLLM_CONFIGURE_LOGGING", "0")
    prepare_environment("cuda")
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    for name, value in zip(SET, ("1", "INFO"), strict=True):
        environment.setenv(name, value)
    prepare_environment("cuda")
    assert tuple(os.environ.get(name) for name in SET) == ("1", "INFO")


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_vllm_runs_in_this_process_and_on_cpu_by_its_first_model_runner(
    environment: pytest.MonkeyPatch, kind: DeviceKind
) -> None:
    """We call its scheduler and its worker."""
    for name in RUNNERS:
        environment.delenv(name, raising=False)
    prepare_environment(kind)
    on_cpu = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    always = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    assert {name: os.environ[name] for name in RUNNERS if name in os.environ} == (
        always | on_cpu if kind == "cpu" else always
    )


class Core:
    """Stands for vLLM's engine core, whose finalizer shuts it down when the interpreter exits."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._finalizer = weakref.finalize(self, self.calls.append, "finalizer")

    def shutdown(self) -> None:
        if self._finalizer.detach() is not None:
            self.calls.append("shutdown")


@pytest.mark.parametrize(("kind", "calls"), [("cuda", []), ("cpu", ["shutdown"])])
def test_on_gpu_nothing_of_an_engine_is_shut_down_not_even_at_exit(
    kind: DeviceKind, calls: list[str]
) -> None:
    core = Core()
    end_engine(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)), kind)
    assert core.calls == calls and not core._finalizer.alive
