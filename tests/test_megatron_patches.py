import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random

import megatron_patches
from megatron_patches.optimizer import tensor_types_named_as_on_cuda, with_cuda_type_names

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def _patched() -> None:
    megatron_patches.apply("cpu")


IN_A_FRESH_PROCESS = """
import json, sys, torch
import torch.distributed, torch.nn.functional
import megatron.core.optimizer, megatron.core.tensor_parallel
import megatron_patches

def state():
    modules = {name: module for name, module in sys.modules.items()
               if name == "torch" or name.startswith(("torch.cuda", "torch.distributed", "torch.nn"))}
    found = {(name, key): id(value) for name, module in modules.items()
             for key, value in vars(module).items() if not key.startswith("__")}
    classes = (torch.Tensor, torch.nn.Parameter, torch.Generator, torch.optim.Optimizer)
    return found | {(c.__name__, key): id(value) for c in classes for key, value in vars(c).items()}

before, megatron = state(), sys.modules["megatron.core.tensor_parallel.random"]
first = megatron.torch is torch
megatron_patches.apply("cuda")
after_cuda, untouched_on_cuda = state(), megatron.torch is torch
megatron_patches.apply("cpu")
after_cpu, proxy = state(), megatron.torch
megatron_patches.apply("cpu")
print(json.dumps({
    "size": len(before),
    "changed": [str(key) for key in before if after_cpu.get(key) != before[key]],
    "added": [str(key) for key in after_cpu.keys() - before.keys()],
    "cuda": after_cuda == before and first and untouched_on_cuda,
    "patched": proxy is not torch,
    "once": megatron.torch is proxy and state() == after_cpu,
    "type": torch.ones(1).type(),
}))
"""


def test_in_a_fresh_process_no_name_of_torch_is_changed():
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["size"] > 1000
    assert report["changed"] == [] and report["added"] == []
    assert report["patched"] and report["once"] and report["type"] == "torch.FloatTensor"
    assert report["cuda"], "on CUDA nothing may be patched"


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1)], ids=str)
def test_megatrons_torch_makes_on_the_cpu_what_is_asked_of_a_gpu(device: object):
    megatron_torch = megatron_optimizer.torch
    assert megatron_torch.zeros(2, device=device).device.type == "cpu"
    assert megatron_torch.tensor([1, 2], device=device).tolist() == [1, 2]
    assert megatron_torch.empty_like(torch.ones(3), device=device).shape == (3,)
    assert megatron_torch.cuda.current_device() == torch.device("cpu")
    megatron_torch.cuda.synchronize()


def test_megatrons_torch_hands_on_everything_else():
    megatron_torch = megatron_optimizer.torch
    assert (
        megatron_torch.Tensor is torch.Tensor
        and megatron_torch.nn is torch.nn
        and megatron_torch.float32 is torch.float32
    )
    assert megatron_torch.cuda.is_available is torch.cuda.is_available
    assert megatron_torch.empty(2, device="meta").device.type == "meta"
    with pytest.raises(AttributeError, match="no_such_name"):
        megatron_torch.no_such_name  # noqa: B018


def test_megatrons_random_states_are_torchs():
    state = megatron_random._get_cuda_rng_state()
    first = torch.rand(3)
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_types_are_named_as_on_a_gpu_only_while_asked():
    parameter = torch.nn.Parameter(torch.ones(1))
    with tensor_types_named_as_on_cuda():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert parameter.type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type() == parameter.type() == "torch.FloatTensor"


def test_the_type_comes_back_after_an_error():
    original = torch.Tensor.type
    with pytest.raises(KeyError), tensor_types_named_as_on_cuda():
        raise KeyError
    assert torch.Tensor.type is original


def test_a_wrapped_function_sees_the_names_of_a_gpu_and_keeps_its_own():
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor) -> str:
        """What it says."""
        return tensor.type()

    wrapped = with_cuda_type_names(type_name)
    assert wrapped(torch.ones(1)) == "torch.cuda.FloatTensor"
    assert (wrapped.__name__, wrapped.__doc__) == ("type_name", "What it says.")
    assert torch.Tensor.type is original
