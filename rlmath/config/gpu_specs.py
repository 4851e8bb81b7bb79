"""GPUs that a run can be planned for: memory, and greatest speeds in a usual server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GpuName = Literal[
    "A100-40GB",
    "A100-80GB",
    "L40S-48GB",
    "H100-80GB",
    "H800-80GB",
    "H20-96GB",
    "H200-141GB",
    "B200-180GB",
]


@dataclass(frozen=True)
class Machine:
    """One device and its links at their best, in bytes and FLOPs per second, one direction.

    How much of that is reached is for `rlmath.planning.planner` to say."""

    name: str
    kind: Literal["cpu", "cuda"]
    flops: float
    """Dense matrix multiplication in bfloat16; of a CPU in float32."""
    memory: float
    """Bandwidth of its own memory."""
    node: float
    """Link to the other devices of its server: NVLink, or PCIe where there is none."""
    network: float
    """Link to other servers, where every device has a network card of its own."""
    host: float
    """Link to the host's memory: PCIe."""
    gib: float = 0.0
    """Memory that CUDA reports for the whole device, to about 1% (GiB).

    A process may allocate a little less."""


_FIGURES = {
    "A100-40GB": (312, 1555, 300, 25, 32, 39.4),
    "A100-80GB": (312, 2039, 300, 25, 32, 79.1),
    "L40S-48GB": (362, 864, 32, 12.5, 32, 44.4),
    "H100-80GB": (989, 3350, 450, 50, 64, 79.1),
    "H800-80GB": (989, 3350, 200, 50, 64, 79.1),
    "H20-96GB": (148, 4000, 450, 50, 64, 95.1),
    "H200-141GB": (989, 4800, 450, 50, 64, 139.8),
    "B200-180GB": (2250, 8000, 900, 50, 64, 178.3),
}
"""10^12 FLOP/s; memory, node, network and host in 10^9 bytes/s; GiB."""
GPUS = {
    name: Machine(
        name,
        "cuda",
        1e12 * figures[0],
        memory=1e9 * figures[1],
        node=1e9 * figures[2],
        network=1e9 * figures[3],
        host=1e9 * figures[4],
        gib=figures[5],
    )
    for name, figures in _FIGURES.items()
}
"""SXM boards, except the L40S.

Memory: torch's `total_memory`, compared with public logs, which vary by driver and board by 0.3
GiB; H800 is taken to be an H100, and for H20 no log was found. FLOP/s, memory bandwidth and NVLink
are those of NVIDIA's data sheets, without sparsity, in one direction; the H800 is an H100 with
NVLink of 200 GB/s (arXiv:2505.09343, section 4.1), H20's figures are those of vendors. Network: one
card for each GPU, as in DGX A100 (200 Gbit/s) and H100 (400 Gbit/s); for the L40S 100 Gbit/s are
assumed. PCIe: generation 4 for A100 and L40S, else 5."""
