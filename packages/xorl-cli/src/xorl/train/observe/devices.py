"""Peak bf16 rates of accelerators, for computing MFU."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core rates in FLOP/s from the vendors' data sheets (half of the rate "with sparsity"), by the exact
# name that the driver reports: a substring match would confuse "NVIDIA H200" with "NVIDIA H20", a seventh as fast.
PEAK_BF16_FLOPS: dict[str, float] = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The peak bf16 rate of `device` in FLOP/s; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    return PEAK_BF16_FLOPS.get(torch.cuda.get_device_name(device))
