"""`tiny_moe`: a small Mixture-of-Experts decoder on the shipped text; minutes on two CPU cores."""

from moe_kernels.config import RouterConfig
from moe_memory.config import OptimConfig
from moe_train.config.tree import LoopConfig, TrainConfig
from moe_train.models.config import BalanceConfig, DecoderConfig
from moe_train.plugins import RECIPE_INTERFACE_VERSION, RecipePlugin


def build() -> TrainConfig:
    """The configuration."""
    return TrainConfig(
        model=DecoderConfig(
            num_layers=4,
            model_features=128,
            num_heads=4,
            num_kv_heads=2,
            head_features=32,
            num_experts=8,
            expert_features=128,
            # Weights that add up to K: each chosen expert starts at the size of a dense layer.
            router=RouterConfig(top_k=2, score="softmax", normalize=True, scale=2.0),
            balance=BalanceConfig(aux=1e-2, z=1e-3),
            init_std=0.08,
        ),
        optim=OptimConfig(lr=3e-3),
        train=LoopConfig(steps=200, global_batch_sequences=16, microbatch_sequences=16),
    )


RECIPE = RecipePlugin(
    name="tiny_moe",
    interface_version=RECIPE_INTERFACE_VERSION,
    summary="4 layers of 8 experts on State of the Union addresses, byte by byte; minutes on a laptop without a GPU",
    build=build,
)
