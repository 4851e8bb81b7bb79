"""Sizes of what is computed in, for what computes it and for what plans its memory."""

CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""Size of one float32 chunk of logits by kind of device; two are held at a time.

On a CPU they should stay in a core's cache (16 MiB was measured to take twice the time of 4). A GPU
has kernels instead, and chunks only without Triton."""
CHUNKS_HELD = 2
ROW_BYTES = 80
"""Bytes held of a row of logits beside the kernels.

They are its sums before and after the tensor-parallel reduction."""

TEACHER_BLOCK_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
"""Size of one float32 block of a teacher's logits by kind of device; three are held at a time.

On a GPU it is some 200 rows of a whole vocabulary: the output layer is read from memory once for
each block, and with fewer rows its product would wait for that (calculated, not measured)."""
TEACHER_BLOCKS_HELD = 3


def flash_takes(head_dim: int, itemsize: int) -> bool:
    """Whether torch's flash kernel for GPUs takes such heads; `itemsize` is bytes a number.

    It has the gradients of larger heads on some GPUs only."""
    return itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
