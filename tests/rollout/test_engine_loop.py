"""The loop of an engine's rank between a trainer's messages, around a vLLM without a model.

Weights come from a real sender; trainer and engine are threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmath.algorithms.partial_rollouts import UnfinishedGroup
from rlmath.algorithms.prompt_history import PromptHistory
from rlmath.algorithms.types import (
    Completion,
    PartialCompletion,
    Prompt,
    Score,
    ScoredCompletion,
    Segment,
)
from rlmath.config.schema import (
    Config,
    EnvironmentConfig,
    RewardConfig,
    RolloutConfig,
    ToolsConfig,
    TurnsConfig,
)
from rlmath.data.dataset import Inputs
from rlmath.data.feedback import FeedbackTokens
from rlmath.data.order import PromptOrder
from rlmath.data.tool_formats import open_format
from rlmath.distributed.bridge import Bridge, Mailbox
from rlmath.distributed.collectives import use_run_store
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import RewardWorkers, open_reward_workers
from rlmath.rollout.called_completions import CalledCompletions
from rlmath.rollout.collector import CollectGroups, Collector, Rollout
from rlmath.rollout.engine_loop import EngineLoop, Leader, SamplingPlan
from rlmath.rollout.engine_messages import (
    Admit,
    Continue,
    End,
    GroupDone,
    NewWeights,
    Scored,
    ScoreTokens,
    Snapshot,
    TakeSnapshot,
    WeightsTaken,
)
from rlmath.rollout.engine_turns import EngineTurns, open_turns
from rlmath.rollout.sampling import RolloutSeed, request_seed, training_sampling
from rlmath.rollout.weight_sync.offer import OfferPlans, WeightReceiver, WeightSender
from rlmath.rollout.weight_sync.reshard_plan import plan_sync
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from tests.disturbed_sandboxes import HeldSandboxes, LosingSandboxes, open_light_sandboxes
from tests.rollout.scripted_vllm import (
    CPU,
    PROMPT_IDS,
    TOKENIZER,
    ScriptedLLM,
    scripted_engine,
    tokens_of,
)
from tests.rollout.weight_sync.oracle import SMALL, Layout
from tests.rollout.weight_sync.test_offer import chunk_of

RUN_SEED = 11
PER_STEP = 2
MOST = 30
SHORT = 3
"""New tokens of a completion in the first length stage, and in the second."""
READS_AFTER = 4
"""Steps of vLLM's after which a busy engine reads its messages."""
SECONDS = 20.0
ANSWERS = [tokens_of(f"\\boxed{{{number}}}") for number in range(2)]
LENGTH = len(ANSWERS[0])
LAYOUT = Layout()
TRAINER_MESH = replace(LAYOUT.mesh(1), engine_ranks=1)
ALONE = Mesh(0, 1, 1, 1, engine_size=1)
"""The engines' world where there is one of one rank."""
PROMPTS = [Prompt(f"q{n}", f"{n}=", PROMPT_IDS, ("\\boxed{1}",), task="math") for n in range(8)]
REWARD = RewardConfig(workers=1)
RIGHT = 5.0
"""The reward of a right answer."""


def script(seed: int) -> list[int]:
    return ANSWERS[seed % 2]


@dataclass(frozen=True)
class Arrived:
    """All that the trainer sent before it has arrived."""


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardWorkers]:
    with open_reward_workers(REWARD) as pool:
        yield pool


