"""Completions that go on behind finished answers, around a vLLM that runs no model.

Scorer and environment are real, in their workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmath.algorithms.types import (
    FEEDBACK,
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    Prompt,
    Score,
)
from rlmath.cli.make_arithmetic import NOT_RIGHT
from rlmath.config.schema import Config, EnvironmentConfig, RewardConfig, TurnsConfig
from rlmath.data.chat import render, user
from rlmath.data.feedback import FeedbackTokens
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import RewardManager, RewardWorkers, open_reward_workers
from rlmath.rollout.engine import prepare_environment
from rlmath.rollout.engine_turns import EngineTurns, open_turns
from rlmath.rollout.finished_turns import (
    WRONG_ANSWER,
    Feedback,
    FinishedTurns,
    SharedReplies,
    TurnOutcome,
    _warn_of_end,
    verdict_text,
)
from rlmath.rollout.sampling import Key, Request
from tests.data.chat_templates import CHATS
from tests.data.tool_chat_templates import byte_tokenizer

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.distributed import parallel_state  # noqa: E402

from rlmath.rollout.running_completions import Ended  # noqa: E402
from tests.rollout.test_running_completions import Core, running_of  # noqa: E402

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
CHAT = byte_tokenizer()
CHAT.chat_template = CHATS["qwen2.5"].template
CHAT_END = CHAT.convert_tokens_to_ids("<|im_end|>")
PLAIN = Prompt("q", "6x7=", (5,), ("\\boxed{42}",), "math", '{"level": 3}')
CHATTED = replace(PLAIN, text=render([user("6x7=")], CHAT, "the prompt of a chat"))
SCALE = 5.0
MESH = Mesh(0, 1, 1, pipeline=1, engine_size=1)
SOURCE = """
import os, time

def hints(texts, row, turn):
    assert row["level"] == 3 and len(texts) == 2 * turn - 1, texts
    if "42" in texts[-1]:
        return None, {"turns": turn}
    return f"Hint {turn}: not {texts[-1]!r}", {"hints": 1}

def shows(texts, row, turn):
    return "|".join(texts)

def breaks(texts, row, turn):
    if "42" in texts[-1]:
        return None
    if "1" in texts[-1]:
        os._exit(3)
    if "2" in texts[-1]:
        time.sleep(600)
    raise RuntimeError("no licence")
"""


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardWorkers]:
    with open_reward_workers(RewardConfig()) as workers:
        yield workers


def answer(text: str, end: int = END) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], end]


class AnsweringCore(Core):
    """A core that samples these answers of one request, each in a step."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._steps = iter([{1: list(token_ids)} for token_ids in answers])


def sampled(
    turns: FinishedTurns,
    answers: Sequence[Sequence[int]],
    prompt: Prompt = PLAIN,
    most: int = 999,
    slice_tokens: int | None = None,
    so_far: PartialCompletion = NOTHING_SAMPLED,
) -> tuple[Ended, Completion | None]:
    """(how a completion ends whose turns are these, the completion that is scored)."""
    scored: list[Completion] = []
    running = running_of(AnsweringCore(answers), turns, TOKENIZER)  # type: ignore[arg-type]
    running._score = lambda request, completion: scored.append(completion)
    asked = Request((0, 0), prompt.token_ids, 1, min_new_tokens=0, max_new_tokens=most)
    (ended,) = running.sample([replace(asked, slice_tokens=slice_tokens, so_far=so_far)])
    return ended, scored[0] if scored else None


def turns_of(
    settings: TurnsConfig,
    scorer: RewardWorkers,
    prompt: Prompt = PLAIN,
    discount: float = 1.0,
) -> FinishedTurns:
    tokenizer = CHAT if prompt is CHATTED else TOKENIZER
    stops = (END, CHAT_END)
    config = Config(turns=settings)
    engine_turns = open_turns(
        config, tokenizer, MESH, [prompt.text], continues_noise=True, stop_token_ids=stops
    )
    assert engine_turns is not None
    rewards = RewardManager(scorer, RewardConfig(), 999, discount=discount)
    turns = engine_turns.of_rollout(lambda key: prompt, rewards, validates=False)
    assert turns is not None
    return turns


