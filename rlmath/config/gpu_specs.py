"""GPUs that a run can be planned for: their memory, and what they and their place in a usual server do at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GpuName = Literal[
    "A100-40GB", "A100-80GB", "L40S-48GB", "H100-80GB", "H800-80GB", "H20-96GB", "H200-141GB", "B200-180GB"
]


@dataclass(frozen=True)
class Gpu:
    """One GPU; how much of its speed is reached is for `rlmath.planning.planner` to say."""

    gib: float
    """Memory that CUDA reports for the whole device, to about 1% (GiB); a process may allocate a little less."""
    bf16_tflops: float
    """Dense matrix multiplication in bfloat16 (10^12 FLOP/s)."""
    memory_gb_s: float
    """Bandwidth of its own memory (10^9 bytes/s)."""
    node_gb_s: float
    """To the other GPUs of a server, one direction, of one GPU (10^9 bytes/s): NVLink, or PCIe where there is none."""
    network_gbit_s: float
    """To other servers, one direction, of one GPU (10^9 bits/s), where every GPU has a network card of its own."""
    host_gb_s: float
    """To the host's memory, one direction (10^9 bytes/s): PCIe."""


GPUS: dict[GpuName, Gpu] = {
    "A100-40GB": Gpu(39.4, 312, memory_gb_s=1555, node_gb_s=300, network_gbit_s=200, host_gb_s=32),
    "A100-80GB": Gpu(79.1, 312, memory_gb_s=2039, node_gb_s=300, network_gbit_s=200, host_gb_s=32),
    "L40S-48GB": Gpu(44.4, 362, memory_gb_s=864, node_gb_s=32, network_gbit_s=100, host_gb_s=32),
    "H100-80GB": Gpu(79.1, 989, memory_gb_s=3350, node_gb_s=450, network_gbit_s=400, host_gb_s=64),
    "H800-80GB": Gpu(79.1, 989, memory_gb_s=3350, node_gb_s=200, network_gbit_s=400, host_gb_s=64),
    "H20-96GB": Gpu(95.1, 148, memory_gb_s=4000, node_gb_s=450, network_gbit_s=400, host_gb_s=64),
    "H200-141GB": Gpu(139.8, 989, memory_gb_s=4800, node_gb_s=450, network_gbit_s=400, host_gb_s=64),
    "B200-180GB": Gpu(178.3, 2250, memory_gb_s=8000, node_gb_s=900, network_gbit_s=400, host_gb_s=64),
}
"""SXM boards, but for the L40S. Memory: torch's `total_memory`, compared with public logs ("GPU 0 has a total capacity
of ..."), which vary by driver and board: A100-40GB 39.25 to 39.56, A100-80GB and H100-80GB 79.1 to 79.3, L40S 44.3 to
44.5, H200 139.7 to 139.8, B200 178.35 GiB; H800 is taken to be an H100, and for H20 no such line was found. FLOP/s,
memory bandwidth and NVLink are those of NVIDIA's data sheets: half of the FLOP/s that are given "with sparsity", half
of the NVLink bandwidth that is given for both directions. The H800 is an H100 with NVLink of 400 GB/s in both
directions (arXiv:2505.09343, section 4.1); H20's figures are those that vendors give of its data sheet. Network: one
card for each GPU, as in DGX A100 (200 Gbit/s) and H100 (400 Gbit/s) and in AReaL's cluster (3.2 Tbit/s for 8 GPUs); for
the L40S 100 Gbit/s are assumed. PCIe: generation 4 for A100 and L40S, else 5, 16 lanes."""
