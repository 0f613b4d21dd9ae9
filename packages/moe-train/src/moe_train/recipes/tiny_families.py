"""The public families at a size that two CPU cores train in minutes: the same text and steps, another model each.

Each model is one that a `config.json` of its family can say (`moe_train.hf`).
"""

from moe_kernels.config import RouterConfig
from moe_memory.config import OptimConfig
from moe_train.config.tree import DataConfig, LoopConfig, TrainConfig
from moe_train.models.config import BalanceConfig, DecoderConfig, LatentConfig
from moe_train.plugins import RECIPE_INTERFACE_VERSION, RecipePlugin


def qwen3_moe() -> TrainConfig:
    """Queries and keys normalised by head, a balance loss over the global batch."""
    return _train(
        DecoderConfig(
            qk_norm="head",
            router=RouterConfig(top_k=2, normalize=True),
            balance=BalanceConfig(glob=1e-2, z=1e-3),
            init_std=0.08,
        )
    )


def qwen2_moe() -> TrainConfig:
    """A gated shared expert, biases of the projections before attention, weights of choices as they are."""
    return _train(
        DecoderConfig(
            qk_norm="none",
            qkv_bias=True,
            shared_features=128,
            shared_gate=True,
            router=RouterConfig(top_k=2, normalize=False),
            balance=BalanceConfig(aux=1e-2),
            init_std=0.08,
        )
    )


def mixtral() -> TrainConfig:
    """A sliding window, few experts."""
    return _train(
        DecoderConfig(
            qk_norm="none",
            sliding_window=128,
            router=RouterConfig(top_k=2, normalize=True),
            balance=BalanceConfig(aux=1e-2),
            init_std=0.08,
        )
    )


def olmoe() -> TrainConfig:
    """Queries and keys normalised over all heads together, many small experts."""
    return _train(
        DecoderConfig(
            num_kv_heads=4,
            qk_norm="all",
            num_experts=16,
            expert_features=64,
            router=RouterConfig(top_k=4, normalize=False),
            balance=BalanceConfig(aux=1e-2, z=1e-3),
            init_std=0.08,
        )
    )


def deepseek_v3() -> TrainConfig:
    """Latent attention, a dense first layer, groups of experts, a shared expert, balance by bias, one token ahead."""
    return _train(
        DecoderConfig(
            attention="latent",
            num_kv_heads=4,
            qk_norm="none",
            latent=LatentConfig(kv_features=64, query_features=96, rotary_features=16, value_features=32),
            num_experts=16,
            expert_features=64,
            dense_layers=(0,),
            dense_features=256,
            shared_features=64,
            router=RouterConfig(top_k=4, score="sigmoid", normalize=True, scale=2.5, groups=4, group_top_k=2),
            balance=BalanceConfig(seq=1e-4, bias_rate=1e-3),
            mtp_layers=1,
            mtp_weight=0.3,
            init_std=0.08,
        ),
        DataConfig(separate_documents=True),
    )


def _train(model: DecoderConfig, data: DataConfig | None = None) -> TrainConfig:
    return TrainConfig(
        model=model,
        data=DataConfig() if data is None else data,
        optim=OptimConfig(lr=3e-3),
        train=LoopConfig(steps=200, global_batch_sequences=16, microbatch_sequences=16),
    )


QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, DEEPSEEK_V3 = (
    RecipePlugin(
        name=f"tiny_{build.__name__}",
        interface_version=RECIPE_INTERFACE_VERSION,
        summary=f"the family {build.__name__}, small; {summary}",
        build=build,
    )
    for build, summary in (
        (qwen3_moe, "balance over the global batch"),
        (qwen2_moe, "a gated shared expert"),
        (mixtral, "a sliding window"),
        (olmoe, "many small experts"),
        (deepseek_v3, "latent attention, shared expert, expert bias, one token ahead"),
    )
)