VERDICT = TurnsConfig(feedback="verdict", max=3)


def test_a_wrong_answer_is_told_so_until_one_is_right(scorer: RewardWorkers) -> None:
    turns = turns_of(replace(VERDICT, max=4), scorer, discount=0.5)
    texts = ("So \\boxed{41}", "I say", "So \\boxed{42}")
    ended, scored = sampled(turns, list(map(answer, texts)))
    assert scored == ended.completion
    sentences = ["The answer 41 is not right. Try again.", "No final answer was found. Try again."]
    assert [call.output for call in scored.calls] == sentences
    assert {call.status for call in scored.calls} == {FEEDBACK}
    assert TOKENIZER.decode(scored.token_ids, skip_special_tokens=False) == (
        f"So \\boxed{{41}}<|endoftext|>\n{sentences[0]}\nI say<|endoftext|>\n{sentences[1]}\n"
        "So \\boxed{42}<|endoftext|>"
    )
    assert scored.turns == ["So \\boxed{41}\n", "I say\n", "So \\boxed{42}"]
    assert scored.answer_text == scored.last_answer == "So \\boxed{42}"
    assert scored.finish_reason == "stop" and scored.retries == 2
    assert scored.n_sampled == sum(len(answer(text)) for text in texts)
    assert [segment.sampled for segment in scored.segments] == [True, False, True, False, True]
    assert scored.sampled is not None
    pairs = zip(scored.logprobs, scored.sampled, strict=True)
    assert {logprob for logprob, is_sampled in pairs if not is_sampled} == {0.0}
    score = turns.scores[0, 0]
    assert score.correct and score.reward == SCALE / 4


def test_a_completion_of_a_checkpoint_that_waited_behind_its_turn_is_answered_first(
    scorer: RewardWorkers,
) -> None:
    first = answer("So \\boxed{41}")
    waited = NOTHING_SAMPLED.extended(first, [-0.5] * len(first), policy_version=4, step=2)
    _, scored = sampled(turns_of(VERDICT, scorer), [answer("\\boxed{42}")], so_far=waited)
    assert scored is not None and scored.finish_reason == "stop"
    assert [call.output for call in scored.calls] == ["The answer 41 is not right. Try again."]
    assert scored.turns == ["So \\boxed{41}\n", "\\boxed{42}"]
    given, last = scored.segments[1:]
    assert (given.sampled, given.policy_version, last.sampled) == (False, 4, True)


def test_a_right_answer_ends_at_once_and_the_last_one_is_not_told(scorer: RewardWorkers) -> None:
    turns = turns_of(VERDICT, scorer)
    _, scored = sampled(turns, [answer("\\boxed{42}")])
    assert scored is not None and scored.calls == () and turns.scores[0, 0].reward == SCALE
    wrong = answer("\\boxed{7}")
    _, scored = sampled(turns_of(VERDICT, scorer), [wrong] * 3)
    assert scored is not None and scored.retries == 2 and scored.finish_reason == "stop"


def test_an_answer_that_one_of_several_rewards_could_not_judge_is_not_called_wrong(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "def none(text, solutions, row):\n    return 0.0\n"
        "def broken(text, solutions, row):\n    raise RuntimeError('no licence')\n"
    )
    names = ("none", "broken")
    reward = RewardConfig(rewards=[f"{name}={tmp_path}/own.py:{name}" for name in names])
    with open_reward_workers(reward) as workers:
        feedback = Feedback(RewardManager(workers, reward, 999), "verdict")
        completion = Completion(0, (7,), (-1.0,), "7", finish_reason="stop", policy_version=0)
        feedback.ask(PLAIN, completion, (0, 0), turns=["7"])
        outcomes: list[tuple[Key, TurnOutcome]] = []
        while not outcomes:
            outcomes = feedback.outcomes(60.0)
    ((_, outcome),) = outcomes
    assert outcome.text is None and outcome.score is not None and not outcome.score.correct


