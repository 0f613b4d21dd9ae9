"""Tokens per second of each tiny family against the same model of `transformers`, in one run on the same data.

Both train: forward, backward, gradient clipping, AdamW, on the same batches of real text, with the same sizes and
dtype. The peer runs in its fastest mode (`experts_implementation="grouped_mm"`, SDPA, fused AdamW, no router losses);
ours runs as `moe-train run` does, router losses, statistics and FP32 master weights included. What the peer has not
(multi-token prediction, masks between documents) is off on both sides, the expert bias is on. Steps alternate between
the two, so that a busy machine slows both; the ratio is the median over pairs of neighbouring steps. The last column is
the share of our CPU time that is neither a matrix product nor attention, by torch's profiler.

    python packages/moe-train/benchmarks/against_transformers.py --steps 15 --threads 1 2 --dtypes float32 bfloat16

Needs `transformers`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from moe_train.assemble import Training, assemble
from moe_train.config.load import load_config
from moe_train.data.batch import Batch
from moe_train.hf.config import config_to_hf
from moe_train.hf.families import FAMILIES
from moe_train.step import run_step
from moe_train.testing import microbatches

GEMM_AND_ATTENTION = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product")
WARM_UP = 2


def ours(family: str, dtype: str) -> tuple[Training, Callable[[Batch], float]]:
    overrides = [f"memory.compute_dtype={dtype}", "model.mtp_layers=0", "data.separate_documents=false"]
    training = assemble(load_config(f"tiny_{family}", [], overrides).config)
    return training, lambda batch: run_step(training, microbatches(training, batch), updates=0, window=None).loss


def peer(family: str, training: Training, dtype: str) -> Callable[[Batch], float]:
    config = training.config
    # A file of theirs says one balance loss; the peer computes none.
    model_config = replace(config.model, balance=replace(config.model.balance, aux=0.0))
    hf = config_to_hf(model_config, FAMILIES[family], training.data.tokenizer.vocab_size)
    kind = getattr(transformers, hf.pop("architectures")[0])
    del hf["model_type"]
    model = transformers.AutoModelForCausalLM.from_config(
        kind.config_class(**hf, pad_token_id=None),
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    ).train()
    assert sum(parameter.numel() for parameter in model.parameters()) == training.costs.parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)

    def step(batch: Batch) -> float:
        logits = model(input_ids=batch.token_BS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def seconds(step: Callable[[Batch], float], batch: Batch) -> float:
    start = time.perf_counter()
    step(batch)
    return time.perf_counter() - start


def share_outside_gemms(step: Callable[[Batch], float], batch: Batch) -> float:
    """Share of our CPU time that is neither a matrix product nor attention, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(batch)
    times = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in recorded.key_averages()}
    inside = sum(us for name, us in times.items() if name.startswith(GEMM_AND_ATTENTION))
    return 1 - inside / sum(times.values())


def compare(family: str, dtype: str, thread_counts: Sequence[int], steps: int) -> None:
    torch.manual_seed(0)
    training, our_step = ours(family, dtype)
    peer_step = peer(family, training, dtype)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        pairs = []
        for index in range(steps + WARM_UP):
            batch = training.data.train.next_batch()
            pair = seconds(our_step, batch), seconds(peer_step, batch)
            if index >= WARM_UP:
                pairs.append(pair)
        tokens = batch.token_BS.numel()
        rates = [tokens / statistics.median(side) for side in zip(*pairs, strict=True)]
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        outside = share_outside_gemms(our_step, batch)
        print(
            f"{family:12} {dtype:9} {threads:7} {rates[0]:11,.0f} {rates[1]:11,.0f} {ratio:6.2f} {outside:13.0%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--families", nargs="+", default=sorted(FAMILIES), choices=sorted(FAMILIES))
    options = parser.parse_args()
    print(
        f"{'family':12} {'dtype':9} {'threads':>7} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>6} "
        f"{'outside GEMM':>13}"
    )
    for family in options.families:
        for dtype in options.dtypes:
            compare(family, dtype, options.threads, options.steps)


if __name__ == "__main__":
    main()
