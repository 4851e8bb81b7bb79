"""What must be alike on all nodes, and is looked at once, when a run starts.

Every rank has checked settings and files by itself; here the nodes are compared. One rank of every node says what its
node has, rank 0 compares, and all ranks end with the same error where nodes differ.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist

from rlmath.config import Config
from rlmath.parallel.collectives import to_rank_zero
from rlmath.parallel.meeting import Meeting
from rlmath.parallel.names import hosts_text, ranks_text
from rlmath.parallel.network import GLOO_INTERFACE, Route, prefer, route_to
from rlmath.parallel.place import Decision, Place, Word, my_place
from rlmath.prepared import Prepared
from rlmath.settings import as_yaml_word, setting_values
from rlmath.versions import code_hash, library_versions

logger = logging.getLogger(__name__)

MOST_NODES_TOLD = 16
CLOCK_SECONDS = 2.0
"""Clocks of nodes that differ by more are warned of: lines of several logs cannot be put in order any more, and a
shared disk's times mislead. Nothing that a run computes depends on them."""
MOST_CHARACTERS = 200
"""Of a value that differs, in an error."""


def meet_with_mistake(meeting: Meeting, mistake: ValueError | OSError, seconds: float) -> None:
    """Tell what only this node may see. Raises ValueError with what all ranks found."""
    word = Word(meeting.place.host, meeting.place.node, problem=str(mistake))
    meeting.roll_call("start", word, seconds, _judge)


def meet(meeting: Meeting, facts: Mapping[str, str], seconds: float) -> None:
    """Come together before anything is started. ValueError, on all ranks, where any rank found a mistake or nodes
    differ; NotAllHere where ranks are missing after `seconds`."""
    route = None
    if meeting.place.several_nodes:
        route = route_to(os.environ["MASTER_ADDR"])
        prefer(route)
    meeting.roll_call("start", _word(meeting.place, facts, route), seconds, _judge)


def _word(place: Place, facts: Mapping[str, str], route: Route | None) -> Word:
    if not place.speaks_for_node:
        return Word(place.host, place.node)
    address = "" if route is None else str(route)
    if route is not None and os.environ.get(GLOO_INTERFACE, route.interface) != route.interface:
        address += f", gloo over {os.environ[GLOO_INTERFACE]}"
    return Word(place.host, place.node, facts=facts, address=address)


def facts_of(prepared: Prepared) -> dict[str, str]:
    """What of a run must be the same on all nodes, by name."""
    origin = {
        "model.path (contents)": prepared.origin.model,
        "training data (contents)": prepared.origin.data,
    }
    return environment_facts() | origin | _settings(prepared.config)


def environment_facts() -> dict[str, str]:
    """What of the installation must be the same on all nodes, by name."""
    python = platform.python_version()
    return {"Python": python} | library_versions() | {"rlmath's code (hash)": code_hash()}


def _settings(config: Config) -> dict[str, str]:
    """Those that are not at their defaults."""
    values, defaults = setting_values(config), setting_values(Config())
    return {key: as_yaml_word(value) for key, value in values.items() if value != defaults[key]}


# ---------------------------------------------------------------- what rank 0 makes of it


def _judge(said: Mapping[int, Word]) -> Decision:
    nodes = {label: word for label, word in labelled(said).items() if word.facts}
    problems = list(differences({label: word.facts for label, word in nodes.items()}))
    problems += list(_lonely_loopbacks(nodes))
    if problems:
        told = "\n".join(f"  {problem}" for problem in problems)
        return Decision(f"The nodes are not alike, and they must be:\n{told}", is_mistake=True)
    for line in node_lines(said):
        logger.info("%s", line)
    return Decision()


def labelled(said: Mapping[int, Word]) -> dict[str, Word]:
    """One word of each node, by its host's name; with its number where several nodes have one name."""
    first: dict[int, Word] = {}
    for _, word in sorted(said.items()):
        first.setdefault(word.node, word)
    hosts = [word.host for word in first.values()]
    return {
        word.host if hosts.count(word.host) == 1 else f"{word.host} (node {node})": word
        for node, word in first.items()
    }


