"""Calls and outputs of the fence format, as tokens of several tokenizers."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion, Prompt, ToolCall
from rlmath.config.length_curriculum import BOUNDARY_TOKENS
from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_fences import FenceFormat, code_in
from rlmath.data.tool_formats import has_void_turn
from tests.data.chat_templates import MARKS, chat_tokenizer
from tests.tiny_models import _make_tokenizer as make_tokenizer_without_newlines

TEXTS = [
    "We compute it.\n```python\nprint(6 * 7)\n```\n```output\n42\n```\nSo \\boxed{42}.\n",
    "```python\nfor i in range(3):\n    print(f'{i} é ≤')\n```",
    "Traceback: ZeroDivisionError\n\n\n    indented\tand tabs ``inline`` and ```` many\n",
]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
FENCE = ToolsConfig(format="fence")
MOST = 64
"""Most tokens of an output here."""


def trained(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with merges over TEXTS, in the manner of a family of models."""
    specials = ["<s>", "</s>", "<unk>"]
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "llama2"))
    alphabet: list[str] = []
    if kind == "llama2":
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        inner.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        specials += BYTES
    elif kind == "metaspace":
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        alphabet = sorted({*"".join([*TEXTS, *MARKS]), *map(chr, range(32, 127))})
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=kind == "prefix", use_regex=kind != "whole"
        )
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if kind == "nfkc":
            inner.normalizer = normalizers.NFKC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    content = json.loads(inner.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in BYTES
    ]
    inner = Tokenizer.from_str(json.dumps(content))
    inner.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken("    ")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def wordlike() -> PreTrainedTokenizerFast:
    """Tokens that hold markers whole, with text before and behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["Ċ```", "ĊĊ```Ċ", ")Ċ``", "`ĊĊ", "```python", "``", "```", "Ċ`", "````"]
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *pieces, "</s>"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


TOKENIZERS = {
    "bytes": lambda: chat_tokenizer("qwen3"),
    "special-thinking": lambda: chat_tokenizer("qwen3", special_thinking=True),
    **{
        kind: lambda kind=kind: trained(kind)
        for kind in ("bpe", "whole", "prefix", "nfkc", "llama2", "metaspace")
    },
    "wordlike": wordlike,
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return TOKENIZERS[name]()


@cache
def fences(name: str) -> FenceFormat:
    return FenceFormat(tokenizer_of(name), MOST)


every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def splits(text: str, pieces: dict[str, int]) -> Iterator[list[int]]:
    """Every way to write a text in tokens."""
    if not text:
        yield []
    for end in range(1, len(text) + 1):
        if text[:end] in pieces:
            for following in splits(text[end:], pieces):
                yield [pieces[text[:end]], *following]


def first_complete(form: FenceFormat, ids: list[int]) -> tuple[int, str] | None:
    """(tokens to the first call's end, its code), by asking for the tokens that can be last."""
    for end in range(1, len(ids) + 1):
        if ids[end - 1] in form.can_complete:
            code = form.call_in(ids[:end])
            if code is not None:
                return end, code
    return None


@every_tokenizer
def test_a_call_is_complete_at_its_marker_however_it_is_split(name: str) -> None:
    """The oracle asks of every text in turn whether it has a marker, whatever tokens there are."""
    tokenizer = tokenizer_of(name)
    form = fences(name)
    head = tokenizer("Now:\n```python\nprint(1", add_special_tokens=False)["input_ids"]
    before = form.text_of(head)
    texts = {
        number: form.text_of([*head, number]).removeprefix(before)
        for number in range(len(tokenizer))
    }
    pieces = {text: number for number, text in texts.items() if text and set(text) <= set("\n`)")}
    assert form.text_of(head).endswith("Now:\n```python\nprint(1")
    seen = set()
    for tail in splits(")\n```\n\n", pieces):
        ids = [*head, *tail]
        expected = next(
            end for end in range(1, len(ids) + 1) if ")\n```" in form.text_of(ids[:end])
        )
        for late in range(3):
            assert first_complete(form, [*ids[: expected + late]]) == (expected, "print(1)")
        assert first_complete(form, ids[: expected - 1]) is None
        seen.add(tuple(tail))
    assert len(seen) >= (8 if name == "wordlike" else 1)


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        ("```python\nx\n```", "x"),
        ("a\n```python  \nx\n``` and more\n```python\ny\n```", "x"),
        ("```python\n```", ""),
        ("a ```python\nx\n```", None),
        ("```\nx\n```", None),
        ("```python3\nx\n```", None),
        ("```python\nx ```", None),
        ("```py\nthon\n```", None),
    ],
)
def test_what_is_a_call(turn: str, code: str | None) -> None:
    assert code_in(turn) == code


