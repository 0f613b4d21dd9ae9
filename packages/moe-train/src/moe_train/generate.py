"""A sample of text from the model, so that a person can see what it learned."""

import torch
from torch import Tensor

from moe_parallel import all_reduce
from moe_parallel.plan import part_of
from moe_train.assemble import Training
from moe_train.chunks import microbatch_logits
from moe_train.data.batch import Batch, document_numbers


@torch.no_grad()
def generate_text(training: Training, prompt: str, num_tokens: int, *, temperature: float, seed: int) -> str:
    """Continue a prompt by sampling; the same weights, prompt and seed give the same text.

    Collective: every rank gets the text. Every token costs one forward over the last `data.sequence_length` tokens:
    there is no key/value cache.
    """
    training.model.eval()
    tokenizer, length = training.data.tokenizer, training.config.data.sequence_length
    generator = torch.Generator().manual_seed(seed)
    tokens = [tokenizer.end_of_document, *tokenizer.encode(prompt).tolist()]
    start = len(tokens)
    for _ in range(num_tokens):
        token_BS = torch.tensor([tokens[-length:]])
        valid_BS = torch.ones_like(token_BS, dtype=torch.bool)
        separate = training.config.data.separate_documents
        document_BS = document_numbers(token_BS, tokenizer.end_of_document) if separate else None
        logits_V = _last_logits(training, Batch.from_rows(token_BS, token_BS, valid_BS, document_BS=document_BS))
        probs_V = torch.softmax(logits_V.to(training.dtype) / temperature, dim=-1).cpu()
        tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    return tokenizer.decode(tokens[start:])


def _last_logits(training: Training, batch: Batch) -> Tensor:
    """Logits [V] of the last slot of a batch of one row, on every rank."""
    groups, vocab_size, last = training.groups, training.data.tokenizer.vocab_size, batch.token_BS.shape[1] - 1
    here, logits_TV = microbatch_logits(training, batch)
    # One stage has logits, of it one rank of `cp` has the slot, and each of `tp` has a part of its logits.
    start, stop = part_of(vocab_size, groups.size("tp"), groups.rank("tp"))
    logits_V = torch.zeros(vocab_size, dtype=training.dtype, device=training.device)
    if logits_TV is not None:
        logits_V[start:stop] = logits_TV[here.token_index_BS.flatten() == last].sum(0)
    for axes in (("tp", "cp"), ("pp",)):
        if (group := groups.group(*axes)) is not None:
            all_reduce(logits_V, group).wait()
    return logits_V
