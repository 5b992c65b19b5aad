"""What a device takes for a step's actions is known without waiting for it."""

from __future__ import annotations

import pytest
import torch

from megagrid.pipeline import clock as clock_module
from megagrid.pipeline.clock import DeviceClock


class Device:
    """A device whose events happen at the times of a list, in milliseconds."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.has_come_to = 0.0

    def event(self, **_: object) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.time = self._device.times.pop(0)

    def query(self) -> bool:
        return self.time <= self._device.has_come_to

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def test_the_time_of_all_actions_since_the_last_reading_is_added_up(monkeypatch):
    device = Device(0, 500, 700, 900, 1000, 1100)
    monkeypatch.setattr(clock_module.torch, "Event", device.event)
    clock = DeviceClock()
    for _ in range(2):
        with clock.span():
            pass
    device.has_come_to = 900
    assert clock.read() == pytest.approx(0.7)
    assert clock.read() is None
    with clock.span():
        pass
    assert clock.read() is None  # it is at 900 still, and nobody waits for it


@pytest.mark.gpu
def test_an_accelerator_takes_time_for_products_but_none_to_be_told_of_them():
    device = torch.accelerator.current_accelerator()
    x = torch.ones(4096, 4096, device=device)
    clock = DeviceClock()
    with clock.span():
        for _ in range(20):
            x = x @ x
    x.sum().item()
    assert 0.0 < clock.read() < 10.0
