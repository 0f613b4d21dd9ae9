"""Tokens per second of the tiny model against Qwen3-MoE of `transformers`, in one run on the same data.

Both train: forward, backward, gradient clipping, AdamW, on the same batches of real text, with the same sizes and
dtype. The peer runs in its fastest mode (`experts_implementation="grouped_mm"`, SDPA, fused AdamW, no router losses);
ours runs as `moe-train run tiny_moe` does, router losses, statistics and FP32 master weights included. Steps alternate
between the two, so that a busy machine slows both; the ratio is the median over pairs of neighbouring steps. The last
column is the share of our CPU time that is neither a matrix product nor attention, by torch's profiler.

    python packages/moe-train/benchmarks/against_transformers.py --steps 15 --threads 1 2 --dtypes float32 bfloat16

Needs `transformers`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_train.assemble import Training, assemble
from moe_train.config.load import load_config
from moe_train.data.batch import Batch
from moe_train.step import run_step

GEMM_AND_ATTENTION = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product")


def ours(dtype: str) -> tuple[Training, Callable[[Batch], float]]:
    training = assemble(load_config("tiny_moe", [], [f"memory.compute_dtype={dtype}"]).config)
    return training, lambda batch: run_step(training, batch, updates=0, window=None).loss


def peer(training: Training, dtype: str) -> Callable[[Batch], float]:
    config = training.config
    model_config = config.model
    qwen = Qwen3MoeConfig(
        vocab_size=training.data.tokenizer.vocab_size,
        hidden_size=model_config.model_features,
        num_hidden_layers=model_config.num_layers,
        num_attention_heads=model_config.num_heads,
        num_key_value_heads=model_config.num_kv_heads,
        head_dim=model_config.head_features,
        moe_intermediate_size=model_config.expert_features,
        intermediate_size=model_config.expert_features,
        num_experts=model_config.num_experts,
        num_experts_per_tok=model_config.router.top_k,
        norm_topk_prob=model_config.router.normalize,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=config.data.sequence_length,
        tie_word_embeddings=model_config.tied_embeddings,
    )
    model = AutoModelForCausalLM.from_config(
        qwen, dtype=getattr(torch, dtype), attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).train()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    print(f"{'dtype':9} {'threads':>7} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>6} {'outside GEMM':>13}")
    for dtype in options.dtypes:
        torch.manual_seed(0)
        training, our_step = ours(dtype)
        peer_step = peer(training, dtype)
        for threads in options.threads:
            torch.set_num_threads(threads)
            pairs = []
            for index in range(options.steps + 2):
                batch = training.data.train.next_batch()
                pair = seconds(our_step, batch), seconds(peer_step, batch)
                if index >= 2:
                    pairs.append(pair)
            tokens = batch.token_BS.numel()
            rates = [tokens / statistics.median(side) for side in zip(*pairs, strict=True)]
            ratio = statistics.median(theirs / mine for mine, theirs in pairs)
            outside = share_outside_gemms(our_step, batch)
            print(f"{dtype:9} {threads:7} {rates[0]:11,.0f} {rates[1]:11,.0f} {ratio:6.2f} {outside:13.0%}", flush=True)


if __name__ == "__main__":
    main()
