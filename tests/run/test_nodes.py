"""What a run tells of its nodes, and what it names where they have read other data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.types import Prompt
from rlmath.config.load import load_config
from rlmath.data.dataset import ValidationFile
from rlmath.distributed.ranks import RankReport
from rlmath.run.nodes import MOST_NODES_NAMED, data_makers, differences, facts_of, node_lines
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.resume import Origin


def reports_of(nodes: int) -> dict[int, RankReport]:
    """Two ranks on each node, the first of which tells the address."""
    return {
        rank: RankReport(
            f"host-{rank // 2}", rank // 2, address="" if rank % 2 else f"10.0.0.{rank // 2} (eth0)"
        )
        for rank in range(2 * nodes)
    }


@pytest.mark.parametrize("more", [0, 1])
def test_all_nodes_are_counted_and_the_first_ones_named(more: int) -> None:
    count = MOST_NODES_NAMED + more
    header, *lines = node_lines(reports_of(count))
    assert header == f"{count} nodes, {2 * count} ranks:"
    named = [
        f"  host-{node}: ranks {2 * node}-{2 * node + 1}, 10.0.0.{node} (eth0)"
        for node in range(MOST_NODES_NAMED)
    ]
    assert lines == named + ["  and 1 more nodes"] * more
    assert node_lines(reports_of(1)) == []


def test_nodes_of_one_name_are_told_apart_and_may_lack_an_address() -> None:
    reports = {1: RankReport("box", 1), 0: RankReport("box", 0, address="127.0.0.1 (lo)")}
    assert node_lines(reports) == [
        "2 nodes, 2 ranks:",
        "  box (node 0): rank 0, 127.0.0.1 (lo)",
        "  box (node 1): rank 1, address unknown",
    ]


def test_only_facts_that_differ_are_told_the_rarest_value_first() -> None:
    facts = {"Python": "3.11", "torch": "2.13", "run.seed": "7"}
    nodes = {"a": facts, "b": facts | {"torch": "2.12"}, "c": {"Python": "3.11", "torch": "2.13"}}
    assert list(differences(nodes)) == [
        "torch: 2.12 on b; 2.13 on a, c",
        "run.seed: its default on c; 7 on a, b",
    ]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.template=raw"], ""),
        (["data.template=chat"], "the chat template of model.path"),
        (
            ["data.template=raw", "validation.template=chat", "data.chat_template=chatml"],
            "data.chat_template=chatml",
        ),
        (
            ["data.template={own}:ask", "data.format={own}:form"],
            "data.format={own}:form, data.template={own}:ask, the chat template of model.path",
        ),
    ],
)
def test_an_error_names_all_that_makes_prompts_of_rows(
    tmp_path: Path, overrides: list[str], told: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text("def ask(problem, row): return problem\ndef form(row): return row\n")
    settings = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    config = load_config([], [*settings, *(text.format(own=own) for text in overrides)])
    assert data_makers(config) == told.format(own=own)


NOT_READ: Any = None
ORIGIN = Origin("model-1", "data-2", "reward-3", hooks="hooks-4", adapter="adapter-5")


def prepared_run(
    origin: Origin, overrides: Sequence[str] = (), validates: bool = True
) -> PreparedRun[Any]:
    """A run with a validation file of one problem."""
    prompt = Prompt("q1", "1+1=", (5, 6), solutions=("2",), task="math")
    files = (ValidationFile("sums", [prompt], 0, ()),) if validates else ()
    settings = ["run.output_dir=o", "model.path=m", "data.train_path=t", *overrides]
    config = load_config([], settings)
    return PreparedRun(config, NOT_READ, NOT_READ, origin, recovery=None, validation=files)


def test_facts_are_the_inputs_and_the_settings_that_are_not_at_their_defaults() -> None:
    facts = facts_of(prepared_run(ORIGIN, ["optimizer.lr=3e-5", "data.prompts_per_step=64"]))
    assert facts.pop("Python") and facts.pop("torch") and facts.pop("rlmath's code (hash)")
    contents = {name: text for name, text in facts.items() if name.endswith(" (contents)")}
    assert contents == {
        "model.path (contents)": "model-1",
        "training data (contents)": "data-2",
        "reward.function (contents)": "reward-3",
        "functions of yours (contents)": "hooks-4",
        "model.adapter_path (contents)": "adapter-5",
    }
    settings = {name: text for name, text in facts.items() if "." in name and "(" not in name}
    assert float(settings["optimizer.lr"]) == 3e-5
    assert settings["data.prompts_per_step"] == "64"
    assert settings["model.path"] == "m" and "run.seed" not in settings
    bare_facts = facts_of(prepared_run(Origin("model-1", "data-2")))
    for name in ("model.adapter_path", "reward.function", "functions of yours"):
        assert bare_facts[f"{name} (contents)"] == "none"


def test_files_that_the_settings_name_are_facts_by_their_contents(tmp_path: Path) -> None:
    """A critic counts where there is one, and a scorer where anything is validated."""
    for name in ("teacher", "critic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    (tmp_path / "own.py").write_text("def score(answer, solutions): return 1.0\n")
    overrides = (
        f"teacher.path={tmp_path}/teacher",
        f"critic.path={tmp_path}/critic",
        f"validation.scorer={tmp_path}/own.py:score",
    )
    files = {
        "teacher.path (contents)": tmp_path / "teacher" / "config.json",
        "critic.path (contents)": tmp_path / "critic" / "config.json",
        "validation.scorer (contents)": tmp_path / "own.py",
    }
    before = facts_of(prepared_run(ORIGIN, [*overrides, "algorithm.advantage=gae"]))
    for name, file in files.items():
        file.write_text(f"{file.read_text()} ")
        after = facts_of(prepared_run(ORIGIN, [*overrides, "algorithm.advantage=gae"]))
        assert [fact for fact in after if after[fact] != before[fact]] == [name]
        before = after
    assert len({before[name] for name in files}) == len(files)
    without = facts_of(prepared_run(ORIGIN, overrides, validates=False))
    assert [name for name in files if name in without] == ["teacher.path (contents)"]


def test_all_data_that_a_rank_has_read_is_compared() -> None:
    fingerprints = [
        prepared_run(ORIGIN).data_read,
        prepared_run(Origin("model-1", "data-6")).data_read,
        prepared_run(ORIGIN, validates=False).data_read,
    ]
    assert len(set(fingerprints)) == 3
    assert prepared_run(Origin("model-7", "data-2")).data_read == fingerprints[0]
