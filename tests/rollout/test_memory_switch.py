from typing import Any

import pytest

from rlmath.rollout.memory import MemorySwitch


class RecordingLLM:
    """Stands for vLLM's `LLM`: writes down what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cache_is_free = True

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.cache_is_free

    def collective_rpc(self, method: str) -> None:
        self.calls.append(method)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")


def cycle(switch: MemorySwitch) -> list[str]:
    states = [switch.state]
    for move in (switch.sleep, switch.wake_weights, switch.wake_kv_cache):
        move()
        states.append(switch.state)
    return states


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("cuda", ["reset_prefix_cache", "sleep 2", "wake ['weights']", "wake ['kv_cache']"]),
        ("cpu", ["reset_prefix_cache", "release_kv_cache", "restore_kv_cache"]),
    ],
)
def test_a_cycle_in_the_right_order(device: str, calls: list[str]):
    llm = RecordingLLM()
    switch = MemorySwitch(llm, device)
    assert cycle(switch) == ["awake", "asleep", "weights", "awake"]
    assert llm.calls == calls
    assert cycle(switch) == ["awake", "asleep", "weights", "awake"]
    assert llm.calls == calls * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("before", "wrong", "message"),
    [
        ([], "wake_weights", "the engine is 'awake'; to wake its weights it must be 'asleep'"),
        ([], "wake_kv_cache", "the engine is 'awake'; to wake its KV cache it must be 'weights'"),
        (["sleep"], "sleep", "the engine is 'asleep'; to sleep it must be 'awake'"),
        (["sleep"], "wake_kv_cache", "the engine is 'asleep'; to wake its KV cache it must be 'weights'"),
        (["sleep", "wake_weights"], "sleep", "the engine is 'weights'; to sleep it must be 'awake'"),
        (
            ["sleep", "wake_weights"],
            "wake_weights",
            "the engine is 'weights'; to wake its weights it must be 'asleep'",
        ),
    ],
)
def test_a_wrong_order_is_an_error_and_touches_nothing(
    device: str, before: list[str], wrong: str, message: str
):
    llm = RecordingLLM()
    switch = MemorySwitch(llm, device)
    for move in before:
        getattr(switch, move)()
    state, calls = switch.state, list(llm.calls)
    with pytest.raises(RuntimeError, match=message):
        getattr(switch, wrong)()
    assert switch.state == state and llm.calls == calls


def test_a_cache_that_is_still_in_use_is_an_error():
    llm = RecordingLLM()
    llm.cache_is_free = False
    switch = MemorySwitch(llm, "cpu")
    with pytest.raises(RuntimeError, match="prefixes of old weights"):
        switch.sleep()
    assert switch.state == "awake"