def test_any_other_text_is_told_as_it_stands(scorer: RewardWorkers) -> None:
    text = "Your answer is either wrong or not parsable. Please try again."
    turns = turns_of(TurnsConfig(feedback=text), scorer)
    _, scored = sampled(turns, [answer("\\boxed{7}"), answer("\\boxed{8}")])
    assert scored is not None and [call.output for call in scored.calls] == [text]
    assert not turns.scores, "nobody judged the last answer"


def test_only_sampled_tokens_count_as_new_ones(scorer: RewardWorkers) -> None:
    """The second answer uses up the rest; feedback is longer than all of them."""
    first = answer("\\boxed{7}")
    turns = turns_of(VERDICT, scorer)
    core = Core({1: first}, {1: answer("\\boxed{42}")})
    running = running_of(core, turns, TOKENIZER)  # type: ignore[arg-type]
    request = Request((0, 0), (5,), 1, min_new_tokens=0, max_new_tokens=len(first) + 20)
    running.begin(request)
    running.step()
    while not core.requests:
        running.resume_called()
    (resumed,) = core.requests.values()
    assert resumed.sampling_params.max_tokens == 20
    assert len(resumed.prompt["prompt_token_ids"]) > len(first) + 20


def test_an_answer_that_uses_all_tokens_up_is_finished_and_is_told_nothing(
    scorer: RewardWorkers,
) -> None:
    wrong = answer("\\boxed{7}")
    _, scored = sampled(turns_of(VERDICT, scorer), [wrong], most=len(wrong))
    assert scored is not None and scored.calls == () and scored.finish_reason == "stop"


def test_what_is_cut_off_is_no_answer(scorer: RewardWorkers) -> None:
    turns = turns_of(VERDICT, scorer)
    cut = answer("\\boxed{7}")[:-1]
    assert turns.find(NOTHING_SAMPLED, cut, new_tokens=3) is None
    found = turns.find(NOTHING_SAMPLED, [*cut, END], new_tokens=1)
    assert found is not None and found.tokens == len(cut) + 1


def test_a_slice_that_ends_with_an_answer_is_told_first(scorer: RewardWorkers) -> None:
    wrong = answer("\\boxed{7}")
    turns = turns_of(VERDICT, scorer)
    ended, scored = sampled(turns, [wrong], slice_tokens=len(wrong))
    assert scored is None and isinstance(ended.completion, PartialCompletion)
    assert len(ended.completion.calls) == 1 and not ended.completion.segments[-1].sampled
    _, scored = sampled(turns, [answer("\\boxed{42}")], so_far=ended.completion)
    assert scored is not None and scored.retries == 1
    assert scored.answer_text == "\\boxed{42}" and turns.scores[0, 0].correct


