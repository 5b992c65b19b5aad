"""Matrix products in float8, by torchao (Micikevicius et al. 2022, arXiv 2209.05433).

    forward    y  = x W^T      x and W in e4m3, three bits of mantissa
    backward   dx = dy W       dy in e5m2, which has bf16's range but for three bits
               dW = dy^T x

A tensor is scaled by one number, so that its largest value, as it is now, is float8's largest.
Under tensor parallelism that is each rank's part of it. Products add up in fp32 and come out in
bf16; what is kept, gathered and sent is bf16 or fp32, as without.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from megagrid.errors import ConfigError

Multiply = Callable[[Tensor, Tensor], Tensor]
"""x (…, in) and W (out, in) to x W^T (…, out)."""

LEAST_CAPABILITY = (8, 9)
"""Of a CUDA device that multiplies float8: Ada and Hopper."""


def float8_multiply(mode: str, device: torch.device) -> Multiply:
    """What multiplies for linear layers.

    Args:
        mode: "on", or "emulated": the same roundings, by any device, and slower than bf16.

    Raises:
        ConfigError: torchao isn't installed, or the device doesn't multiply float8.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f'train.float8="{mode}" needs torchao, which isn\'t installed; '
            'pip install "megagrid[float8]", or set train.float8="off"'
        )
    if mode == "on" and (lacks := _what_it_lacks(device)):
        raise ConfigError(
            f'train.float8="on" needs a CUDA device of compute capability '
            f"{'.'.join(map(str, LEAST_CAPABILITY))} or more, and {lacks}; "
            'set train.float8="off"'
        )
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig(emulate=mode == "emulated")
    products = LinearMMConfig(
        *(
            ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim)
            for gemm in (
                config.gemm_config_output,
                config.gemm_config_grad_input,
                config.gemm_config_grad_weight,
            )
        )
    )

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)

    return multiply


def _what_it_lacks(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f'this one is "{device.type}"'
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"this one has {'.'.join(map(str, capability))}"
    return None
