"""A tiny model that follows a script, with calls of a tool.

What it says next depends, almost only, on the token before: its embeddings are unit vectors, and
its output layer has the script's successors. Random attention moves log-probs a little, by all that
came before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SIZE = 128
"""Tokens of the vocabulary, and width of the hidden states."""
EOS = 1
SURE = 14.0
"""Logit of a token that the script has next."""
PROMPT = "6x7:"
HEAD = "Let us see.\n"
COUNT = "n=globals().get('n',0)+1;"
CODES = (f"{COUNT}print(6*7)", f"{COUNT}1/0", f"{COUNT}import time;time.sleep(.1);n")
"""Calls; the last one shows how many calls its session has had."""
ANSWER = "So \\boxed{42}"
NO_ANSWER = "So."
PIECES = (HEAD, "```py", "thon\n", *CODES, "\n``", "`", "` ", ANSWER, NO_ANSWER)
FIRST_PIECE = 99
"""Number of the first of PIECES; before are special tokens, newline and ASCII."""


def number_of(piece: str) -> int:
    if piece in PIECES:
        return FIRST_PIECE + PIECES.index(piece)
    return 3 if piece == "\n" else 4 + ord(piece) - 32


SCRIPT = {
    PROMPT[-1]: (HEAD,),
    HEAD: ("```py",),
    "```py": ("thon\n",),
    "thon\n": CODES,
    **{code: ("\n``",) for code in CODES},
    "\n``": ("`", "` "),
    "`": (HEAD,),
    "` ": ("```py",),
    "\n": (HEAD, ANSWER, NO_ANSWER),
}
"""What follows a piece, each as likely. "\\n" is the end of an output; behind "`" and "` ", which
complete a call, it would go on by itself."""


CALL_HEAD = '<tool_call>{"name": "python", "arguments": {"code": "'
CALL_TAIL = '"}}</tool_call>'
START = "<|im_start|>"
CHAT_END = "<|im_end|>"
CHAT_PIECES = (START, HEAD, CALL_HEAD, *CODES, CALL_TAIL, "\r", ANSWER, NO_ANSWER)
CHAT_SCRIPT = {
    PROMPT[-1]: (HEAD,),
    HEAD: (CALL_HEAD,),
    CALL_HEAD: CODES,
    **{code: (CALL_TAIL,) for code in CODES},
    CALL_TAIL: (CHAT_END, "\r"),
    "\r": (CALL_HEAD,),
    "\n": (HEAD, ANSWER, NO_ANSWER),
    ANSWER: (CHAT_END,),
    NO_ANSWER: (CHAT_END,),
}
"""The script in a chat: "\n" is the end of a prompt or of outputs, and "\r" stands between two calls of a
turn, whose end is CHAT_END."""


def chat_number_of(piece: str) -> int:
    """The token of a piece of CHAT_SCRIPT."""
    if piece == CHAT_END:
        return EOS
    if piece in CHAT_PIECES:
        return FIRST_PIECE + CHAT_PIECES.index(piece)
    return number_of(piece)


def make_script_tokenizer(
    pieces: Sequence[str] = PIECES, eos: str = "<eos>", special: Sequence[str] = ()
) -> Any:
    """A Qwen2 tokenizer without merges: what any folder of a Qwen2 is read as.

    `special` are those of the pieces that are special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    texts = ["\n", *(chr(code) for code in range(32, 127)), *pieces]
    names = ["<pad>", eos, "<unk>"]
    names += [
        text if text in special else byte_level.pre_tokenize_str(text)[0][0] for text in texts
    ]
    names += [f"<{number}>" for number in range(SIZE - len(names))]
    return Qwen2Tokenizer(
        vocab={name: number for number, name in enumerate(names)},
        merges=[],
        pad_token="<pad>",
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )


def make_script_model(folder: Path, positions: int = 1024, experts: int = 0) -> Path:
    """A model of two layers, perhaps with experts, that follows SCRIPT, in Hugging Face form."""
    successors = {
        number_of(before): list(map(number_of, after)) for before, after in SCRIPT.items()
    }
    successors |= {number_of(piece): [EOS] for piece in (ANSWER, NO_ANSWER)}
    tokenizer = make_script_tokenizer()
    return _save(folder, successors, tokenizer=tokenizer, positions=positions, experts=experts)


def make_chat_script_model(folder: Path, positions: int = 1024) -> Path:
    """A model that follows CHAT_SCRIPT, whose tokenizer has a chat template with tools."""
    from tests.data.tool_chat_templates import TOOL_CHATS

    successors = {
        chat_number_of(before): list(map(chat_number_of, after))
        for before, after in CHAT_SCRIPT.items()
    }
    tokenizer = make_script_tokenizer(CHAT_PIECES, CHAT_END, special=(START,))
    tokenizer.chat_template = TOOL_CHATS["qwen2.5"]
    return _save(folder, successors, tokenizer=tokenizer, positions=positions)


ANSWERS = (ANSWER, "So \\boxed{41}", NO_ANSWER)
"""What a model answers to a prompt and to feedback, each as likely."""


def make_answering_model(folder: Path, positions: int = 1024) -> Path:
    """A model that gives one of ANSWERS behind a prompt, and behind the end of a line."""
    pieces = (*PIECES, ANSWERS[1])
    numbers = [FIRST_PIECE + pieces.index(answer) for answer in ANSWERS]
    successors = {number_of(PROMPT[-1]): numbers, number_of("\n"): numbers}
    successors |= {number: [EOS] for number in numbers}
    return _save(folder, successors, tokenizer=make_script_tokenizer(pieces), positions=positions)


def _save(
    folder: Path,
    successors: dict[int, list[int]],
    tokenizer: Any,
    positions: int,
    experts: int = 0,
) -> Path:
    """Write a model whose tokens have these successors, each as likely."""
    import transformers

    torch.manual_seed(3)
    architecture = "Qwen3MoeForCausalLM" if experts else "Qwen2ForCausalLM"
    model_class: Any = getattr(transformers, architecture)
    sizes = {
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if experts:
        sizes |= {"head_dim": 32, "num_experts": experts, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
    model = model_class(model_class.config_class(**sizes)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                size = 0.01 if "o_proj" in name or "down_proj" in name else 0.1
                parameter.copy_(torch.randn_like(parameter) * size)
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.mul_(0.1)
        for before, after in successors.items():
            for number in after:
                model.lm_head.weight[number, before] += SURE / SIZE**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
