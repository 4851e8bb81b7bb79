"""What the tests with ranks share: processes and small models."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlmath.distributed.process import freeze_live_objects

gc.disable()  # until all tests are collected, see rlmath.distributed.process

from rlmath.cli import make_arithmetic
from tests import left_over
from tests.distributed.rank_pool import RankPool
from tests.tiny_models import make_model_folder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it puts into the background; programs that tests interrupt would
    # inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAILURES_FILE = os.environ.pop("FAILURES_FILE", None)
"""File that records failed tests; sessions that tests start fail on purpose and inherit nothing."""
BESIDE_UNIT_TESTS = (
    "test_divergence.py",
    "test_resume.py",
    "test_rollback.py",
    "test_staged_run.py",
)
"""Modules whose programs run in the first session of `make test`, so that both take as long."""
DISTRIBUTED = Path(__file__).parent / "distributed"
KEEP_THEIR_GRAPH = (DISTRIBUTED / "test_moe.py", DISTRIBUTED / "test_routing_replay.py")
"""Megatron's token dispatcher keeps the graph of its last forward pass, so the model and its
process groups, where no collection of garbage sees it: their threads end with the processes, so
these modules are the last to use them."""


def uses_pool(item: pytest.Item) -> bool:
    """Whether a test uses the fixture `ranks`; it may have a parameter of that name instead."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in parameters


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if uses_pool(item):
        item.add_marker("pooled")
    runs_programs = hasattr(getattr(item, "module", None), "run_ranks")
    if runs_programs and item.path.name not in BESIDE_UNIT_TESTS:
        item.add_marker("program")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that use the pool of ranks come last.

    So its processes live no longer than they are used: threads of gloo's that are left over wake up
    a hundred times a second, which takes a quarter of two cores from other tests."""
    use_pool = {test.path for test in items if uses_pool(test)}
    items.sort(key=lambda test: (test.path in use_pool, test.path in KEEP_THEIR_GRAPH))


def pytest_collection_finish() -> None:
    freeze_live_objects()


def record_failure(line: str) -> None:
    """Append a line to the file that FAILURES_FILE names.

    CI repeats at its end what failed in sessions whose output is far above."""
    if FAILURES_FILE is not None:
        with open(FAILURES_FILE, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        record_failure(f"{report.nodeid} ({report.when}): {message_of(report)}")


def message_of(report: pytest.TestReport) -> str:
    """The first line of a failure's message, cut to 300 characters."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    return message.strip().split("\n")[0][:300]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a process of the tests is left after the last fixture's end.

    This also holds for a session that was interrupted."""
    processes = left_over.left_over(left_over.GRACE_SECONDS)
    if not processes:
        return
    print(f"\n{len(processes)} processes that tests have started are left:")
    for process in processes:
        print(f"  {left_over.described(process)}")
        record_failure(f"a process is left: {left_over.described(process)}")
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The processes of all tests that need ranks; started as they are first asked for."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def made_arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `arithmetic` copies; nobody writes here."""
    from rlmath.cli import make_tiny_model  # transformers, which most tests need not

    place = tmp_path_factory.mktemp("made")
    make_arithmetic.main(["--output", f"{place}/data", "--train", "200", "--heldout", "20"])
    with torch.random.fork_rng():
        make_tiny_model.main(["--output", f"{place}/base"])
    return place


@pytest.fixture(scope="module")
def arithmetic(made_arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test module's own with `data/` and `base/`, made by the tools.

    The data are 200 problems; the model has random weights."""
    place = tmp_path_factory.mktemp("arithmetic")
    return shutil.copytree(made_arithmetic, place, dirs_exist_ok=True)
