"""`tiny_long_context`: rows of 65,536 tokens, each one document, for ranks that share rows and features.

    moe-train run tiny_long_context --nproc 4 parallel.tp=2 parallel.cp=2

Attention over rows of this length is almost all of the work, and much of that is one exponential for each head and
pair of tokens, so that there are two heads. Nothing is recomputed: what attention keeps for its backward is as long as
the row, not as long as its square, and to run it again would cost a quarter of the step.
"""

from moe_kernels.config import RouterConfig
from moe_memory.config import OptimConfig
from moe_train.config.tree import DataConfig, LoopConfig, ObserveConfig, TrainConfig
from moe_train.models.config import BalanceConfig, DecoderConfig
from moe_train.plugins import RECIPE_INTERFACE_VERSION, RecipePlugin


def build() -> TrainConfig:
    """The configuration."""
    return TrainConfig(
        model=DecoderConfig(
            num_layers=2,
            model_features=32,
            num_heads=2,
            num_kv_heads=2,
            head_features=16,
            num_experts=8,
            expert_features=128,
            router=RouterConfig(top_k=2, score="softmax", normalize=True, scale=2.0),
            balance=BalanceConfig(aux=1e-2, z=1e-3),
            # The longest wave of the rotary positions is longer than the row.
            rope_base=1e6,
            init_std=0.08,
        ),
        data=DataConfig(sequence_length=65536),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        train=LoopConfig(
            steps=20, global_batch_sequences=1, microbatch_sequences=1, valid_interval_steps=None, valid_sequences=1
        ),
        observe=ObserveConfig(log_interval_steps=1),
    )


RECIPE = RecipePlugin(
    name="tiny_long_context",
    interface_version=RECIPE_INTERFACE_VERSION,
    summary="2 layers on rows of 65,536 tokens, for parallel.tp and parallel.cp; a minute per step on two CPU cores",
    build=build,
)
