"""A sample of text from the model, so that a person can see what it learned."""

import torch

from moe_train.assemble import Training
from moe_train.data.batch import Batch, document_numbers


@torch.no_grad()
def generate_text(training: Training, prompt: str, num_tokens: int, *, temperature: float, seed: int) -> str:
    """Continue a prompt by sampling; the same weights, prompt and seed give the same text.

    Every token costs one forward over the last `data.sequence_length` tokens: there is no key/value cache.
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
        batch = Batch.from_rows(token_BS, token_BS, valid_BS, document_BS=document_BS).to(training.device)
        logits_V = training.model(batch.token_BS, batch.sequence_info(), None).logits_BSV[0, -1]
        probs_V = torch.softmax(logits_V.to(training.dtype) / temperature, dim=-1).cpu()
        tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    return tokenizer.decode(tokens[start:])
