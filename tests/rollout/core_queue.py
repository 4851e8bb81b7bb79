"""The requests of a vLLM core that runs no model, for tests of what is around it."""

from __future__ import annotations

from typing import Any

from rlmath.rollout.engine import prepare_environment

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # noqa: E402


class CoreQueue:
    """Requests that wait for one of `places`, and those that run, as vLLM's scheduler has them."""

    def __init__(self, places: int) -> None:
        self.requests: dict[str, Any] = {}
        self.waiting = FCFSRequestQueue()
        self._running: list[Any] = []
        self._places = places

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self._remove(self.requests[name])

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), len(self.waiting)

    def _add(self, core_request: Any) -> None:
        self.requests[core_request.request_id] = core_request
        self.waiting.add_request(core_request)

    def _begin_waiting(self) -> list[Any]:
        """Let those run for which there are places."""
        begun = []
        while self.waiting and len(self._running) < self._places:
            begun.append(self.waiting.pop_request())
            self._running.append(begun[-1])
        return begun

    def _remove(self, core_request: Any) -> None:
        del self.requests[core_request.request_id]
        if core_request in self._running:
            self._running.remove(core_request)
        else:
            self.waiting.remove_request(core_request)
