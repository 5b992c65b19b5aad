"""transformers' LlamaForCausalLM on one process, tuned as its users would for training on CPU.

SDPA attention without a mask (the causal kernel), no key/value cache, fused AdamW, loss of the
model's own, divided by the tokens of the whole batch so that accumulation is exact.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from benchmarks.peers.spec import Job, Recipe
from benchmarks.peers.systems.optimizer import adamw


class TransformersTrainer:
    """See `worker.Trainer`."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.optimizer = adamw(model.parameters(), recipe)

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """One update; see `worker.Trainer.step`."""
        loss = torch.zeros(())
        for batch in tokens.split(self.recipe.micro_batch_size):
            part = self.model(
                input_ids=batch[:, :-1],
                # Already shifted: `labels` only switches the loss on.
                labels=batch[:, 1:],
                shift_labels=batch[:, 1:],
                num_items_in_batch=self.recipe.tokens_per_step,
                use_cache=False,
            ).loss
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def build(job: Job) -> TransformersTrainer:
    """Loads the checkpoint the way transformers does."""
    if job.layout.world_size > 1:
        raise ValueError(f"transformers runs on one process here, not on {job.layout}")
    model = LlamaForCausalLM.from_pretrained(
        job.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    return TransformersTrainer(model.train(), job.recipe)
