"""A rollout beside vLLM's own `LLM.generate`, of the same requests.

    python tools/bench_rollout.py [--device cpu|cuda] [--model FOLDER] [--requests 256]
        [--tokens 256] [--quick]

The engine of a run, with seeds and log-probs, and a vLLM with its own settings, with them and
without, each in a process of its own, in turns. Prints figures (tools/figures.py), medians:
`tokens_per_second`, and seconds of ours by cause, of which "vLLM's step" has the others but "ours"
in it; those of calls that wait for a GPU contain the wait. One thread on CPU. Without --model
weights are random, 0.6M parameters on CPU and 135M on CUDA.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.cli.demo import one_thread
from rlmath.config.schema import RolloutConfig
from rlmath.distributed.device import Device
from rlmath.rollout.engine import Engine, samples_in_one_kernel
from rlmath.rollout.sampling import Request, request_seed
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from tools.figures import existing_device, print_figure
from tools.gpu_setup import WORLD, one_rank, random_model

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    model: str
    device: str
    requests: int
    new_tokens: int
    """Tokens of every completion."""
    prompt_tokens: int = 128
    memory_share: float = 0.3
    """Share of a GPU's memory, for either side."""

    def prompts(self, repeat: int) -> list[list[int]]:
        """Prompts of a repeat, new in each: none is in a cache of prefixes."""
        draw = random.Random(repeat)
        return [
            [draw.randrange(3, 90) for _ in range(self.prompt_tokens)] for _ in range(self.requests)
        ]

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of a KV cache on CPU, with room for all requests."""
        shape = read_model_shape(Path(self.model))
        token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
        return self.requests * (self.length + 128) * token


Sample = Callable[[int, bool, bool], int]
"""Samples the requests of a repeat, with seeds and log-probs or without; the number of tokens."""
VARIANTS = {
    "seeds and log-probs": (True, True),
    "log-probs": (False, True),
    "neither": (False, False),
}
ANSWER = "bench_rollout: "
"""Before what a side tells; vLLM writes to stdout, too."""


def our_side(
    work: Work, device: Device, seconds: collections.Counter[str]
) -> tuple[Sample, dict[str, Any]]:
    """An engine of a run, and what it is; `seconds` by cause count from now on."""
    settings = RolloutConfig(
        max_num_seqs=work.requests,
        memory_share=work.memory_share,
        cpu_kv_cache_gib=work.cache_bytes / 2**30,
    )
    shapes = engine_shapes(read_model_shape(Path(work.model)), engine_size=1)
    engine = Engine(
        work.model,
        settings,
        work.length,
        mesh=WORLD,
        device=device,
        weight_shapes=shapes,
        load_weights=True,
    )
    core = engine._llm.llm_engine.engine_core
    count_seconds(core, seconds)

    def sample(repeat: int, seeds: bool, logprobs: bool) -> int:
        requests = [
            Request(
                (number, 0),
                tuple(prompt),
                request_seed(1, repeat, "", sample_index=number),
                min_new_tokens=work.new_tokens,
                max_new_tokens=work.new_tokens,
            )
            for number, prompt in enumerate(work.prompts(repeat))
        ]
        ended = engine.running_completions().sample(requests)
        return sum(len(completed.completion.token_ids) for completed in ended)

    asynchronous = core.engine_core.batch_queue is not None
    return sample, {
        "asynchronous": asynchronous,
        "second_runner": samples_in_one_kernel(engine._llm),
    }


def count_seconds(core: Any, seconds: collections.Counter[str]) -> None:
    """Let calls of vLLM's core in this process add their seconds, by cause."""
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture

    inner = core.engine_core
    for owner, name, cause in (
        (core, "get_output", "vLLM's step"),
        (inner.scheduler, "schedule", "scheduling"),
        (inner.model_executor, "execute_model", "inputs and model"),
        (inner.model_executor, "sample_tokens", "sampling and log-probs"),
        (AsyncOutputFuture, "result", "waiting for the GPU"),
        (inner.scheduler, "update_from_output", "output"),
    ):
        setattr(owner, name, counted(getattr(owner, name), seconds, cause))


def counted(
    work: Callable[..., Any], seconds: collections.Counter[str], cause: str
) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return work(*arguments, **named)
        finally:
            seconds[cause] += time.perf_counter() - started

    return timed


def plain_side(work: Work) -> tuple[Sample, dict[str, Any]]:
    """vLLM with its own settings.

    On CPU it has, as ours, one thread that the system places, and prompts are not split, which its
    seeds do not bear there."""
    engine_settings: dict[str, Any] = {"gpu_memory_utilization": work.memory_share}
    if work.device == "cpu":
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        engine_settings = {
            "kv_cache_memory_bytes": work.cache_bytes,
            "dtype": "float32",
            "enable_chunked_prefill": False,
        }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(work.model, max_model_len=work.length, max_num_seqs=work.requests, **engine_settings)

    def sample(repeat: int, seeds: bool, logprobs: bool) -> int:
        parameters = [
            SamplingParams(
                min_tokens=work.new_tokens,
                max_tokens=work.new_tokens,
                seed=request_seed(1, repeat, "", sample_index=number) if seeds else None,
                logprobs=0 if logprobs else None,
                detokenize=False,
            )
            for number in range(work.requests)
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts(repeat)]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample, {}


