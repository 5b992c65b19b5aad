"""Write text with a trained checkpoint, on one device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megagrid.checkpoint.find import find_checkpoint
from megagrid.config.load import load as load_config
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError, ConfigError
from megagrid.hf.carried import own_tokenizer, their_tokenizer, tokenizer_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid sample` takes."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or a run's: its newest one"
    )
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to write")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="draw from the K likeliest tokens alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model makes of it."""
    _check(arguments)
    path = arguments.checkpoint
    found = find_checkpoint(path, Path(path), key="CHECKPOINT")
    config = load_config(found.path / "config.toml", [])
    tokenizer = _tokenizer(found.path)
    prompt = tokenizer.encode(arguments.prompt)
    if not prompt and tokenizer.eod_id is None:
        raise ConfigError('--prompt "" is empty, and this tokenizer has no id that begins a text')
    # A model may have rows beyond its tokenizer's ids.
    vocab_size = min(config.model.vocab_size, tokenizer.vocab_size)
    ids = _generate(config, found.path, prompt or [tokenizer.eod_id], vocab_size, arguments)
    sys.stdout.write(tokenizer.decode(ids) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens} writes nothing; choose at least 1")
    if not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature {arguments.temperature} must be 0 or more, as 0.8")
    if arguments.top_k < 1:
        raise ConfigError(f"--top-k {arguments.top_k} leaves nothing to draw; choose at least 1")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed} must be 0 or more, and below 2^63")
    if not Path(arguments.checkpoint).is_dir():
        raise CheckpointError(
            f"{arguments.checkpoint} isn't a folder; name a run or a checkpoint, as "
            "runs/quickstart/checkpoints/step-00000300"
        )


def _tokenizer(checkpoint: Path):
    from megagrid.data.tokenizer import load_tokenizer

    path = own_tokenizer(checkpoint) or their_tokenizer(checkpoint)
    if path is not None:
        return load_tokenizer(path)
    if other := tokenizer_names(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has its tokenizer as {other[0]}, and only sentencepiece's "
            "tokenizer.model is read here; sample with transformers, from the folder that "
            "`megagrid convert to-hf` makes"
        )
    raise CheckpointError(
        f"{checkpoint} has no tokenizer: it was trained on synthetic tokens, which are no text, or "
        "came without one"
    )


def _generate(
    config: Config,
    checkpoint: Path,
    prompt: list[int],
    vocab_size: int,
    arguments: argparse.Namespace,
) -> list[int]:
    """`prompt` and the tokens drawn after it, which are below `vocab_size`."""
    import torch

    from megagrid.checkpoint import entries, load
    from megagrid.grid.start import device_kind, take_device
    from megagrid.nn.layout import parameter_shards
    from megagrid.train.build import MASTER_DTYPES, build_whole_model

    device = take_device(device_kind("auto"), 0)
    model = build_whole_model(config.model, MASTER_DTYPES[config.train.precision], device)
    load(checkpoint, entries(parameter_shards(model)), is_verified=True, weights_only=True)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    ids = torch.tensor([prompt], device=device)
    with torch.inference_mode():
        for _ in range(arguments.tokens):
            window = ids[:, -config.model.max_seq_length :]
            logits = model(window)[-1, 0, :vocab_size].float()
            highest = logits.topk(min(arguments.top_k, vocab_size))
            if arguments.temperature == 0:
                drawn = highest.indices[:1]
            else:
                chances = (highest.values / arguments.temperature).softmax(-1)
                drawn = highest.indices[torch.multinomial(chances, 1, generator=generator)]
            ids = torch.cat([ids, drawn.view(1, 1)], dim=1)
    return ids[0].tolist()
