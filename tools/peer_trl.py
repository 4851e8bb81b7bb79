"""GRPO by TRL, which tools/bench_peer.py starts under torchrun.

On CUDA vLLM is in its process (colocated). It prints as its last line one JSON object: seconds of
every measured step and of its generation, completion tokens and versions. A step is one generation
and all optimizer steps on it; it lasts from the start of a generation to the start of the next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tools.peer_reward import early_letters


@dataclass
class Steps:
    """What is measured; one entry for each generation."""

    started: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    """Seconds of the generation, with the reward and the log-probs that follow it."""
    tokens: list[int] = field(default_factory=list)
    ended: float = 0.0

    def summary(self, warm_up: int) -> dict[str, Any]:
        ends = [*self.started[1:], self.ended]
        seconds = [end - start for start, end in zip(self.started, ends, strict=True)]
        return {
            "step_seconds": seconds[warm_up:],
            "generate_seconds": self.generated[warm_up:],
            "completion_tokens": self.tokens[warm_up:],
        }


class MeasuredTrainer(GRPOTrainer):
    """Notes when a generation starts and ends."""

    steps: Steps

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.steps.started.append(time.perf_counter())
        batch = super()._generate_and_score_completions(inputs)
        self.steps.generated.append(time.perf_counter() - self.steps.started[-1])
        tokens = batch["completion_mask"].sum().float()
        if dist.is_initialized():
            dist.all_reduce(tokens)
        self.steps.tokens.append(int(tokens))
        return batch


class End(TrainerCallback):
    """Notes the end of the last step."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.ended = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt and solutions")
    for name in (
        "prompts",
        "group",
        "max-new-tokens",
        "min-new-tokens",
        "optimizer-steps",
        "steps",
        "warm-up",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument(
        "--micro-batch", type=int, required=True, help="sequences of a rank's micro-batch"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chat", action="store_true", help="prompts are turns of a user")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()]

    def asked(text: str) -> Any:
        return [{"role": "user", "content": text}] if arguments.chat else text

    dataset = datasets.Dataset.from_list(
        [{"prompt": asked(row["prompt"]), "answer": row["solutions"][0]} for row in rows]
    )

    def reward(completions: list[Any], answer: list[str], **more: Any) -> list[float]:
        if arguments.chat:
            return [early_letters(turns[0]["content"]) for turns in completions]
        pairs = zip(completions, answer, strict=True)
        return [5.0 if text.endswith(solution) else -5.0 for text, solution in pairs]

    world = int(os.environ.get("WORLD_SIZE", "1"))
    of_rank = arguments.prompts * arguments.group // world
    accumulated = of_rank // arguments.optimizer_steps // arguments.micro_batch
    on_cuda = arguments.device == "cuda"
    least = "min_tokens" if on_cuda else "min_new_tokens"
    generation = {least: arguments.min_new_tokens} if arguments.min_new_tokens else {}
    vllm: dict[str, Any] = {}
    if on_cuda:
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
        vllm["vllm_max_model_length"] = 512 + arguments.max_new_tokens
    steps = Steps()
    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output,
            use_cpu=not on_cuda,
            bf16=on_cuda,
            ddp_backend="gloo" if world > 1 and not on_cuda else None,
            **vllm,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            per_device_train_batch_size=arguments.micro_batch,
            gradient_accumulation_steps=accumulated,
            steps_per_generation=accumulated * arguments.optimizer_steps,
            num_generations=arguments.group,
            max_completion_length=arguments.max_new_tokens,
            temperature=1.0,
            beta=0.0,
            max_steps=(arguments.steps + arguments.warm_up) * arguments.optimizer_steps,
            generation_kwargs=generation or None,
            logging_steps=arguments.optimizer_steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = MeasuredTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[End(steps)],
        )
        trainer.steps = steps
        trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        versions = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        print(json.dumps(steps.summary(arguments.warm_up) | {"versions": versions}), flush=True)


if __name__ == "__main__":
    main()
