"""What a run tells of its nodes, and what it names where they have read other data."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.distributed.ranks import RankReport
from rlmath.run.nodes import MOST_NODES_NAMED, data_makers, differences, node_lines


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