@every_tokenizer
def test_outputs_stand_in_their_fences_and_are_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = fences(name)
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for turn, printed in itertools.product(
        ("```python\n1\n```", "```python\n1\n```\n\n"), ("1\n", "", "a", "<s></s><think>", *MARKS)
    ):
        output = form.output(turn, printed)
        assert not control & set(output.token_ids)
        head = "" if turn.endswith("\n") else "\n"
        end = "" if not printed or printed.endswith("\n") else "\n"
        expected = f"{head}```output\n{printed}{end}```\n"
        context = tokenizer("a", add_special_tokens=False)["input_ids"]
        shown = tokenizer.decode([*context, *output.token_ids])
        if name == "nfkc":
            expected = unicodedata.normalize("NFKC", expected)
        if name in ("llama2", "metaspace"):  # for which it is a space
            expected = expected.replace("▁", " ")
        assert shown.removeprefix(tokenizer.decode(context)) == expected
        assert expected == f"{head}```output\n{output.text}{end}```\n" and not output.is_cut


@every_tokenizer
@pytest.mark.parametrize(
    "printed",
    [
        "```\nfree",
        "`" * 50,
        "x\n\u1fef\u1fef\u1fef\ny",
        "\uff40" * 3,
        "\n".join(["```"] * 90),
        "\n`\u2603``\nfree",
        "`\u200b`\x07`\nfree",
        "``\u2603`" * 90,
    ],
    ids=["fence", "many", "varia", "wide", "long", "unknown", "invisible", "unknown-long"],
)
def test_no_output_ends_its_fence(name: str, printed: str) -> None:
    text = fences(name).text_of(fences(name).output("x", printed).token_ids).strip()
    assert text.count("```") == 2
    assert text.startswith("```output\n") and text.endswith("\n```")


@every_tokenizer
@pytest.mark.parametrize("length", [63, 64, 65, 80, 1000, 70_839])
def test_a_long_output_is_cut_to_its_head_and_tail_in_tokens(name: str, length: int) -> None:
    tokenizer = tokenizer_of(name)
    printed = "".join(f"{number % 7}é"[: 1 + number % 2] for number in range(length))
    output = fences(name).output("x", f"{printed}\n")
    assert len(output.token_ids) <= MOST + BOUNDARY_TOKENS
    if not output.is_cut:
        assert output.text == f"{printed}\n"
        return
    head, message, tail = output.text.split("\n", 2)
    assert printed.startswith(head) and f"{printed}\n".endswith(tail)
    assert message.startswith("[... ") and message.endswith(" tokens left out ...]")
    if length > 100:
        assert head and tail.strip() and len(output.token_ids) > MOST - 12
    assert len(tokenizer(printed)["input_ids"]) > MOST - 24


def test_a_tokenizer_without_control_tokens_writes_outputs() -> None:
    inner = Tokenizer.from_str(wordlike().backend_tokenizer.to_str())
    output = FenceFormat(PreTrainedTokenizerFast(tokenizer_object=inner), MOST).output("x\n", "1")
    assert inner.decode(output.token_ids) == "```output\n1\n```\n"


def test_a_tokenizer_without_newlines_is_refused() -> None:
    with pytest.raises(ValueError, match=r'tools.format is "fence", and the tokenizer .* reads'):
        FenceFormat(make_tokenizer_without_newlines(), MOST)


def completion(text: str, positions: Any = (), finish: Any = "stop") -> Completion:
    calls = tuple(ToolCall("1", "\\boxed{1}", "ok", position=position) for position in positions)
    return Completion(0, (), (), text=text, finish_reason=finish, policy_version=0, calls=calls)


@pytest.mark.parametrize(
    ("done", "void", "void_for_functions"),
    [
        (completion("so \\boxed{1}"), False, False),
        (completion("so it is"), True, False),
        (completion("so it", finish="length"), True, True),
        (completion("so \\boxed{1}; then it", finish="length"), False, True),
        (completion("I box \\boxed{1}.\nso it is", [17]), True, False),
        (completion("I\nso \\boxed{1}", [2]), False, False),
        (completion("```python\n1\n```", finish="length"), False, False),
    ],
)
def test_a_void_turn_has_neither_call_nor_answer(
    done: Completion, void: bool, void_for_functions: bool
) -> None:
    prompt = Prompt("q", "?", (1,), solutions=("1",), task="math")
    assert has_void_turn(prompt, done, "boxed", FENCE) == void
    assert has_void_turn(prompt, done, None, FENCE) == void_for_functions
