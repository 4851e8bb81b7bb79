"""All nodes of a run must be alike: they are compared before anything is started.

meet(rendezvous, facts_of(prepared), seconds)     ValueError on all ranks where nodes differ
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.config.help import as_yaml_word, setting_values
from rlmath.config.load import shown_values
from rlmath.config.schema import Config
from rlmath.distributed.process import code_hash, library_versions
from rlmath.distributed.ranks import RankReport, RendezvousResult, hosts_text, ranks_text
from rlmath.distributed.rendezvous import (
    GLOO_INTERFACE,
    MissingRanksError,
    Rendezvous,
    prefer_for_gloo,
    route_to,
)
from rlmath.planning.reward_checks import data_hooks
from rlmath.run.prepared import PreparedRun
from rlmath.workers.hooks import hooks_fingerprint
from rlmath.workers.user_functions import scorer_hook

logger = logging.getLogger(__name__)

MOST_NODES_NAMED = 16
MOST_CHARACTERS = 200
"""Most characters of a value that differs, in an error."""


def meet_with_mistake(
    rendezvous: Rendezvous, mistake: ValueError | OSError, seconds: float
) -> None:
    """Report a mistake that only this node may see.

    ValueError with the mistakes of all ranks; MissingRanksError after `seconds`."""
    report = RankReport(rendezvous.rank_info.host, rendezvous.rank_info.node, problem=str(mistake))
    try:
        rendezvous.sync("start", report, seconds, check=_compare_nodes)
    except MissingRanksError as error:
        raise MissingRanksError(
            f"{mistake}\nThe other ranks could not be reached: {error}"
        ) from mistake


def meet(
    rendezvous: Rendezvous,
    facts: Mapping[str, str],
    seconds: float,
    *,
    data: str = "",
    data_makers: str = "",
) -> None:
    """Wait for all ranks and compare their nodes before anything is started.

    ValueError, on all ranks, if any rank found a mistake or nodes differ; MissingRanksError if
    ranks are missing after `seconds`. `data` is the fingerprint of the data that this rank has
    read, and `data_makers` names what made them of the rows (`data_makers`)."""
    place = rendezvous.rank_info
    address = ""
    if place.several_nodes:
        route = route_to(os.environ["MASTER_ADDR"])
        prefer_for_gloo(route)
        address = "" if route is None else str(route)
        if route is not None and os.environ.get(GLOO_INTERFACE, route.interface) != route.interface:
            address += f", gloo over {os.environ[GLOO_INTERFACE]}"
    report = RankReport(place.host, place.node, data=data, data_makers=data_makers)
    if place.is_node_leader:
        report = replace(report, facts=facts, address=address)
    rendezvous.sync("start", report, seconds, check=_compare_nodes)


def facts_of(prepared: PreparedRun[Any]) -> dict[str, str]:
    """Facts of a run that must be the same on all nodes, by name.

    Settings are among them if they are not at their defaults."""
    origin = {
        "model.path (contents)": prepared.origin.model,
        "model.adapter_path (contents)": prepared.origin.adapter or "none",
        "training data (contents)": prepared.origin.data,
        "reward.function (contents)": prepared.origin.reward or "none",
        "functions of yours (contents)": prepared.origin.hooks or "none",
    }
    if prepared.validation and (scorer := scorer_hook(prepared.config)) is not None:
        origin["validation.scorer (contents)"] = hooks_fingerprint([scorer])
    values = shown_values(prepared.config)
    defaults = setting_values(Config())
    critic = prepared.config.critic.path if prepared.config.algorithm.advantage == "gae" else None
    for name, path in (("teacher", prepared.config.teacher.path), ("critic", critic)):
        if path is not None:
            origin[f"{name}.path (contents)"] = model_fingerprint(path)
    settings = {key: as_yaml_word(value) for key, value in values.items() if value != defaults[key]}
    return environment_facts() | origin | settings


def data_makers(config: Config) -> str:
    """The functions and template that make prompts or sequences of a run's rows, for errors.

    >>> data_makers(Config())
    'the chat template of model.path'
    """
    makers = [f"{hook.setting}={hook.spec}" for hook in data_hooks(config)]
    words = {config.data.template, config.validation.template}
    if makers or words & {"auto", "chat"}:
        name = config.data.chat_template
        makers.append(
            "the chat template of model.path" if name is None else f"data.chat_template={name}"
        )
    return ", ".join(makers)


def environment_facts() -> dict[str, str]:
    """Facts of the installation that must be the same on all nodes, by name."""
    python = platform.python_version()
    return {"Python": python} | library_versions() | {"rlmath's code (hash)": code_hash()}


# ---------------------------------------------------------------- what rank 0 compares


def _compare_nodes(reports: Mapping[int, RankReport]) -> RendezvousResult:
    """A refusal that lists how nodes differ; otherwise log which ranks are where."""
    nodes = {label: report for label, report in labelled(reports).items() if report.facts}
    problems = list(differences({label: report.facts for label, report in nodes.items()}))
    problems += list(_lonely_loopbacks(nodes))
    if len({report.data for report in reports.values()}) > 1:
        fingerprint = reports[min(reports)].data
        differing_ranks = [rank for rank, report in reports.items() if report.data != fingerprint]
        makers = reports[min(reports)].data_makers or "the files"
        problems.append(
            f"the data: {ranks_text(differing_ranks)} read other prompts than rank {min(reports)}. "
            "What makes them of the rows must give the same for the same row in every process, "
            f"without random numbers and clocks: {makers}"
        )
    if problems:
        text = "\n".join(f"  {problem}" for problem in problems)
        return RendezvousResult(f"The nodes differ, and must be alike in:\n{text}", is_mistake=True)
    for line in node_lines(reports):
        logger.info("%s", line)
    return RendezvousResult()


def labelled(reports: Mapping[int, RankReport]) -> dict[str, RankReport]:
    """One report of each node, by its host's name, or by name and number if nodes share a name."""
    report_of_node: dict[int, RankReport] = {}
    for _, report in sorted(reports.items()):
        report_of_node.setdefault(report.node, report)
    hosts = [report.host for report in report_of_node.values()]
    return {
        report.host if hosts.count(report.host) == 1 else f"{report.host} (node {node})": report
        for node, report in report_of_node.items()
    }


