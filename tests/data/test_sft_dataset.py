"""What a supervised run reads, as its settings say: order, limits, templates, what is held out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlmath.config.length_curriculum import BOUNDARY_TOKENS
from rlmath.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SftConfig,
    ToolsConfig,
)
from rlmath.data.dataset import load_inputs, load_sft_inputs
from rlmath.data.sft_sequences import split_held_out
from tests.data.chat_templates import chat_tokenizer
from tests.tiny_models import shape_of


def write(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def written(path: Path, count: int, sign: str = "+") -> str:
    return write(path, *({"prompt": f"{n}{sign}1=", "completion": f"{n}"} for n in range(count)))


@pytest.fixture
def config(tmp_path: Path, tied_model: Path) -> Config:
    return Config(
        run=RunConfig(seed=77, total_epochs=5, total_steps=9),
        model=ModelConfig(path=str(tied_model)),
        data=DataConfig(
            train_path=written(tmp_path / "train.jsonl", 10),
            prompts_per_step=4,
            shuffle=False,
            max_prompt_tokens=1,  # counts in RL alone
        ),
        sft=SftConfig(max_sequence_tokens=6, held_out_share=0.2, eval_every_steps=3),
    )


def test_order_and_steps(config: Config, tied_model: Path) -> None:
    inputs = load_sft_inputs(config, shape_of(tied_model))
    order = inputs.order
    assert (order.n_prompts, order.prompts_per_step, order.seed, order.shuffle) == (8, 4, 77, False)
    assert order.shares == ()
    assert inputs.total_steps == 9
    short = replace(config, run=replace(config.run, total_epochs=3))
    assert load_sft_inputs(short, shape_of(tied_model)).total_steps == 3 * (8 // 4)


def test_the_held_out_share_is_drawn_from_the_runs_seed(config: Config, tied_model: Path) -> None:
    shape = shape_of(tied_model)
    none = replace(config, sft=replace(config.sft, held_out_share=0.0))
    everything = load_sft_inputs(none, shape)
    assert len(everything.sequences) == 10 and everything.held_out == []
    inputs = load_sft_inputs(config, shape)
    assert (inputs.sequences, inputs.held_out) == split_held_out(everything.sequences, 0.2, 77)
    assert len(inputs.held_out) == 2
    other = load_sft_inputs(replace(config, run=replace(config.run, seed=79)), shape)
    assert other.held_out != inputs.held_out
    unevaluated = replace(config, sft=replace(config.sft, eval_every_steps=None))
    assert load_sft_inputs(unevaluated, shape).held_out == []
    assert load_sft_inputs(unevaluated, shape).sequences == inputs.sequences


def test_a_held_out_file_leaves_the_training_file_whole(
    tmp_path: Path, config: Config, tied_model: Path
) -> None:
    held_out_path = written(tmp_path / "held.jsonl", 3, sign="-")
    inputs = load_sft_inputs(
        replace(config, sft=replace(config.sft, held_out_path=held_out_path)), shape_of(tied_model)
    )
    minus = ord("-") - 32 + 3
    assert len(inputs.sequences) == 10 and len(inputs.held_out) == 3
    assert all(minus in sequence.prompt_ids for sequence in inputs.held_out)
    assert not any(minus in sequence.prompt_ids for sequence in inputs.sequences)


def test_weights_belong_to_their_files(tmp_path: Path, config: Config, tied_model: Path) -> None:
    other_path = written(tmp_path / "more.jsonl", 5, sign="-")
    data = replace(config.data, more_train_paths=[other_path], train_weights=[1.0, 0.5])
    inputs = load_sft_inputs(replace(config, data=data), shape_of(tied_model))
    assert [(share.n_prompts, share.weight) for share in inputs.order.shares] == [
        (8, 1.0),
        (4, 0.5),
    ]
    assert inputs.order.n_places == 8 + 2


def test_limits_and_template(tmp_path: Path, config: Config, tied_model: Path) -> None:
    rows = [
        {"question": f"{n}+1", "solution": "1" * length} for n, length in enumerate((1, 2, 3, 9))
    ]
    path = write(tmp_path / "q.jsonl", *rows, {"question": "", "solution": "1"})
    data = replace(
        config.data, train_path=path, template="raw", prompts_per_step=1, max_unusable_share=0.21
    )
    sft = replace(config.sft, held_out_share=0.0, max_sequence_tokens=6)
    shape = shape_of(tied_model)
    inputs = load_sft_inputs(replace(config, data=data, sft=sft), shape)
    # Prompts of 3 tokens, an end of one.
    assert [sequence.length for sequence in inputs.sequences] == [5, 6]
    wide = replace(sft, max_sequence_tokens=10)
    boxed = load_sft_inputs(replace(config, data=replace(data), sft=wide), shape)
    assert [sequence.length for sequence in boxed.sequences] == [5, 6, 7]
    templated = replace(data, template="qwen_boxed")
    much = replace(sft, max_sequence_tokens=300)
    lengths = [
        len(sequence.prompt_ids)
        for sequence in load_sft_inputs(replace(config, data=templated, sft=much), shape).sequences
    ]
    assert min(lengths) > 100
    with pytest.raises(ValueError, match="unusable"):
        load_sft_inputs(
            replace(config, data=replace(data, max_unusable_share=0.19), sft=sft), shape
        )


def test_outputs_of_tools_are_given_with_the_format(
    tmp_path: Path, config: Config, tied_model: Path
) -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path / "model")
    shape = replace(shape_of(tied_model), vocab_size=len(tokenizer))
    answer = f"```python\n1\n```\n```output\n{'7' * 300}\n```\nSo."
    path = write(tmp_path / "calls.jsonl", {"prompt": "1", "completion": answer})
    config = replace(
        config,
        model=ModelConfig(path=str(tmp_path / "model")),
        data=replace(config.data, train_path=path, prompts_per_step=1),
        sft=replace(config.sft, max_sequence_tokens=900, held_out_share=0.0),
    )
    whole = load_sft_inputs(config, shape).sequences[0]
    assert whole.learned is None
    lengths = {}
    for most in (64, 128, 900):
        tools = ToolsConfig(format="fence", max_output_tokens=most)
        inputs = load_sft_inputs(replace(config, tools=tools), shape)
        (sequence,) = inputs.sequences
        assert sequence.n_learned == len("```python\n1\n```") + len("So.") + 1
        assert any(line.startswith("    given ") for line in inputs.audit.shown)
        lengths[most] = sequence.length - sequence.n_learned - 1
    assert lengths[64] <= 64 + BOUNDARY_TOKENS < lengths[128] <= 128 + BOUNDARY_TOKENS
    assert sequence.completion_ids == whole.completion_ids
    refused = replace(config, model=ModelConfig(path=str(tied_model)), tools=tools)
    with pytest.raises(ValueError, match=r'tools\.format is "fence", and the tokenizer of'):
        load_sft_inputs(refused, shape_of(tied_model))


def test_a_warm_up_counts_steps(config: Config, tied_model: Path) -> None:
    shape = shape_of(tied_model)
    load_sft_inputs(replace(config, optimizer=OptimizerConfig(warmup_steps=8)), shape)
    with pytest.raises(ValueError, match="warmup_steps is 9; the run has 9 optimizer steps"):
        load_sft_inputs(replace(config, optimizer=OptimizerConfig(warmup_steps=9)), shape)


def test_both_programs_end_completions_where_a_turn_does(
    tmp_path: Path, config: Config, tied_model: Path
) -> None:
    """Supervised training ends completions, and stops, where RL that goes on from it does.

    Token 1 ends sequences; 97, a tilde, ends a turn of the template; the model's own file names 5.
    """
    model = shutil.copytree(tied_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}~{% endfor %}"
    tokenizer.save_pretrained(model)
    rows = [
        {"prompt": "1+1=", "task": "math", "solutions": ["2"], "query_id": f"q{number}"}
        for number in range(4)
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = replace(config, model=ModelConfig(path=str(model)))
    solutions = load_sft_inputs(chat, shape_of(model))
    sampling = replace(
        chat, data=DataConfig(train_path=f"{tmp_path}/problems.jsonl", prompts_per_step=4)
    )
    assert (
        solutions.stop_token_ids
        == load_inputs(sampling, shape_of(model)).stop_token_ids
        == (1, 5, 97)
    )