def run_side(work: Work, device: Device | None) -> None:
    """Describe this side, then answer each line of stdin, [repeat, seeds, log-probs], with seconds.

    Ours has a device, vLLM's has None."""
    seconds: collections.Counter[str] = collections.Counter()
    sample, description = plain_side(work) if device is None else our_side(work, device, seconds)
    sample(-1, True, True)
    print(ANSWER + json.dumps(description), flush=True)
    for line in sys.stdin:
        seconds.clear()
        started = time.perf_counter()
        tokens = sample(*json.loads(line))
        seconds["all"] = time.perf_counter() - started
        assert tokens == work.requests * work.new_tokens, "both sides do the same work"
        print(ANSWER + json.dumps(seconds), flush=True)
    if device is not None:
        os._exit(0)  # an engine of a run ends with its process


class Side:
    """A process that samples when it is told to."""

    def __init__(self, name: str, work: Work) -> None:
        command = [sys.executable, __file__, "--side", name, "--work", json.dumps(asdict(work))]
        environment = one_thread() if work.device == "cpu" else dict(os.environ)
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.what = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"bench_rollout: a side ended with {self._process.wait()}")

    def sample(self, repeat: int, seeds: bool, logprobs: bool) -> dict[str, float]:
        """Seconds, by cause and of "all"."""
        assert self._process.stdin is not None
        print(json.dumps([repeat, seeds, logprobs]), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process, with which vLLM ends its own."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def bench(work: Work, repeats: int) -> None:
    """Measure both sides in turns, and report the medians."""
    sides: dict[str, Side] = {}
    try:
        for name in ("plain", "ours"):
            sides[name] = Side(name, work)
        seconds_by_name: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
        for repeat in range(repeats):
            turns = [
                ("ours", "ours", (True, True)),
                *(("plain", name, variant) for name, variant in VARIANTS.items()),
            ]
            for side, name, (seeds, logprobs) in turns if repeat % 2 else reversed(turns):
                seconds_by_name[name].append(sides[side].sample(repeat, seeds, logprobs))
    finally:
        for side in sides.values():
            side.close()
    report(title_of(work, sides["ours"].what), work.requests * work.new_tokens, seconds_by_name)


def title_of(work: Work, scheduling: dict[str, Any]) -> str:
    """The title says how our engine runs, which may decide the figures."""
    how = "asynchronously" if scheduling["asynchronous"] else "step by step"
    runner = "second" if scheduling["second_runner"] else "first"
    return (
        f"{work.device}, {work.requests} x {work.prompt_tokens} + {work.new_tokens} tokens, "
        f"{Path(work.model).name}, "
        f"scheduled {how}, {runner} runner"
    )


def report(case: str, tokens: int, runs_by_name: dict[str, list[dict[str, float]]]) -> None:
    """The medians of ours and of vLLM's variants, of so many tokens; then the causes of ours."""
    rates = {
        name: statistics.median(tokens / run["all"] for run in runs)
        for name, runs in runs_by_name.items()
    }
    for name in VARIANTS:
        baseline = f"LLM.generate, {name}: {rates[name]:.0f} tokens/s"
        ratio = rates["ours"] / rates[name]
        print_figure(
            "rollout",
            case,
            "tokens_per_second",
            value=rates["ours"],
            unit="tokens/s",
            baseline=baseline,
            ratio=ratio,
        )
    causes = [run | {"ours": run["all"] - run["vLLM's step"]} for run in runs_by_name["ours"]]
    for cause in dict.fromkeys(cause for run in causes for cause in run):
        seconds = statistics.median(run.get(cause, 0.0) for run in causes)
        print_figure("rollout", case, f"seconds: {cause}", value=seconds, unit="s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=existing_device, choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="folder (default: random weights)")
    parser.add_argument("--requests", type=int, default=256, help="at once (default 256)")
    parser.add_argument("--tokens", type=int, default=256, help="of every completion (default 256)")
    parser.add_argument(
        "--quick", action="store_true", help="less work and fewer repeats, within a minute"
    )
    parser.add_argument(
        "--side", choices=("ours", "plain"), help=argparse.SUPPRESS
    )  # these are set by this program
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.side == "ours":
        with one_rank(arguments.work["device"], local_layers=True) as device:
            run_side(Work(**arguments.work), device)
    elif arguments.side == "plain":
        run_side(Work(**arguments.work), None)
    else:
        with tempfile.TemporaryDirectory() as place:
            model = arguments.model or random_model(
                Path(place), "135M" if arguments.device == "cuda" else "tiny"
            )
            tokens = arguments.tokens // 4 if arguments.quick else arguments.tokens
            bench(
                Work(str(model), arguments.device, arguments.requests, new_tokens=tokens),
                3 if arguments.quick else 5,
            )


if __name__ == "__main__":
    main()
