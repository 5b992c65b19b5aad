"""What devices and links can do at best, from their makers' data sheets. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        bf16_tflops: dense matrix products in bf16, TFLOP/s. Data sheets of Hopper and Blackwell
            print twice as much, which only sparse matrices reach.
        memory_gb, memory_tb_per_s: size in 10^9 bytes, and bandwidth.
        nvlink_gb_per_s: to all neighbours together, in one direction.
        torch_names: what torch calls it. Whole names: the PCIe and NVL forms of a chip are slower
            than its SXM form, and a slice of it (MIG) is less than the whole.
        measured_tflops: best matrix product that was measured; None if not known.
    """

    bf16_tflops: float
    memory_gb: float
    memory_tb_per_s: float
    nvlink_gb_per_s: float
    torch_names: tuple[str, ...]
    measured_tflops: float | None = None

    @property
    def peak_flops(self) -> float:
        """Dense bf16 FLOP/s, what MFU and HFU are fractions of."""
        return self.bf16_tflops * 1e12


DEVICES: dict[str, Device] = {
    # NVIDIA A100 Tensor Core GPU data sheet, 2021.
    "A100-SXM-80GB": Device(312.0, 80, 2.0, 300, ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB")),
    # NVIDIA H100 Tensor Core GPU data sheet, 2023.
    "H100-SXM": Device(989.0, 80, 3.35, 450, ("NVIDIA H100 80GB HBM3",), measured_tflops=794.5),
    # NVIDIA H200 Tensor Core GPU data sheet, 2024: the H100's chip with more and faster memory.
    "H200-SXM": Device(989.0, 141, 4.8, 450, ("NVIDIA H200",)),
    # NVIDIA Blackwell data sheet, 2024.
    "B200": Device(2250.0, 180, 8.0, 900, ("NVIDIA B200",), measured_tflops=1745.0),
}
"""By the names that recipes and tables use."""

NETWORKS_GB_PER_S: dict[str, float] = {
    "HDR": 25.0,
    "NDR": 50.0,
    "PCIe4-x16": 31.0,
    "PCIe5-x16": 63.0,
}
"""Bandwidth of one link in one direction, 10^9 bytes/s: InfiniBand per GPU, and the host's bus."""


def find_device(torch_name: str) -> Device | None:
    """The device that torch calls `torch_name`, None if its peak isn't known.

    No guess is made from a part of the name: a wrong peak makes every MFU wrong, unseen.
    """
    for device in DEVICES.values():
        if torch_name in device.torch_names:
            return device
    return None
