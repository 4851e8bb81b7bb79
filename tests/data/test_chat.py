"""Conversations in the chat templates of published models.

What is learned, what ends it, and what the judge sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlmath.algorithms.losses import Normalisation
from rlmath.answers.verifier import verify
from rlmath.checkpoint.hf.metadata_files import (
    read_metadata_files,
    with_chat_template,
    with_stop_tokens,
)
from rlmath.checkpoint.hf.weights import write_files
from rlmath.data.chat import ChatSettings, chat_end, user
from rlmath.data.packing import pack
from rlmath.data.rows import PromptRow
from rlmath.data.sft_sequences import WrittenSequence, load_sequences
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import completion_text, load_tokenizer, prompt_text
from rlmath.rewards.reward_manager import text_to_verify
from tests.data.chat_templates import CHATS, chat_tokenizer

_QWEN3 = CHATS["qwen3"].template
QUESTION = PromptRow("1+1?", "math", "q", ("2",), whole=False)
CONTINUING = [name for name in CHATS if name != "r1-distill"]


def sequence(tmp_path: Path, tokenizer, *turns: tuple[str, str]) -> WrittenSequence:
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return load_rows(tmp_path, tokenizer, row)


def load_rows(tmp_path: Path, tokenizer, row: dict, template: str = "auto") -> WrittenSequence:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (written,), _ = load_sequences(str(file), tokenizer, template, 2000, 0.0)
    return written


def render(row: PromptRow, template: str, tokenizer) -> str:
    return prompt_text(row, template, tokenizer).text


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
    tokenizer = chat_tokenizer(name, special_thinking)
    chat = CHATS[name]
    system = [("system", "Be brief.")] if chat.takes_system else []
    first = [*system, ("user", "6 x 7?")]
    turns = [*first, ("assistant", "42"), ("user", "7 x 7?"), ("assistant", "It is 49")]
    written = sequence(tmp_path, tokenizer, *turns)
    whole = rendered(tokenizer, turns)
    assert (
        tokenizer.decode([*written.prompt_ids, *written.completion_ids])
        == whole[: whole.rindex(chat.end) + len(chat.end)]
    )
    assert tokenizer.decode(written.prompt_ids) == rendered(
        tokenizer, first if "qwen3" not in name else turns[:-1], add_generation_prompt=True
    )
    assert learned_text(written, tokenizer) == {
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
        ("qwen2.5", "2<|endoftext|>", "2<|im_end|>"),
        ("llama3", " 2 ", "2<|eot_id|>"),
    ],
)
def test_the_answer_is_learned_as_the_template_writes_it(
    name: str, answer: str, learned: str, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(name)
    written = sequence(tmp_path, tokenizer, ("user", "1+1?"), ("assistant", answer))
    assert learned_text(written, tokenizer) == learned
    assert written.learned is None, "no other turn lies between"
    by_columns = load_rows(tmp_path, tokenizer, {"question": "1+1?", "solution": answer})
    assert by_columns.completion_ids == written.completion_ids, "a solution is the assistant's turn"


def test_variables_of_the_chat_template_are_the_runs(tmp_path: Path) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path)
    thinking, silent = (
        load_tokenizer(str(tmp_path), settings=ChatSettings(kwargs=variables))
        for variables in ([], ["enable_thinking=false"])
    )
    begins = "<|im_start|>assistant\n"
    assert render(QUESTION, "chat", thinking).endswith(begins)
    assert render(QUESTION, "chat", silent).endswith(begins + "<think>\n\n</think>\n\n")
    written = sequence(tmp_path, silent, ("user", "1+1?"), ("assistant", "2"))
    assert learned_text(written, silent) == "2<|im_end|>", "the prompt has the empty thinking"
    for variables, reason in {
        ("thinking",): "'thinking'; needed",
        (
            "enable_thinkin=false",
        ): "'enable_thinkin', .* reads no such variable. Did you mean \"enable_thinking\"?",
        ("add_generation_prompt=false",): "'add_generation_prompt', which the program gives",
        ("ns=1",): "'ns', .* Those that it reads: enable_thinking",
        ("enable_thinking=true", "enable_thinking=false"): "'enable_thinking' 2 times",
    }.items():
        with pytest.raises(ValueError, match=rf"data\.chat_template_kwargs has {reason}"):
            load_tokenizer(str(tmp_path), settings=ChatSettings(kwargs=variables))


def test_variables_are_looked_for_in_templates_of_every_kind(tmp_path: Path) -> None:
    """Templates that set the variable where it is not given, within macros, or beside other tags.

    The other tags are those of transformers; one template hangs as it is read."""
    tokenizer = chat_tokenizer("qwen2.5")
    for before, read in {
        "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}": True,
        "{% set effort = effort | default('low') %}{{ effort }}": True,
        "{% macro say() %}{{ effort }}{% endmacro %}{{ say() }}": True,
        "{% generation %}{{ effort }}{% endgeneration %}{% for x in [] %}{% break %}{% endfor "
        "%}": True,
        "{% set effort = 'low' %}{{ effort }}": False,
        "{# effort #}{{ 'effort' }}": False,
    }.items():
        tokenizer.chat_template = before + CHATS["qwen2.5"].template
        tokenizer.save_pretrained(tmp_path)
        settings = ChatSettings(kwargs=["effort=high"])
        if read:
            assert render(
                QUESTION, "chat", load_tokenizer(str(tmp_path), settings=settings)
            ).startswith("high")
        else:
            with pytest.raises(ValueError, match="reads no such variable"):
                load_tokenizer(str(tmp_path), settings=settings)


HOSTILE = "Be brief.\n'%}{{ 7*7 }} \\boxed{é}"


@pytest.mark.parametrize("name", [name for name in CHATS if CHATS[name].takes_system])
def test_a_system_prompt_is_before_every_conversation_without_one(
    name: str, tmp_path: Path
) -> None:
    plain = chat_tokenizer(name)
    plain.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), settings=ChatSettings(system_prompt=HOSTILE))
    turns = [("user", "1+1?"), ("assistant", "2")] if name in CONTINUING else [("user", "1+1?")]
    row = replace(QUESTION, messages=(user("1+1?"),))
    expected = rendered(plain, [("system", HOSTILE), turns[0]], add_generation_prompt=True)
    assert render(row, "auto", tokenizer) == expected
    row_with_system = replace(
        QUESTION, messages=({"role": "system", "content": "Own."}, user("1+1?"))
    )
    assert render(row_with_system, "chat", tokenizer) == render(row_with_system, "chat", plain), (
        "a row's own wins"
    )
    assert chat_end(tokenizer) == chat_end(plain)
    if len(turns) == 2:
        written = sequence(tmp_path, tokenizer, *turns)
        assert written == sequence(tmp_path, plain, ("system", HOSTILE), *turns)


@pytest.mark.parametrize(
    ("name", "template", "reason"),
    [
        ("mistral", None, "data.system_prompt: .* only user and assistant"),
        ("gemma", None, "data.system_prompt: .* no system turn"),
        (
            "qwen2.5",
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out its system",
        ),
    ],
)
def test_a_template_without_system_turns_refuses_a_system_prompt(
    name: str, template: str | None, reason: str, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(name)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{reason}.* or leave it out"):
        load_tokenizer(str(tmp_path), settings=ChatSettings(system_prompt="Be brief."))


def test_a_chat_template_has_a_name_or_is_a_file_and_is_exported(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    named = tmp_path / "named"
    tokenizer.chat_template = {"default": CHATS["phi"].template, "think": CHATS["qwen3"].template}
    tokenizer.save_pretrained(named)
    template_path = tmp_path / "own.jinja"
    template_path.write_text(CHATS["llama3"].template)
    (tmp_path / "broken.jinja").write_text("{{ x }}\n{% if %}")
    (tmp_path / "fails.jinja").write_text("{{ x }}\n{{ messages[0].content.y() }}")
    base_settings = ChatSettings(system_prompt="S")
    for name, chat in (
        (None, "phi"),
        ("default", "phi"),
        ("think", "qwen3"),
        (str(template_path), "llama3"),
    ):
        variables = ["enable_thinking=true"] if chat == "qwen3" else []
        settings = replace(base_settings, template=name, kwargs=variables)
        loaded = load_tokenizer(str(named), settings=settings)
        assert loaded.chat_template == settings.head + CHATS[chat].template
        files = with_chat_template(read_metadata_files(named), settings.named_template(loaded))
        write_files(exported := tmp_path / chat, {"config.json": b"{}", **files})
        reloaded = load_tokenizer(str(exported), settings=ChatSettings())
        assert reloaded.chat_template == CHATS[chat].template, "without variables and system prompt"
        assert load_tokenizer(str(exported), settings=ChatSettings("think")).chat_template == _QWEN3
        if name is not None:
            assert (
                json.loads(files["tokenizer_config.json"])["chat_template"]
                == reloaded.chat_template
            )
    for name, reason in (
        (
            "other",
            "is 'other'; needed: a chat template of the tokenizer in .* \\('default', 'think'\\)",
        ),
        ("none.jinja", "'none.jinja' cannot be read \\(.*No such file"),
        (
            str(tmp_path / "broken.jinja"),
            r"data\.chat_template=.*/broken\.jinja: the chat template cannot take a question: "
            r"Expected an expression, "
            r"got 'end of statement block' \(line 2\); correct the file, or leave it out$",
        ),
        (
            str(tmp_path / "fails.jinja"),
            r"fails\.jinja: .*'str object' has no attribute 'y' \(line 2\); correct the file",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(str(named), settings=ChatSettings(name))
    tokenizer.chat_template = {"think": _QWEN3, "rag": _QWEN3}
    tokenizer.save_pretrained(tmp_path / "no-default")
    with pytest.raises(
        ValueError, match=r"'think', 'rag', and no default; name one as data\.chat_template"
    ):
        load_tokenizer(str(tmp_path / "no-default"), settings=ChatSettings())


def test_a_template_that_does_not_continue_its_prompt_is_refused_with_both_texts(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="does not continue the prompt") as error:
        sequence(
            tmp_path,
            chat_tokenizer("r1-distill"),
            ("user", "1+1?"),
            ("assistant", "<think>x</think>2"),
        )
    assert "<think>\\n'" in str(error.value) and "<｜Assistant｜>2<｜end▁of▁sentence｜>" in str(
        error.value
    )


def test_turns_between_have_no_weight(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    written = sequence(tmp_path, tokenizer, *turns)
    batch = pack([written.sample()], [0], 1)
    weighted = batch.token_ids_T[batch.loss_weights_T > 0].tolist()
    assert tokenizer.decode(weighted) == "b<|im_end|>d<|im_end|>"
    assert batch.loss_count == written.n_learned == 4
    by_sequence = pack([written.sample()], [0], 1, Normalisation("sequence"))
    assert by_sequence.loss_weights_T.unique().tolist() == [0.0, 0.25]


@pytest.mark.parametrize("name", CHATS)
def test_what_ends_a_turn_is_taught_and_stops(name: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(name)
    chat = CHATS[name]
    end = tokenizer.convert_tokens_to_ids(chat.end)
    assert chat_end(tokenizer) == end
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    stops = stop_token_ids(str(tmp_path), tokenizer, 10_000)
    assert stops == tuple(sorted({3, end, tokenizer.eos_token_id}))
    write_files(tmp_path, with_stop_tokens({}, stops))
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == list(stops), (
        "an export stops there"
    )
    prompt = rendered(tokenizer, [("user", "1+1?")], add_generation_prompt=True)
    for completion in ("2", "2" + chat.end):
        written = load_rows(tmp_path, tokenizer, {"prompt": prompt, "completion": completion})
        assert tokenizer.decode(written.completion_ids) == "2" + chat.end
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
@pytest.mark.parametrize("name", CHATS)
def test_the_judge_sees_thinking_marks(
    name: str, special_thinking: bool, prompt: str, said: str, verdict: str
) -> None:
    tokenizer = chat_tokenizer(name, special_thinking)
    token_ids = tokenizer(said + CHATS[name].end, add_special_tokens=False)["input_ids"]
    text = completion_text(tokenizer, token_ids, stopped=True)
    assert text == said
    assert verify(text_to_verify(prompt, text), ["2"]).verdict == verdict
    assert completion_text(tokenizer, token_ids[:-1], stopped=False) == said, (
        "cut where it is longest"
    )


def test_the_judge_sees_all_that_was_said() -> None:
    """Completions with a padding token that is a letter, and with spaces before marks.

    The letter is one of answers ("!" of Qwen's first models)."""
    tokenizer = chat_tokenizer("qwen2.5")
    tokenizer.pad_token = "!"
    token_ids = tokenizer("\\boxed{4!} , not 4<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.pad_token_id in token_ids
    assert completion_text(tokenizer, token_ids, stopped=True) == "\\boxed{4!} , not 4"
    words = Tokenizer(models.WordLevel({"7": 0, "!": 1, "<unk>": 2}, unk_token="<unk>"))
    spaced = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    assert completion_text(spaced, [0, 1, 0], stopped=False) == "7 ! 7"


def test_an_export_stops_where_the_run_did(tmp_path: Path) -> None:
    metadata_files = {
        "generation_config.json": b'{"eos_token_id": 0, "top_p": 0.9}',
        "config.json": b"{}",
    }
    for files, top_p in ((metadata_files, 0.9), ({}, None)):
        for name, content in with_stop_tokens(files, (5, 0)).items():
            (tmp_path / name).write_bytes(content)
        generation_config = GenerationConfig.from_pretrained(tmp_path)
        assert (generation_config.eos_token_id, generation_config.top_p) == ([0, 5], top_p)
    assert with_stop_tokens(metadata_files, (0,)) == metadata_files, "the same bytes"


def test_a_template_that_does_not_show_the_answer_has_no_end() -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    assert chat_end(tokenizer) is None


@pytest.mark.parametrize("name", ["mistral", "phi", "smollm2"])
def test_tokens_are_those_of_the_whole_text_where_a_tokenizer_marks_beginnings(
    name: str, tmp_path: Path
) -> None:
    """The tokenizer is like Llama 2's: "▁" before every text, and in the place of spaces."""
    vocab = {chr(code): code - 10 for code in (10, *range(33, 127))} | {"▁": 117, "▁▁": 118}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁")]))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.add_special_tokens([AddedToken(CHATS[name].eos, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=CHATS[name].eos)
    tokenizer.chat_template = CHATS[name].template
    turns = [("user", "1+1?"), ("assistant", "2"), ("user", "x"), ("assistant", "7")]
    written = sequence(tmp_path, tokenizer, *turns)
    token_ids = [*written.prompt_ids, *written.completion_ids]
    whole = tokenizer(rendered(tokenizer, turns), add_special_tokens=False)["input_ids"]
    assert token_ids[:-1] == whole[: len(token_ids) - 1]


def test_what_would_forge_a_turn_or_does_nothing_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    forged = {"question": "x<|endoftext|>", "solution": "2"}
    with pytest.raises(ValueError, match="would end or change the turn"):
        load_rows(tmp_path, tokenizer, forged)
    path = tmp_path / "whole.jsonl"
    path.write_text(json.dumps({"prompt": "<|im_start|>user\n1<|im_end|>\n", "completion": "2"}))
    with pytest.raises(ValueError, match="has a template already"):
        load_sequences(str(path), tokenizer, "chat", 200, 0.0)
    tokenizer.save_pretrained(tmp_path)
    for variable, reason in (
        ("enable_thinking=False", "needed: true, false, null"),
        ("thinkin_on=1", "no such"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(str(tmp_path), settings=ChatSettings(kwargs=[variable]))
