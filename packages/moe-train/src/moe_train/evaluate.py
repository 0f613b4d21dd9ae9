"""Loss on held-out text. Nothing that training reads is changed."""

import torch

from moe_parallel import all_reduce
from moe_train.assemble import Training
from moe_train.chunks import microbatch_logits


@torch.no_grad()
def validation_loss(training: Training, sequences: int) -> float:
    """Mean cross-entropy in nats over the targets of the first `sequences` held-out windows (all if fewer).

    Collective: ranks share every batch and make the same number of forwards; the result is the same on all of them.
    """
    training.model.eval()
    source = training.data.valid
    source.rewind()
    remaining = min(sequences, source.num_sequences)
    # Sum of losses and number of targets.
    totals = torch.zeros(2, dtype=torch.float64)
    while remaining > 0:
        most = min(training.share.ranks * training.config.train.microbatch_sequences, remaining)
        size = source.next_lengths(at_most=most).size
        batch = source.next_batch(training.share.rows(size), at_most=size)
        remaining -= size
        here, logits_TV = microbatch_logits(training, batch)
        if logits_TV is None:
            continue
        mask_T = here.target_mask_BS.flatten()
        loss_T = training.cross_entropy(logits_TV, here.target_BS.flatten(), mask_T)
        if training.groups.rank("tp") == 0:  # all ranks of `tp` have the losses of the same targets
            totals += torch.stack([loss_T.sum(dtype=torch.float64), mask_T.sum()]).cpu()
    group = training.groups.group("world")
    if group is not None:
        all_reduce(totals, group).wait()
    loss, targets = totals.tolist()
    return float(loss / targets)
