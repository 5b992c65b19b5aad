"""Floating-point operations of a training step, and how much of a device's peak they are. Pure.

What is counted: matrix products, a multiply and an add each, hence 2mnk FLOPs for (m, k) x (k, n).
Norms, activations, softmax, rotations and the embedding's look-up are not, as is the custom. A
backward has two products for each of the forward's, one per factor's gradient.

Per token and layer, forward, with h hidden, f ffn, q = heads x head_dim, k = kv_heads x head_dim
and s tokens in the sequence:

    part         product                            FLOPs
    qkv          x (h) -> q + 2k                    2 h (q + 2k)
    attention    scores q k^T, and their sum of v   4 q s    or 2 q (s + 1), see below
    out          q -> h                             2 q h
    up           h -> f; llama: gate, too           2 h f    or 4 h f
    down         f -> h                             2 h f
    (model) head h -> V                             2 h V

**Attention is counted in full** unless asked otherwise, as if each token looked at all s, although
the mask leaves it (s + 1) / 2 on average. The published formulas that a result is compared with
count so (Narayanan et al. 2021, arXiv 2104.04473, section 5.1; Chowdhery et al. 2022, arXiv
2204.02311, appendix B); a kernel that skips what the mask removes then gains MFU by it.

**MFU and HFU** (Chowdhery et al. 2022, appendix B): model FLOPs utilisation counts what the model
needs, one forward and one backward, whatever is done; hardware FLOPs utilisation also counts what
is computed again in backward in place of being kept.

    MFU = tokens/s x model FLOPs per token / (ranks x peak of one device)
"""

from __future__ import annotations

from dataclasses import dataclass

from megagrid.config.schema import ModelConfig, Recompute

RECOMPUTED_PARTS: dict[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention",),
    "full": ("qkv", "attention", "out", "up"),
}
"""Parts of a layer that run forward once more during backward (Korthikanti et al. 2022, arXiv
2205.05198, section 5). The layer's last product, down, isn't among them: backward needs what it
takes, not what it makes (`megagrid.nn.recompute`). The head never is. A fused attention kernel that
recomputes its own scores isn't counted."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per token, a token being one position of a sample, trained on or not.

    Attributes:
        forward, backward: of the whole model.
        recomputed: forwards done a second time.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """What MFU counts."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What HFU counts."""
        return self.model + self.recomputed


def layer_forward_flops(
    model: ModelConfig, seq_length: int, *, causal: bool = False
) -> dict[str, int]:
    """FLOPs per token of one layer's forward, by part; see the table above.

    Args:
        seq_length: tokens of a sample.
        causal: count only the scores that the mask leaves.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "qkv": 2 * h * (q + 2 * k),
        "attention": 2 * q * (seq_length + 1) if causal else 4 * q * seq_length,
        "out": 2 * q * h,
        "up": (4 if model.family == "llama" else 2) * h * f,
        "down": 2 * h * f,
    }


def head_forward_flops(model: ModelConfig) -> int:
    """FLOPs per token of the logits, padding of the vocabulary left out."""
    return 2 * model.hidden_size * model.vocab_size


def token_flops(
    model: ModelConfig,
    seq_length: int,
    *,
    recompute: Recompute = "none",
    recompute_interval: int = 1,
    causal: bool = False,
) -> TokenFlops:
    """FLOPs per token of the whole model; a step's are these times its tokens."""
    layer = layer_forward_flops(model, seq_length, causal=causal)
    forward = model.num_layers * sum(layer.values()) + head_forward_flops(model)
    layers = recomputed_layers(range(model.num_layers), recompute, recompute_interval)
    again = layers * sum(layer[part] for part in RECOMPUTED_PARTS[recompute])
    return TokenFlops(forward=forward, backward=2 * forward, recomputed=again)


def recomputed_layers(layers: range, recompute: Recompute, interval: int) -> int:
    """How many of those layers, by their numbers in the model, backward computes again."""
    return 0 if recompute == "none" else sum(number % interval == 0 for number in layers)


def utilisation(
    flops_per_token: float, tokens_per_s: float, *, num_ranks: int, peak_flops: float
) -> float:
    """Share of the ranks' peak that is used: MFU of `TokenFlops.model`, HFU of `.hardware`.

    Args:
        tokens_per_s: of the whole run, all positions: samples/s times the sequence length.
        peak_flops: FLOP/s of one device.
    """
    return tokens_per_s * flops_per_token / (num_ranks * peak_flops)
