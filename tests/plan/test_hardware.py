"""A device is known by its whole name, or not at all."""

import pytest

from megagrid.plan.hardware import DEVICES, find_device


@pytest.mark.parametrize(
    ("torch_name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_device_is_found_by_the_name_that_torch_has_for_it(torch_name, key):
    assert find_device(torch_name) is DEVICES[key]


@pytest.mark.parametrize(
    "torch_name",
    [
        "cpu",
        "",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB",
    ],
)
def test_slower_relatives_and_slices_arent_taken_for_the_device(torch_name):
    assert find_device(torch_name) is None


def test_no_name_means_two_devices():
    names = [name for device in DEVICES.values() for name in device.torch_names]
    assert len(names) == len(set(names))


def test_measured_products_are_below_the_peak():
    for device in DEVICES.values():
        assert (device.measured_tflops or 0) < device.bf16_tflops