def differences(facts_of_node: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """One line for each fact that differs between nodes: its values and where, the rarest first.

    >>> list(differences({"a": {"torch": "2.13.0"}, "b": {"torch": "2.13.0"}, "c": {"torch": "2.12.1"}}))
    ['torch: 2.12.1 on c; 2.13.0 on a, b']
    """
    for name in dict.fromkeys(name for facts in facts_of_node.values() for name in facts):
        nodes_with: dict[str, list[str]] = {}
        for node, facts in facts_of_node.items():
            default = "its default" if "." in name and "(" not in name else "not there"
            nodes_with.setdefault(facts.get(name, default), []).append(node)
        if len(nodes_with) > 1:
            rarest = sorted(nodes_with.items(), key=lambda pair: len(pair[1]))
            parts = [f"{fact[:MOST_CHARACTERS]} on {hosts_text(nodes)}" for fact, nodes in rarest]
            yield f"{name}: {'; '.join(parts[:MOST_NODES_NAMED])}"


def _lonely_loopbacks(nodes: Mapping[str, RankReport]) -> Iterator[str]:
    """The problem of nodes on which the first node's name resolves to a loopback address.

    It is no problem if all nodes resolve it so."""
    loopback_nodes = [
        node for node, report in nodes.items() if report.address.startswith(("127.", "::1"))
    ]
    if (
        loopback_nodes
        and len(loopback_nodes) < len(nodes)
        and any("gloo over" not in nodes[node].address for node in loopback_nodes)
    ):
        yield (
            f"the name of the first node stands for {nodes[loopback_nodes[0]].address} on "
            f"{hosts_text(loopback_nodes)}, where the "
            f"others cannot come. Correct /etc/hosts there, or set {GLOO_INTERFACE} to the "
            "interface that the others "
            "reach and start torchrun with --local-addr"
        )


def node_lines(reports: Mapping[int, RankReport]) -> list[str]:
    """Lines that say which ranks are on which node, and its address.

    There is a line for each of the first MOST_NODES_NAMED nodes, and none if there is one node."""
    ranks_on: dict[int, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks_on.setdefault(report.node, []).append(rank)
    if len(ranks_on) < 2:
        return []
    lines = [f"{len(ranks_on)} nodes, {len(reports)} ranks:"]
    for label, report in list(labelled(reports).items())[:MOST_NODES_NAMED]:
        lines.append(
            f"  {label}: {ranks_text(ranks_on[report.node])}, {report.address or 'address unknown'}"
        )
    if len(ranks_on) > MOST_NODES_NAMED:
        lines.append(f"  and {len(ranks_on) - MOST_NODES_NAMED} more nodes")
    return lines
