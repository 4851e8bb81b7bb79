"""Conversations in the chat templates of published models: what is learned, what ends it, what the judge sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from rlmath.algorithms.losses import Normalisation
from rlmath.answers.verifier import verify
from rlmath.checkpoint.hf.weights import with_stop_tokens
from rlmath.data.chat import chat_end
from rlmath.data.packing import pack
from rlmath.data.rows import PromptRow
from rlmath.data.sft_sequences import WrittenSequence, load_sequences
from rlmath.data.tokenizer import completion_text, load_tokenizer, render, stop_token_ids
from rlmath.rewards.reward_manager import text_to_verify
from tests.data.chat_templates import CHATS, chat_tokenizer

CONTINUING = [name for name in CHATS if name != "r1-distill"]


def sequence(tmp_path: Path, tokenizer, *turns: tuple[str, str]) -> WrittenSequence:
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return load_rows(tmp_path, tokenizer, row)


def load_rows(tmp_path: Path, tokenizer, row: dict, template: str = "auto") -> WrittenSequence:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,), _ = load_sequences(str(file), tokenizer, template, 2000, 0.0)
    return found


def rendered(tokenizer, turns, **more) -> str:
    chat = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(chat, tokenize=False, **more)


def learned_text(one: WrittenSequence, tokenizer) -> str:
    learned = one.learned or (True,) * len(one.completion_ids)
    return tokenizer.decode(
        [t for t, is_learned in zip(one.completion_ids, learned, strict=True) if is_learned]
    )


@pytest.mark.parametrize("special_thinking", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize("name", CONTINUING)
def test_a_sequence_is_the_templates_own_conversation(
    name: str, special_thinking: bool, tmp_path: Path
) -> None:
    tokenizer, chat = chat_tokenizer(name, special_thinking), CHATS[name]
    system = [("system", "Be brief.")] if chat.takes_system else []
    first = [*system, ("user", "6 x 7?")]
    turns = [*first, ("assistant", "42"), ("user", "7 x 7?"), ("assistant", "It is 49")]
    one = sequence(tmp_path, tokenizer, *turns)
    whole = rendered(tokenizer, turns)
    assert (
        tokenizer.decode([*one.prompt_ids, *one.completion_ids])
        == whole[: whole.rindex(chat.end) + len(chat.end)]
    )
    assert tokenizer.decode(one.prompt_ids) == rendered(
        tokenizer, first if "qwen3" not in name else turns[:-1], add_generation_prompt=True
    )
    assert learned_text(one, tokenizer) == {
        "mistral": " 42</s> It is 49</s>",
        "qwen3": "<think>\n\n</think>\n\nIt is 49<|im_end|>",
        "qwen3-thinking": "\n</think>\n\nIt is 49<|im_end|>",
    }.get(name, f"42{chat.end}It is 49{chat.end}")


@pytest.mark.parametrize(
    ("name", "answer", "learned"),
    [
        ("qwen3-thinking", "<think>\nx\n</think>\n\n2", "x\n</think>\n\n2<|im_end|>"),
        ("qwen3-thinking", "2", "\n</think>\n\n2<|im_end|>"),
        ("qwen3", "2", "<think>\n\n</think>\n\n2<|im_end|>"),
        ("qwen3", "<think>\nx\n</think>\n\n2", "<think>\nx\n</think>\n\n2<|im_end|>"),
        ("qwen2.5", "2<|im_end|>", "2<|im_end|>"),
        ("llama3", " 2 ", "2<|eot_id|>"),
    ],
)
def test_the_answer_is_learned_as_the_template_writes_it(
    name: str, answer: str, learned: str, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(name)
    one = sequence(tmp_path, tokenizer, ("user", "1+1?"), ("assistant", answer))
    assert learned_text(one, tokenizer) == learned
    assert one.learned is None, "no other turn lies between"
    by_columns = load_rows(tmp_path, tokenizer, {"question": "1+1?", "solution": answer})
    assert by_columns.completion_ids == one.completion_ids, "a solution is the assistant's turn"


def test_variables_of_the_chat_template_are_the_runs(tmp_path: Path) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path)
    row = PromptRow("1+1?", "math", "q", ("2",), whole=False)
    thinking, silent = (
        load_tokenizer(str(tmp_path), chat_template_kwargs=given) for given in ([], ["enable_thinking=false"])
    )
    begins = "<|im_start|>assistant\n"
    assert render(row, "chat", thinking).endswith(begins)
    assert render(row, "chat", silent).endswith(begins + "<think>\n\n</think>\n\n")
    one = sequence(tmp_path, silent, ("user", "1+1?"), ("assistant", "2"))
    assert learned_text(one, silent) == "2<|im_end|>", "the prompt has the empty thinking"
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs has 'thinking'; needed"):
        load_tokenizer(str(tmp_path), chat_template_kwargs=["thinking"])


def test_a_template_that_does_not_continue_its_prompt_is_refused_with_both_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not continue the prompt") as error:
        sequence(tmp_path, chat_tokenizer("r1-distill"), ("user", "1+1?"), ("assistant", "<think>x</think>2"))
    assert "<think>\\n'" in str(error.value) and "<｜Assistant｜>2<｜end▁of▁sentence｜>" in str(error.value)


def test_turns_between_have_no_weight(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    one = sequence(tmp_path, tokenizer, *turns)
    batch = pack([one.sample()], [0], 1)
    weighted = batch.token_ids_T[batch.loss_weights_T > 0].tolist()
    assert tokenizer.decode(weighted) == "b<|im_end|>d<|im_end|>"
    assert batch.loss_count == one.n_learned == 4
    by_sequence = pack([one.sample()], [0], 1, Normalisation("sequence"))
    assert by_sequence.loss_weights_T.unique().tolist() == [0.0, 0.25]


@pytest.mark.parametrize("name", CHATS)
def test_what_ends_a_turn_is_taught_and_stops(name: str, tmp_path: Path) -> None:
    tokenizer, chat = chat_tokenizer(name), CHATS[name]
    end = tokenizer.convert_tokens_to_ids(chat.end)
    assert chat_end(tokenizer) == end
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert stop_token_ids(str(tmp_path), tokenizer, 10_000) == tuple(sorted({3, end, tokenizer.eos_token_id}))
    prompt = rendered(tokenizer, [("user", "1+1?")], add_generation_prompt=True)
    for completion in ("2", "2" + chat.end):
        one = load_rows(tmp_path, tokenizer, {"prompt": prompt, "completion": completion})
        assert tokenizer.decode(one.completion_ids) == "2" + chat.end
    plain = load_rows(tmp_path, tokenizer, {"prompt": "1+1=", "completion": "2"})
    assert tokenizer.decode(plain.completion_ids) == "2" + chat.eos


@pytest.mark.parametrize("special_thinking", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize(
    ("prompt", "said", "verdict"),
    [
        ("1+1?<think>\n", "hm</think>\\boxed{2}", "string"),
        ("1+1?", "<think>maybe \\boxed{2}</think> I do not know", "no_answer"),
    ],
)
def test_the_judge_sees_thinking_marks(special_thinking: bool, prompt: str, said: str, verdict: str) -> None:
    tokenizer = chat_tokenizer("qwen3", special_thinking)
    token_ids = tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"]
    text = completion_text(tokenizer, token_ids, stopped=True)
    assert text == said
    assert verify(text_to_verify(prompt, text), ["2"]).verdict == verdict
    assert completion_text(tokenizer, token_ids[:-1], stopped=False) == said, "cut where it is longest"


def test_an_export_stops_where_the_run_did(tmp_path: Path) -> None:
    said = {"generation_config.json": b'{"eos_token_id": 0, "top_p": 0.9}', "config.json": b"{}"}
    for files, top_p in ((said, 0.9), ({}, None)):
        for name, content in with_stop_tokens(files, (5, 0)).items():
            (tmp_path / name).write_bytes(content)
        found = GenerationConfig.from_pretrained(tmp_path)
        assert (found.eos_token_id, found.top_p) == ([0, 5], top_p)
    assert with_stop_tokens(said, (0,)) == said, "the same bytes"
