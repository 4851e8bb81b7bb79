"""GPUs that a run can be planned for.

The figures are the whole device as CUDA tells it (torch's `get_device_properties().total_memory`), a little under the
name's since firmware and error correction take some. They were compared with what torch prints in public logs
("GPU 0 has a total capacity of ..."), which vary by driver and board: A100-40GB 39.25 to 39.56, A100-80GB and H100-80GB
79.1 to 79.3, L40S 44.3 to 44.5, H200 139.7 to 139.8, B200 178.35 GiB. H800 is taken to be an H100; for H20 such a line
was not found with the device's name beside it.
"""

from __future__ import annotations

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