def test_in_a_chat_the_sampled_end_of_a_turn_is_neither_doubled_nor_lost(
    scorer: RewardWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing follows another end, which is warned of once."""
    _warn_of_end.cache_clear()
    turns = turns_of(VERDICT, scorer, CHATTED)
    right = answer("\\boxed{42}", CHAT_END)
    _, scored = sampled(turns, [answer("\\boxed{7}", CHAT_END), right], prompt=CHATTED)
    assert scored is not None
    assert CHAT.decode(scored.token_ids, skip_special_tokens=False) == (
        "\\boxed{7}<|im_end|>\n<|im_start|>user\nThe answer 7 is not right. Try again.<|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{42}<|im_end|>"
    )
    assert all(call.ends_turn for call in scored.calls) and scored.earlier_text == ""

    turns = turns_of(VERDICT, scorer, CHATTED)
    _, scored = sampled(turns, [answer("\\boxed{7}", END)], prompt=CHATTED)
    assert scored is not None and scored.calls == () and not turns.scores[0, 0].correct
    sampled(turns_of(VERDICT, scorer, CHATTED), [answer("\\boxed{7}", END)], prompt=CHATTED)
    assert len(caplog.messages) == 1 and "ends with '<|endoftext|>'" in caplog.text


def test_thinking_that_a_plain_prompt_opens_ends_in_an_earlier_turn(scorer: RewardWorkers) -> None:
    """The second answer is none of the thinking that the prompt begins."""
    prompt = replace(PLAIN, text="6x7=<think>")
    turns = turns_of(VERDICT, scorer, prompt)
    _, scored = sampled(
        turns, [answer("Hm</think>\\boxed{7}"), answer("\\boxed{42}")], prompt=prompt
    )
    assert scored is not None and scored.retries == 1 and turns.scores[0, 0].correct
    assert scored.earlier_text == "Hm</think>\\boxed{7}\n"


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("text", ["\\boxed{7}", "\\boxed{42}", "lost"])
def test_the_ranks_of_an_engine_go_on_alike(
    scorer: RewardWorkers, place: Path, text: str, is_idle: bool
) -> None:
    """The second rank has neither workers nor tokens: it takes what the first one shares."""
    engine_turns = environment(place, "breaks") if text == "lost" else None
    shared: list[SharedReplies] = []

    def give(replies: SharedReplies) -> SharedReplies:
        shared.append(replies)
        return replies

    def take(replies: SharedReplies) -> SharedReplies:
        assert replies == []
        return shared.pop(0)

    first = turns_of(VERDICT, scorer)
    if engine_turns is not None:
        lost = engine_turns.of_rollout(lambda key: PLAIN, None, validates=False)
        assert lost is not None
        first = lost
    first._share = give
    second = FinishedTurns(
        VERDICT, (END,), answers=None, tokens=None, prompt_of=lambda key: PLAIN, share=take
    )
    wrong = answer(text)
    so_far = NOTHING_SAMPLED.extended(wrong, [-1.0] * len(wrong), policy_version=2, step=1)
    request = Request((0, 0), (5,), 1, min_new_tokens=0, max_new_tokens=99, so_far=so_far)
    assert first.submit(request) and second.submit(request)
    answers = []
    while not answers:
        answers = first.answered(is_idle)
        assert second.answered(is_idle) == answers
    if engine_turns is not None:
        engine_turns.close()
    (answered,) = answers
    assert len(first) == len(second) == 0 and shared == []
    assert answered.is_over == (text == "\\boxed{42}") and answered.is_lost == (text == "lost")
    assert bool(answered.request.so_far.calls) != answered.is_over


@pytest.mark.parametrize("errors", [[], [ValueError("the template takes too long")]])
def test_all_ranks_of_an_engine_learn_what_its_leader_lacks(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    """vLLM's group gives the second rank what the first one has."""
    group = SimpleNamespace(broadcast_object=lambda items, src: errors)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    second = Mesh(1, 2, 1, pipeline=1, engine_size=2)

    def opened() -> EngineTurns | None:
        return open_turns(
            Config(turns=VERDICT), TOKENIZER, second, [], continues_noise=True, stop_token_ids=()
        )

    if errors:
        with pytest.raises(ValueError, match="takes too long"):
            opened()
    else:
        assert opened() is not None


def test_a_leader_shares_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Exception] = []

    def broadcast_object(items: list[Exception], src: int) -> list[Exception]:
        shared.extend(items)
        return items

    group = SimpleNamespace(broadcast_object=broadcast_object)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    chat = byte_tokenizer()
    chat.chat_template = CHATS["qwen3"].template
    prompts = [render([user("6x7=")], chat, "the prompt of a chat")]
    with pytest.raises(ValueError, match="only appends"):
        open_turns(
            Config(turns=VERDICT),
            chat,
            Mesh(0, 2, 1, pipeline=1, engine_size=2),
            prompts,
            continues_noise=True,
            stop_token_ids=(),
        )
    assert len(shared) == 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environment")
    (place / "own.py").write_text(SOURCE)
    return place


def environment(place: Path, name: str, seconds: float = 30.0, most: int = 3) -> EngineTurns:
    settings = EnvironmentConfig(f"{place}/own.py:{name}", workers=1, timeout_seconds=seconds)
    config = Config(turns=TurnsConfig(max=most), environment=settings)
    turns = open_turns(
        config, TOKENIZER, MESH, [PLAIN.text], continues_noise=True, stop_token_ids=(END,)
    )
    assert turns is not None
    return turns


