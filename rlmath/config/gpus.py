"""GPUs that a run can be planned for.

The figures are the whole device as CUDA tells it (torch's `get_device_properties().total_memory`), a little under the
name's since firmware and error correction take some. They were compared with what torch prints in public logs
("GPU 0 has a total capacity of ..."), which vary by driver and board: A100-40GB 39.25 to 39.56, A100-80GB and H100-80GB
79.1 to 79.3, L40S 44.3 to 44.5, H200 139.7 to 139.8, B200 178.35 GiB. H800 is taken to be an H100; for H20 such a line
was not found with the device's name beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU_GIB: dict[str, float] = {
    "A100-40GB": 39.4,
    "A100-80GB": 79.1,
    "L40S-48GB": 44.4,
    "H100-80GB": 79.1,
    "H800-80GB": 79.1,
    "H20-96GB": 95.1,
    "H200-141GB": 139.8,
    "B200-180GB": 178.3,
}
"""Memory that CUDA reports for the whole device, to about 1% (GiB); what a process may allocate is a little less."""


@dataclass(frozen=True)
class GpuSpeed:
    """What a GPU and its place in a usual server can do at most; how much of it is reached, `rlmath.planner` says."""

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


GPU_SPEEDS: dict[str, GpuSpeed] = {
    "A100-40GB": GpuSpeed(312, 1555, 300, 200, 32),
    "A100-80GB": GpuSpeed(312, 2039, 300, 200, 32),
    "L40S-48GB": GpuSpeed(362, 864, 32, 100, 32),
    "H100-80GB": GpuSpeed(989, 3350, 450, 400, 64),
    "H800-80GB": GpuSpeed(989, 3350, 200, 400, 64),
    "H20-96GB": GpuSpeed(148, 4000, 450, 400, 64),
    "H200-141GB": GpuSpeed(989, 4800, 450, 400, 64),
    "B200-180GB": GpuSpeed(2250, 8000, 900, 400, 64),
}
"""SXM boards, but for the L40S. FLOP/s, memory and NVLink are those of NVIDIA's data sheets: half of the FLOP/s that
are given "with sparsity", half of the NVLink bandwidth that is given for both directions. The H800 is an H100 with
NVLink of 400 GB/s in both directions (arXiv:2505.09343, section 4.1); H20's are those that vendors give of its data
sheet. Network: one card for each GPU, as in DGX A100 (200 Gbit/s) and H100 (400 Gbit/s) and in AReaL's cluster (3.2
Tbit/s for 8 GPUs); for the L40S 100 Gbit/s are assumed. PCIe: generation 4 for A100 and L40S, else 5, 16 lanes."""
