"""What the permutation around the experts costs beside a copy of the bytes that it must read and write.

    OMP_NUM_THREADS=1 python packages/moe-kernels/benchmarks/permute.py [--device cuda] [--dtype float32]

Prints, for copies of tokens to rows with their probabilities and for sums of rows per token, the median time as a
multiple of the time of a copy that reads T D and writes T K D elements, or the reverse; one is the least that can be
reached. The gradient of either is the other. Beside them stand a plain gather (`index_select`) and a plain sum
(`index_add` into zeros), and the row map, as a share of the copy of tokens: with its number of rows read on the host,
and with room for any ids. Calls take turns, so that a busy machine slows all. On a CPU most of the time of what returns
many rows goes into fresh memory, which a copy and a gather need alike, and a sum does not.

On a CPU it measures the plain implementation at 2048 tokens, on a GPU both at 4096, of Qwen3-30B-A3B (D 2048, E 128)
and DeepSeek-V3 (D 7168, E 256), both with K 8. Experts are drawn evenly.
"""

import argparse

import torch
from timing import in_turns
from torch import Tensor

from moe_kernels.implementation import Implementation, implementation
from moe_kernels.permute import most_rows, permute_with_probs, row_map, unpermute

REPEATS = 15
TOKENS = {"cpu": 2048, "cuda": 4096}
CHOICES = 8
MODELS = {"Qwen3-30B-A3B": (2048, 128), "DeepSeek-V3": (7168, 256)}
COLUMNS = ("to rows", "to tokens", "index_select", "index_add", "map, read", "map, bound")


def measured(features: int, experts: int, dtype: torch.dtype, device: str) -> list[float]:
    tokens = TOKENS[device]
    x_TD = torch.randn(tokens, features, device=device).to(dtype)
    probs_TK = torch.rand(tokens, CHOICES, device=device)
    ids_TK = torch.rand(tokens, experts, device=device).topk(CHOICES).indices
    bound = most_rows(tokens, CHOICES, experts)
    layout = row_map(ids_TK, experts)
    rows_RD = permute_with_probs(x_TD, probs_TK, layout)[0]
    token_R = layout.choice_R // CHOICES
    # Half of what is read and written.
    copied = rows_RD.new_zeros((x_TD.numel() + rows_RD.numel()) // 2)

    def added() -> Tensor:
        return torch.zeros_like(x_TD).index_add_(0, token_R, rows_RD)

    copy, to_rows, to_tokens, gather, add, read, free = in_turns(
        [
            copied.clone,
            lambda: permute_with_probs(x_TD, probs_TK, layout),
            lambda: unpermute(rows_RD, layout),
            lambda: x_TD.index_select(0, token_R),
            added,
            lambda: row_map(ids_TK, experts),
            lambda: row_map(ids_TK, experts, capacity_rows=bound),
        ],
        device,
        REPEATS,
    )
    return [to_rows / copy, to_tokens / copy, gather / copy, add / copy, read / to_rows, free / to_rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=TOKENS, default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    device, dtype = options.device, getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} thread(s) of a CPU"
    implementations: tuple[Implementation, ...] = ("plain", "triton") if device == "cuda" else ("plain",)
    print(f"{name}, torch {torch.__version__}, {options.dtype}, {TOKENS[device]} tokens; time / time of a copy")
    print(f"{'':24}" + "".join(f"{column:>14}" for column in COLUMNS))
    for chosen in implementations:
        for model, (features, experts) in MODELS.items():
            with implementation(chosen):
                ratios = measured(features, experts, dtype, device)
            print(f"{f'{model} {chosen}':24}" + "".join(f"{ratio:14.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