def differences(facts_of_node: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """One line for each fact that is not the same on all nodes: what it is where, the rarest first.

    >>> list(differences({"a": {"torch": "2.13.0"}, "b": {"torch": "2.13.0"}, "c": {"torch": "2.12.1"}}))
    ['torch: 2.12.1 on c; 2.13.0 on a, b']
    """
    for name in dict.fromkeys(name for facts in facts_of_node.values() for name in facts):
        nodes_with: dict[str, list[str]] = {}
        for node, facts in facts_of_node.items():
            default = "its default" if "." in name and "(" not in name else "not there"
            nodes_with.setdefault(facts.get(name, default), []).append(node)
        if len(nodes_with) > 1:
            rarest = sorted(nodes_with.items(), key=lambda one: len(one[1]))
            parts = [f"{value[:MOST_CHARACTERS]} on {hosts_text(nodes)}" for value, nodes in rarest]
            yield f"{name}: {'; '.join(parts[:MOST_NODES_TOLD])}"


def _lonely_loopbacks(nodes: Mapping[str, Word]) -> Iterator[str]:
    """Nodes that think they reach the first one within themselves, while others come from outside."""
    inside = [node for node, word in nodes.items() if word.address.startswith(("127.", "::1"))]
    if inside and len(inside) < len(nodes) and any("gloo over" not in nodes[node].address for node in inside):
        yield (
            f"the name of the first node stands for {nodes[inside[0]].address} on {hosts_text(inside)}, where the "
            f"others cannot come. Correct /etc/hosts there, or set {GLOO_INTERFACE} to the interface that the others "
            "reach and start torchrun with --local-addr"
        )


def node_lines(said: Mapping[int, Word]) -> list[str]:
    """Which ranks are where, by which address: a line for each of the first nodes; none where there is only one."""
    ranks_on: dict[int, list[int]] = {}
    for rank, word in sorted(said.items()):
        ranks_on.setdefault(word.node, []).append(rank)
    if len(ranks_on) < 2:
        return []
    lines = [f"{len(ranks_on)} nodes, {len(said)} ranks:"]
    for label, word in list(labelled(said).items())[:MOST_NODES_TOLD]:
        lines.append(f"  {label}: {ranks_text(ranks_on[word.node])}, {word.address or 'address unknown'}")
    if len(ranks_on) > MOST_NODES_TOLD:
        lines.append(f"  and {len(ranks_on) - MOST_NODES_TOLD} more nodes")
    return lines


# ---------------------------------------------------------------- clocks


def compare_clocks() -> None:
    """Warn, on rank 0, of nodes whose clocks differ. A collective, once at the start of a run on several nodes."""
    place = my_place()
    if not place.several_nodes:
        return
    dist.barrier()
    mine = (place.host, time.time()) if place.speaks_for_node else None
    for line in clock_warnings([one for one in to_rank_zero(mine) or [] if one is not None]):
        logger.warning("%s", line)


def clock_warnings(clocks: Sequence[tuple[str, float]]) -> list[str]:
    """What to tell of clocks that were read at the same moment, of (host, seconds since 1970); the first is the
    measure.

    >>> clock_warnings([("a", 100.0), ("b", 100.4), ("c", 131.0)])
    ['The clocks of nodes differ from that of a: c by +31.0 s. Let them keep time (chrony, NTP)']
    """
    off = [(host, at - clocks[0][1]) for host, at in clocks if abs(at - clocks[0][1]) > CLOCK_SECONDS]
    if not off:
        return []
    told = hosts_text([f"{host} by {seconds:+.1f} s" for host, seconds in off])
    return [
        f"The clocks of nodes differ from that of {clocks[0][0]}: {told}. Let them keep time (chrony, NTP)"
    ]
