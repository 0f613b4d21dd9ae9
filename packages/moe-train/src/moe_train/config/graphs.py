"""What CUDA graphs cannot be combined with, and why."""

from moe_parallel.layout import ParallelLayout
from moe_parallel.problem import Problem
from moe_train.config.recompute import captured_units, static_inputs
from moe_train.config.tree import TrainConfig
from moe_train.models.stages import schedule_of


def graph_problems(config: TrainConfig, layout: ParallelLayout) -> list[Problem]:
    """Every rule that graphs of layers violate; none where nothing is captured."""
    kernels = config.kernels
    if kernels.graphs == "none":
        return []
    if kernels.graphs == "full":
        rule = (
            "captures a whole step, which is not built here: shapes would have to be static, as they are with "
            "comm.rank_capacity_factor, and losses, norms and overflows be read behind the capture"
        )
        return [Problem(key="kernels.graphs", value="full", rule=rule, legal="none, partial")]
    return [*_scope_problems(config), *_layout_problems(config, layout), *_data_problems(config)]


def _scope_problems(config: TrainConfig) -> list[Problem]:
    key, scopes = "kernels.graph_scopes", config.kernels.graph_scopes
    if "moe_preprocess" in scopes:
        rule = "the plan of a dispatch exchanges sizes, and reads exact ones on the host, which a graph cannot repeat"
        return [Problem(key=key, value=scopes, rule=rule, legal="attn, moe_router")]
    if not scopes or len(set(scopes)) < len(scopes):
        rule = "names at least one part of a layer, and each at most once"
        return [Problem(key=key, value=scopes, rule=rule, legal="attn, moe_router")]
    return []


def _layout_problems(config: TrainConfig, layout: ParallelLayout) -> list[Problem]:
    """Where graphs would communicate, read weights that move, or be differentiated otherwise than at once."""
    key, found = "kernels.graphs", []

    def refuse(rule: str, legal: str) -> None:
        found.append(Problem(key=key, value=config.kernels.graphs, rule=rule, legal=f"none, or {legal}"))

    if layout.tp > 1 or layout.cp > 1 or config.parallel.dynamic_cp_tokens is not None:
        refuse("graphs contain no communication, and ranks of tp and cp share attention and routers", "tp = cp = 1")
    captured = captured_units(config)
    if captured:
        rule = f"a graph is captured with its backward, which does not run its forward again ({', '.join(captured)})"
        refuse(rule, "memory.recompute without it")
    static = static_inputs(config)
    if static:
        rule = f"graphs read and write the same memory in every replay, which offload frees ({', '.join(static)})"
        refuse(rule, "expert_fc1 and moe_act for memory.offload")
    if config.memory.data_parallel == "fsdp":
        refuse(
            "graphs read weights where they were captured, and fsdp gathers them anew", "memory.data_parallel = zero1"
        )
    if schedule_of(config.parallel).splits_backward:
        refuse(
            "a graph makes the gradients of weights with those of inputs, and the schedule puts them off",
            "gpipe, one_f_one_b or interleaved for parallel.schedule",
        )
    return found


def _data_problems(config: TrainConfig) -> list[Problem]:
    """Where shapes depend on the data, or the host decides by them."""
    key, found, scopes = "kernels.graphs", [], config.kernels.graph_scopes

    def refuse(rule: str, legal: str) -> None:
        found.append(Problem(key=key, value=config.kernels.graphs, rule=rule, legal=f"none, or {legal}"))

    if config.data.sequences != "windows":
        refuse("a graph has one shape, and rows are as long as their longest sequence", "data.sequences = windows")
    router_alone = 'kernels.graph_scopes = ["moe_router"]'
    if config.model.sliding_window is not None and "attn" in scopes:
        refuse("attention decides on the host which parts of a window are seen", router_alone)
    if config.data.separate_documents and "attn" in scopes:
        refuse(
            "attention reads on the host where documents begin", f"data.separate_documents = false, or {router_alone}"
        )
    elif config.data.separate_documents and config.model.balance.seq > 0:
        refuse("rows have as many sequence losses as documents, a number that changes", "model.balance.seq = 0")
    if "moe_router" in scopes and (config.observe.record_choices or config.train.replay_choices is not None):
        refuse("choices are recorded and repeated on the host", "neither of the two")
    return found