@pytest.mark.parametrize("validates", [False, True])
def test_an_environment_says_what_follows_every_turn(place: Path, validates: bool) -> None:
    """Its figures of all turns stay, those of the last one, too."""
    engine_turns = environment(place, "hints")
    turns = engine_turns.of_rollout(lambda key: PLAIN, None, validates)
    assert turns is not None
    _, scored = sampled(turns, list(map(answer, ("41", "40", "42"))))
    assert scored is not None
    assert [call.output for call in scored.calls] == ["Hint 1: not '41'", "Hint 2: not '40'"]
    assert scored.figures == (("hints", 1.0), ("hints", 1.0), ("turns", 3.0))
    assert scored.answer_text == "42" and not turns.scores
    _, scored = sampled(turns, list(map(answer, "123")))
    assert scored is not None and scored.retries == 2 and scored.finish_reason == "stop"
    assert len(scored.figures) == 3, "it is asked of the last turn, too"
    engine_turns.close()


def test_an_environment_gets_turns_as_they_were_sampled(place: Path) -> None:
    """The line that begins behind a turn is none of it; a sampled one is."""
    engine_turns = environment(place, "shows")
    turns = engine_turns.of_rollout(lambda key: PLAIN, None, validates=False)
    _, scored = sampled(turns, list(map(answer, ("1", "2\n", "3"))))  # type: ignore[arg-type]
    engine_turns.close()
    assert scored is not None
    assert [call.output for call in scored.calls] == ["1", "1|1|2\n"]


@pytest.mark.parametrize(
    ("text", "reason"), [("0", "no licence"), ("1", "its worker ended"), ("2", "timeout")]
)
def test_a_function_that_fails_three_times_loses_the_completion(
    place: Path, text: str, reason: str
) -> None:
    engine_turns = environment(place, "breaks", seconds=0.5)
    turns = engine_turns.of_rollout(lambda key: PLAIN, None, validates=False)
    assert turns is not None
    ended, scored = sampled(turns, [answer(text)])
    assert isinstance(ended.completion, Completion) and ended.completion.is_lost
    assert reason in ended.completion.calls[-1].output
    assert ended.completion.text == text, "without the end of its turn"
    _, scored = sampled(turns, [answer("42")])
    assert scored is not None and not scored.is_lost
    engine_turns.close()


def test_validation_has_no_feedback_and_some_engines_no_turns() -> None:
    engine_turns = open_turns(
        Config(turns=VERDICT),
        TOKENIZER,
        MESH,
        [PLAIN.text],
        continues_noise=True,
        stop_token_ids=(),
    )
    assert engine_turns is not None

    def prompt_of(key: Key) -> Prompt:
        return PLAIN

    assert engine_turns.of_rollout(prompt_of, None, validates=True) is None
    assert engine_turns.of_rollout(prompt_of, None, validates=False) is not None
    with pytest.raises(ValueError, match="noise begins anew in every turn"):
        open_turns(
            Config(turns=VERDICT), TOKENIZER, MESH, [], continues_noise=False, stop_token_ids=()
        )


def test_sentences_say_how_an_answer_was_judged() -> None:
    assert verdict_text(Score(0.0, False, "", "no_answer")).startswith("No final answer")
    assert verdict_text(Score(0.0, False, "", "function")) == "That is not right. Try again."
    assert "The answer 7{} is" in verdict_text(Score(0.0, False, "7{}", "number"))


def test_feedback_tokens_are_those_of_the_prompt(scorer: RewardWorkers) -> None:
    feedback = FeedbackTokens(CHAT, 64, [PLAIN.text, CHATTED.text])
    plain, chatted = (feedback.behind(prompt.text, "No.") for prompt in (PLAIN, CHATTED))
    assert CHAT.decode(plain.token_ids) == "\nNo.\n" and len(chatted.token_ids) > 10


def test_worked_retries_are_told_what_a_verdict_tells() -> None:
    assert NOT_RIGHT.strip() == WRONG_ANSWER