@dataclass
class Run:
    """A trainer, and an engine whose loop runs in a thread of its own."""

    box: Mailbox
    """The trainer's."""
    sender: WeightSender
    llm: ScriptedLLM
    loop: EngineLoop
    threads: ThreadPoolExecutor
    arrived: Any
    status: Future[int] = field(default_factory=Future)
    """The exit status of the loop."""
    steps: int = 0
    at_step: dict[int, Callable[[], None]] = field(default_factory=dict)
    """What the trainer does before a step of vLLM's, counted from 1."""
    versions: list[int] = field(default_factory=list)
    """The steps of the weights that were taken."""
    messages: list[Any] = field(default_factory=list)

    def on_step(self) -> None:
        self.steps += 1
        if (act := self.at_step.get(self.steps)) is not None:
            act()
            self.box.send(1, Arrived())
            self.arrived.get(timeout=SECONDS)

    def new_weights(self, version: int, step: int) -> None:
        self.sender.offer()
        self.box.send(1, NewWeights(version, step, learned_at=version + 0.5))

    def start(self, *messages: object) -> None:
        """Start with the weights of version 1 and these messages."""
        self.new_weights(1, 0)
        for message in messages:
            self.box.send(1, message)
        self.box.send(1, Arrived())
        self.arrived.get(timeout=SECONDS)
        self.status = self.threads.submit(self.loop.run, self.versions.append)

    def await_messages(self, condition: Callable[[], bool]) -> None:
        """Receive until this is so."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.messages
            if self.status.done():
                raise AssertionError(f"the loop has ended with status {self.status.result()}")
            self.messages += [envelope.message for envelope in self.box.receive(0.1)]

    def await_groups(self, draws: Sequence[int]) -> dict[int, GroupDone]:
        self.await_messages(lambda: set(draws) <= self.groups.keys())
        return self.groups

    def end(self) -> None:
        self.box.send(1, End(3))
        assert self.status.result(SECONDS) == 3

    @property
    def groups(self) -> dict[int, GroupDone]:
        return {message.draw: message for message in self.of(GroupDone)}

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


Opened = Callable[..., Run]


@pytest.fixture
def opened(
    process_group: None, workers: RewardWorkers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """Opens the run that settings of the rollout give."""
    use_run_store(dist.HashStore())
    store = dist.HashStore()
    order = PromptOrder(len(PROMPTS), PER_STEP, seed=1, shuffle=False)
    inputs = Inputs(
        prompts=PROMPTS,
        order=order,
        total_steps=4,
        reports=(),
        history=PromptHistory(0),
        history_line="",
        tokenizer=TOKENIZER,
        stop_token_ids=(TOKENIZER.eos_token_id,),
    )
    plan = plan_sync(SMALL, LAYOUT.training(), TRAINER_MESH, element_bytes=4, bucket_bytes=10**6)
    plans = OfferPlans(first=plan, later=plan)
    runs: list[Run] = []

    with ThreadPoolExecutor(4) as threads:
        bridges = list(
            threads.map(lambda rank: Bridge(store, rank, 2, 1, timeout_seconds=SECONDS), range(2))
        )
        boxes = Mailbox(bridges[0], [1]), Mailbox(bridges[1], [0])

        def open_run(
            mesh: Mesh = ALONE,
            *,
            tools: CalledCompletions | None = None,
            turns: EngineTurns | None = None,
            scripts: Mapping[int, list[int]] = {},
            **settings: Any,
        ) -> Run:
            """`scripts` say what some seeds sample, which is `script` otherwise."""
            rollout = RolloutConfig(
                **{"group_size": 2, "max_num_seqs": 4, "max_new_tokens": MOST} | settings,
                progress_bar=False,
            )
            engine, llm = scripted_engine(
                monkeypatch,
                lambda seed: scripts.get(seed) or script(seed),
                mesh,
                settings=rollout,
                shapes=engine_shapes(SMALL, 1),
            )
            engine.tools = tools
            sender = WeightSender(
                [chunk_of(SMALL, 0, LAYOUT)],
                SMALL,
                plans,
                mesh=TRAINER_MESH,
                device=CPU,
                dtype=torch.float32,
                bridge=bridges[0],
                mailbox=boxes[0],
            )
            long = training_sampling(rollout)
            loop = EngineLoop(
                engine,
                mesh,
                receiver=WeightReceiver(
                    engine.weights, plans, mesh, device=CPU, bridge=bridges[1], mailbox=boxes[1]
                ),
                collector=Collector(
                    engine, mesh, TOKENIZER, rollout=rollout, reward=REWARD, pool=workers
                ),
                plan=SamplingPlan(
                    inputs,
                    rollout,
                    REWARD,
                    sampling_of_stage=[long, replace(long, max_new_tokens=SHORT)],
                    run_seed=RUN_SEED,
                ),
                leader=Leader(boxes[1], workers),
                turns=turns,
            )
            run = Run(
                boxes[0], sender, llm, loop=loop, threads=threads, arrived=boxes[1].box(Arrived)
            )
            engine.on_step = run.on_step
            runs.append(run)
            return run

        yield open_run
        for run in runs:
            run.box.send(1, End(0))  # where a test has failed
            run.sender.close()
        list(threads.map(Mailbox.close, boxes))


def seeds_of(draw: int, samples: int = 2) -> list[int]:
    """The seeds of a draw's completions; prompts are drawn in their order."""
    return [request_seed(RUN_SEED, draw // PER_STEP, f"q{draw}", g) for g in range(samples)]


def tokens(group: GroupDone) -> list[list[int]]:
    return [list(sample.completion.token_ids) for sample in group.samples]


def test_an_engine_draws_what_is_admitted_in_the_lengths_of_its_stage(opened: Opened) -> None:
    """A run that goes on begins behind the draws that engines have begun before it."""
    run = opened()
    run.start(Admit(3, 6, 0))
    run.await_groups([3, 4, 5])
    run.box.send(1, Admit(3, 7, 1))
    groups = run.await_groups([6])
    run.end()
    assert sorted(groups) == [3, 4, 5, 6]
    for draw, group in groups.items():
        most = SHORT if draw == 6 else MOST
        assert tokens(group) == [script(seed)[:most] for seed in seeds_of(draw)]
        for sample, seed in zip(group.samples, seeds_of(draw), strict=True):
            assert sample.score.correct == (seed % 2 == 1 and draw != 6)
            assert sample.completion.finish_reason == ("length" if draw == 6 else "stop")
    assert run.versions == [0]
    assert run.llm.prefix_resets == 1


def test_an_engine_with_many_places_leaves_the_others_their_share(opened: Opened) -> None:
    """One of two engines takes three of six draws, and two of what is left at its next look."""
    run = opened(Mesh(0, 2, 1, 1, engine_size=1), max_num_seqs=16)
    begun: list[int] = []
    for step in (1, READS_AFTER + 1):
        run.at_step[step] = lambda: begun.append(len(run.llm.begun) // 2)
    run.start(Admit(0, 6, 0))
    groups = run.await_groups(range(6))
    run.end()
    assert begun == [3, 5]
    assert all(tokens(groups[n]) == [script(seed) for seed in seeds_of(n)] for n in groups)


def test_groups_of_an_earlier_start_go_on_before_new_ones(opened: Opened) -> None:
    """What is finished of them is not sampled again; tokens keep the version that sampled them."""
    run = opened(max_concurrent_sequences=2)
    seeds = seeds_of(5)
    early = PartialCompletion(script(seeds[0])[:4], (-1.0,) * 4, (Segment(4, 0, 0),))
    done = ScoredCompletion(
        Completion(1, (9,), (-1.0,), "", finish_reason="stop", policy_version=0),
        Score(0.25, False, "", "function"),
    )
    run.start(Continue([UnfinishedGroup(5, 2, (early, done))], 0), Admit(6, 7, 0))
    groups = run.await_groups([5, 6])
    run.end()
    assert [len(request.prompt["prompt_token_ids"]) for request in run.llm.begun] == [
        len(PROMPT_IDS) + 4,
        len(PROMPT_IDS),
        len(PROMPT_IDS),
    ]
    sampled, finished = groups[5].samples
    assert finished == done
    assert list(sampled.completion.token_ids) == script(seeds[0])
    assert sampled.completion.segments == (Segment(4, 0, 0), Segment(LENGTH - 4, 1, 0))


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
def test_new_weights_come_to_completions_in_flight(opened: Opened, mode: str) -> None:
    """Two completions have READS_AFTER tokens; a second group begins with the new weights."""
    run = opened(on_new_weights=mode, max_concurrent_sequences=2)
    run.at_step[READS_AFTER] = lambda: run.new_weights(4, 2)
    run.start(Admit(0, 2, 0))
    groups = run.await_groups([0, 1])
    run.end()
    whole = {draw: [script(seed) for seed in seeds_of(draw)] for draw in (0, 1)}
    assert {draw: tokens(group) for draw, group in groups.items()} == whole
    old_tokens = LENGTH if mode == "finish" else READS_AFTER
    segments = [Segment(old_tokens, 1, 0)]
    if mode != "finish":
        segments.append(Segment(LENGTH - READS_AFTER, 4, 2))
    for sample in groups[0].samples:
        assert sample.completion.segments == tuple(segments)
    for sample in groups[1].samples:
        assert sample.completion.segments == (Segment(LENGTH, 4, 2),)
    assert run.versions == [0, 2]
    first, second = run.of(WeightsTaken)
    assert (first.version, first.learned_at, first.new_tokens) == (1, 1.5, 0)
    assert (second.version, second.learned_at) == (4, 4.5)
    assert (second.new_tokens, second.running) == (2 * old_tokens, 2.0)
    assert 0 < second.busy_seconds <= second.seconds and second.transfer_seconds > 0
    assert second.interrupted == (0 if mode == "finish" else 2)
    assert second.prefilled_again_tokens == (2 * READS_AFTER if mode == "recompute" else 0)
    assert len(run.llm.begun) == (6 if mode == "recompute" else 4)
    assert run.llm.prefix_resets == (1 if mode == "keep" else 2)
    salts = [request.prompt.get("cache_salt") for request in run.llm.begun]
    assert salts == (["1", "1", "4", "4"] if mode == "keep" else [None] * len(salts))


def test_of_two_versions_without_a_token_between_them_the_second_is_reported(
    opened: Opened,
) -> None:
    """The report's time is that of both."""
    run = opened()
    time.sleep(0.1)
    run.start()
    run.await_messages(lambda: run.versions == [0])
    time.sleep(0.1)
    run.new_weights(4, 2)
    run.box.send(1, Admit(0, 1, 0))
    groups = run.await_groups([0])
    run.end()
    for sample in groups[0].samples:
        assert sample.completion.segments == (Segment(LENGTH, 4, 2),)
    (report,) = run.of(WeightsTaken)
    assert (report.version, report.learned_at, report.new_tokens) == (4, 4.5, 0)
    assert report.seconds >= 0.2


@pytest.mark.parametrize("waits", [False, True], ids=["recompute", "weights-wait"])
def test_what_is_asked_between_two_steps_changes_no_completion(opened: Opened, waits: bool) -> None:
    """A snapshot, scores of tokens and a validation; all but the first come behind weights."""
    run = opened(on_new_weights="finish" if waits else "recompute", max_concurrent_sequences=2)
    collection = CollectGroups(
        PROMPTS[6:], replace(training_sampling(RolloutConfig()), samples=1), RolloutSeed(2, 0), ""
    )

    def ask() -> None:
        if waits:
            run.new_weights(2, 1)
        for message in (ScoreTokens([[1, 2, 3], [4, 5]]), collection, TakeSnapshot()):
            run.box.send(1, message)

    run.at_step[READS_AFTER] = ask
    run.start(Admit(0, 1, 0))
    groups = run.await_groups([0])
    run.await_messages(lambda: bool(run.of(Rollout) and run.of(Snapshot)))
    run.end()
    assert tokens(groups[0]) == [script(seed) for seed in seeds_of(0)]
    (snapshot,) = run.of(Snapshot)
    assert [list(sample.token_ids) for sample in snapshot.samples[0]] == [
        script(seed)[:READS_AFTER] for seed in seeds_of(0)
    ]
    (scored,) = run.of(Scored)
    assert scored == Scored(0, [[-2 / 8, -3 / 8], [-5 / 8]])
    (rollout,) = run.of(Rollout)
    assert [group.prompt for group in rollout.groups] == PROMPTS[6:]
    for group in rollout.groups:
        seed = request_seed(2, 0, group.prompt.prompt_id, 0)
        assert list(group.completions[0].token_ids) == script(seed)
        assert group.completions[0].segments[0].policy_version == (2 if waits else 1)


# ---------------------------------------------------------------- calls of tools

TOOLS = ToolsConfig(format="fence", max_output_tokens=64, cores=1)
FORMAT = open_format(TOKENIZER, TOOLS)
CALL_IDS = tokens_of("```python\nn=globals().get('n',0)+1;n\n```")[:-1]
"""It shows how many calls its session has had."""
OUTPUT_IDS = FORMAT.outputs(CALL_IDS, FORMAT.calls_in(CALL_IDS), ["1\n"]).token_ids
CALLING = [*CALL_IDS, *OUTPUT_IDS, *ANSWERS[1]]
"""A completion that calls once, with what is given between."""
LONG = tokens_of("x" * (len(CALL_IDS) + 30))
IS_OUT = len(CALL_IDS)
"""Steps of vLLM's after which a call is out that was begun at first."""
NEWS = READS_AFTER * (IS_OUT // READS_AFTER + 2)
"""A step after which messages are read, some steps after that."""
LONGEST = 99


@pytest.fixture
def sandboxes() -> Iterator[HeldSandboxes]:
    holding = HeldSandboxes(open_light_sandboxes(TOOLS))
    yield holding
    holding.close()


def called_by(sandboxes: Any) -> CalledCompletions:
    return CalledCompletions(TOOLS, FORMAT, sandboxes)


def call_segments(version: int, step: int) -> tuple[Segment, Segment]:
    """The segments of a call and of its output, which stands under the call's version."""
    return (
        Segment(len(CALL_IDS), version, step),
        Segment(len(OUTPUT_IDS), version, step, sampled=False),
    )


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
def test_new_weights_come_to_completions_that_decode_that_wait_for_a_call_and_that_had_one(
    opened: Opened, sandboxes: HeldSandboxes, mode: str
) -> None:
    """A completion that waits has its result when the others of its group have ended.

    Till then nothing else begins, as it keeps its place."""
    decoding, waiting, resumed = seeds_of(0, 3)
    scripts = {decoding: LONG, waiting: CALLING, resumed: CALLING}
    sandboxes.held |= {"0/1", "0/2"}
    run = opened(
        tools=called_by(sandboxes),
        scripts=scripts,
        on_new_weights=mode,
        group_size=3,
        max_num_seqs=8,
        max_new_tokens=LONGEST,
        max_concurrent_sequences=3,
    )

    def let_one_go() -> None:
        sandboxes.await_result("0/2")
        sandboxes.held.remove("0/2")

    run.at_step[IS_OUT + 1] = let_one_go
    run.at_step[NEWS] = lambda: run.new_weights(4, 2)
    run.start(Admit(0, 2, 0))
    run.await_messages(lambda: run.steps > len(LONG) + 2)
    assert run.versions == ([0] if mode == "finish" else [0, 2])
    assert run.groups == {} and len(run.llm.begun) == (6 if mode == "recompute" else 4)
    sandboxes.held.clear()
    groups = run.await_groups([0, 1])
    run.end()

    assert tokens(groups[0]) == [LONG, CALLING, CALLING]
    samples = groups[0].samples
    assert [sample.score.correct for sample in samples] == [False, True, True]
    for sample in samples[1:]:
        (call,) = sample.completion.calls
        assert (call.output, call.status) == ("1\n", "ok")
    answered = NEWS - IS_OUT - 1
    """Tokens behind the output that came first, when the weights come."""
    segments = [sample.completion.segments for sample in samples]
    if mode == "finish":
        whole = (*call_segments(1, 0), Segment(LENGTH, 1, 0))
        assert segments == [(Segment(len(LONG), 1, 0),), whole, whole]
    else:
        assert segments == [
            (Segment(NEWS, 1, 0), Segment(len(LONG) - NEWS, 4, 2)),
            (*call_segments(1, 0), Segment(LENGTH, 4, 2)),
            (*call_segments(1, 0), Segment(answered, 1, 0), Segment(LENGTH - answered, 4, 2)),
        ]
    for sample in groups[1].samples:
        assert sample.completion.segments == (Segment(LENGTH, 4, 2),)
    assert run.versions == [0, 2]

    report = run.of(WeightsTaken)[1]
    resumed_tokens = len(CALL_IDS) + len(OUTPUT_IDS) + answered
    new_tokens = NEWS + 2 * IS_OUT + answered
    if mode == "finish":
        new_tokens = len(LONG) + 2 * (IS_OUT + LENGTH)
    assert report.new_tokens == new_tokens
    assert report.running * (len(LONG) + LENGTH if mode == "finish" else NEWS) == pytest.approx(
        new_tokens
    )
    assert report.interrupted == (0 if mode == "finish" else 3)
    prefilled = {"recompute": NEWS + IS_OUT + resumed_tokens, "keep": IS_OUT, "finish": 0}
    assert report.prefilled_again_tokens == prefilled[mode]
    assert (report.waiting_seconds > 0) == (mode == "finish")
    if mode == "keep":
        salts = [request.prompt["cache_salt"] for request in run.llm.begun]
        assert salts == ["1"] * 4 + ["4"] * 4, "what waited begins under the new version"


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
def test_new_weights_come_while_all_completions_wait_for_calls(
    opened: Opened, sandboxes: HeldSandboxes, mode: str
) -> None:
    """They are reported with the first token that they sample; with "finish" they wait, too."""
    (seed,) = seeds_of(0, 1)
    sandboxes.held.add("0/0")
    run = opened(
        tools=called_by(sandboxes),
        scripts={seed: CALLING},
        on_new_weights=mode,
        group_size=1,
        max_new_tokens=LONGEST,
    )
    run.at_step[IS_OUT + 1] = lambda: run.new_weights(4, 2)
    versions = [0, 2]
    if mode != "finish":
        run.at_step[IS_OUT + 4] = lambda: run.new_weights(6, 3)
        versions.append(3)
    run.start(Admit(0, 1, 0))
    run.await_messages(lambda: run.steps > IS_OUT + 6)
    assert run.versions == ([0] if mode == "finish" else versions)
    assert len(run.of(WeightsTaken)) == 1
    sandboxes.held.clear()
    groups = run.await_groups([0])
    run.await_messages(lambda: run.versions == versions)
    run.end()
    (sample,) = groups[0].samples
    assert list(sample.completion.token_ids) == CALLING
    last = Segment(LENGTH, 1, 0) if mode == "finish" else Segment(LENGTH, 6, 3)
    assert sample.completion.segments == (*call_segments(1, 0), last)
    if mode == "finish":
        return
    _, report = run.of(WeightsTaken)
    assert (report.version, report.interrupted) == (6, 1)
    assert report.prefilled_again_tokens == len(CALL_IDS)
    assert 0 < report.waiting_seconds < report.seconds


def test_what_is_asked_while_a_call_runs_changes_no_completion(
    opened: Opened, sandboxes: HeldSandboxes
) -> None:
    """A validation's completion has the same name, calls too, and waits as the first has its result."""
    decoding, waiting = seeds_of(0)
    validated = request_seed(2, 0, "q0", 1)
    scripts = {decoding: LONG, waiting: CALLING, validated: CALLING}
    sandboxes.held.add("0/1")
    run = opened(
        tools=called_by(sandboxes),
        scripts=scripts,
        max_new_tokens=LONGEST,
        max_concurrent_sequences=2,
    )
    collection = CollectGroups(
        PROMPTS[:1], training_sampling(RolloutConfig(group_size=2)), RolloutSeed(2, 0), ""
    )

    def ask() -> None:
        for message in (TakeSnapshot(), ScoreTokens([[1, 2, 3]]), collection):
            run.box.send(1, message)

    run.at_step[NEWS] = ask

    def let_go() -> None:
        sandboxes.await_result("0/1")
        sandboxes.held.clear()

    run.at_step[NEWS + IS_OUT] = let_go
    run.start(Admit(0, 1, 0))
    groups = run.await_groups([0])
    run.end()
    assert tokens(groups[0]) == [LONG, CALLING]
    (snapshot,) = run.of(Snapshot)
    assert [list(sample.token_ids) for sample in snapshot.samples[0]] == [LONG[:NEWS], CALL_IDS]
    assert not any(sample.calls for sample in snapshot.samples[0])
    assert run.of(Scored) == [Scored(0, [[-2 / 8, -3 / 8]])]
    (rollout,) = run.of(Rollout)
    ((_, calling),) = (group.completions for group in rollout.groups)
    assert list(calling.token_ids) == CALLING
    outputs = [calling.calls[0].output, groups[0].samples[1].completion.calls[0].output]
    assert outputs == ["1\n", "1\n"], "each has a session of its own"


def test_a_completion_of_an_earlier_start_that_ends_in_a_call_calls_again(
    opened: Opened, sandboxes: HeldSandboxes
) -> None:
    """One that was in the middle of its call goes on with that."""
    calling, in_a_call = seeds_of(5)
    parts = [
        PartialCompletion(CALL_IDS[:most], (-1.0,) * most, (Segment(most, 0, 0),))
        for most in (len(CALL_IDS), 4)
    ]
    run = opened(
        tools=called_by(sandboxes),
        scripts={calling: CALLING, in_a_call: CALLING},
        max_new_tokens=LONGEST,
        max_concurrent_sequences=2,
    )
    run.start(Continue([UnfinishedGroup(5, 2, tuple(parts))], 0), Admit(6, 6, 0))
    groups = run.await_groups([5])
    run.end()
    assert tokens(groups[5]) == [CALLING, CALLING]
    first, second = (sample.completion for sample in groups[5].samples)
    assert first.segments == (*call_segments(0, 0), Segment(LENGTH, 1, 0))
    assert second.segments == (
        Segment(4, 0, 0),
        *(
            Segment(len(CALL_IDS) - 4, 1, 0),
            Segment(len(OUTPUT_IDS), 1, 0, sampled=False),
            Segment(LENGTH, 1, 0),
        ),
    )


def test_a_completion_that_loses_its_call_ends_and_its_group_is_done(opened: Opened) -> None:
    """Its reason is told; the other one of its group is as without it."""
    losing, calling = seeds_of(0)
    losing_sandboxes = LosingSandboxes(open_light_sandboxes(TOOLS), "0/0")
    run = opened(
        tools=called_by(losing_sandboxes),
        scripts={losing: CALLING, calling: CALLING},
        max_new_tokens=LONGEST,
    )
    run.start(Admit(0, 1, 0))
    groups = run.await_groups([0])
    run.end()
    losing_sandboxes.close()
    lost, judged = (sample.completion for sample in groups[0].samples)
    assert lost.is_lost and list(lost.token_ids) == CALL_IDS
    assert "killed" in lost.calls[-1].output
    assert list(judged.token_ids) == CALLING and judged.finish_reason == "stop"


HINT = "No."
HINT_IDS = list(FeedbackTokens(TOKENIZER, 64, ["0="]).behind("0=", HINT).token_ids)
TWICE = [*ANSWERS[0], *HINT_IDS, *ANSWERS[1]]
"""A wrong answer, what follows it, and a right one."""
PATIENT = f"""
import pathlib, time

def hints(texts, row, turn):
    while not pathlib.Path(__file__).with_name("gate").exists():
        time.sleep(0.01)
    return None if turn == 2 else "{HINT}"
"""
"""An environment that answers once there is a file."""


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[EngineTurns]:
    (tmp_path / "own.py").write_text(PATIENT)
    config = Config(
        turns=TurnsConfig(discount=0.5),
        environment=EnvironmentConfig(function=f"{tmp_path}/own.py:hints", workers=1),
    )
    engine_turns = open_turns(
        config,
        TOKENIZER,
        ALONE,
        [prompt.text for prompt in PROMPTS],
        continues_noise=True,
        stop_token_ids=(TOKENIZER.eos_token_id,),
    )
    assert engine_turns is not None
    yield engine_turns
    engine_turns.close()


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
def test_new_weights_and_a_snapshot_come_while_a_turn_waits_for_what_follows(
    opened: Opened, turns: EngineTurns, tmp_path: Path, mode: str
) -> None:
    (seed,) = seeds_of(0, 1)
    run = opened(
        turns=turns,
        scripts={seed: TWICE},
        on_new_weights=mode,
        group_size=1,
        max_new_tokens=LONGEST,
    )

    def ask() -> None:
        run.new_weights(4, 2)
        run.box.send(1, TakeSnapshot())

    run.at_step[LENGTH + 2] = ask
    run.start(Admit(0, 1, 0))
    run.await_messages(lambda: bool(run.of(Snapshot)))
    assert run.versions == ([0] if mode == "finish" else [0, 2])
    (snapshot,) = run.of(Snapshot)
    (waited,) = snapshot.samples[0]
    assert list(waited.token_ids) == ANSWERS[0] and waited.calls == ()
    (tmp_path / "gate").touch()
    groups = run.await_groups([0])
    run.end()
    (sample,) = groups[0].samples
    assert list(sample.completion.token_ids) == TWICE
    last = Segment(LENGTH, 1, 0) if mode == "finish" else Segment(LENGTH, 4, 2)
    given_segment = Segment(len(HINT_IDS), 1, 0, sampled=False)
    assert sample.completion.segments == (Segment(LENGTH, 1, 0), given_segment, last)
    assert sample.completion.retries == 1 and sample.score.correct
    assert sample.score.reward == RIGHT / 2


def test_a_turn_of_an_earlier_start_waits_again(
    opened: Opened, turns: EngineTurns, tmp_path: Path
) -> None:
    (seed,) = seeds_of(5, 1)
    waited = PartialCompletion(ANSWERS[0], (-1.0,) * LENGTH, (Segment(LENGTH, 0, 0),))
    run = opened(turns=turns, scripts={seed: TWICE}, group_size=1, max_new_tokens=LONGEST)
    (tmp_path / "gate").touch()
    run.start(Continue([UnfinishedGroup(5, 2, (waited,))], 0), Admit(6, 6, 0))
    groups = run.await_groups([5])
    run.end()
    (sample,) = groups[5].samples
    assert list(sample.completion.token_ids) == TWICE
    assert [segment.policy_version for segment in sample.completion.segments] == [0, 0, 1]
