"""Loss on held-out text. Nothing that training reads is changed."""

import torch

from moe_train.assemble import Training
from moe_train.step import microbatch_loss


@torch.no_grad()
def validation_loss(training: Training, sequences: int) -> float:
    """Mean cross-entropy in nats over the targets of the first `sequences` held-out windows (all if fewer)."""
    training.model.eval()
    source = training.data.valid
    source.rewind()
    remaining = min(sequences, source.num_sequences)
    total = torch.zeros((), dtype=torch.float64)
    targets = 0
    while remaining > 0:
        batch = source.next_batch().rows(0, remaining)
        remaining -= batch.num_sequences
        loss_T, _ = microbatch_loss(training, batch.to(training.device), None)
        total += loss_T.sum(dtype=torch.float64).cpu()
        targets += int(batch.target_mask_BS.sum())
    return float(total) / targets
