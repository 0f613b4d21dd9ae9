"""Plain twins are traced in one graph by `torch.compile`, without a warning of this package's making.

All but what hashes a key (`jitter`, `force_balance`) and what reckons with fractions (capacity), on the host.
Shape legend: T tokens, D features, E experts, K choices.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import (
    RouterConfig,
    apply_rope,
    balance_loss,
    gated_activation,
    global_balance_loss,
    inject_gradient,
    rms_norm,
    rms_norm_residual,
    rope_tables,
    route,
    scores,
    z_loss,
)
from moe_kernels.cross_entropy import cross_entropy
from moe_kernels.implementation import implementation
from moe_kernels.permute import permute, row_map, unpermute

T, D, E, K = 8, 6, 5, 2
VALID_T = torch.arange(T) < 7


def routed(**options: Any) -> Callable[[Tensor], Tensor]:
    config = RouterConfig(top_k=K, **options)
    return lambda logits_TE: route(logits_TE, config, valid_T=VALID_T).probs_TK


def there_and_back(x_TD: Tensor) -> Tensor:
    layout = row_map(torch.arange(T * K).view(T, K) % E, E, capacity_rows=T * K + 3)
    return unpermute(permute(x_TD, layout).sin(), layout)


# Function and shapes of what it is differentiated by.
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), ((T, D), (D,))),
    "rms_norm_residual": (lambda x, r, w: rms_norm_residual(x, r, w, 1e-5), ((T, D), (T, D), (D,))),
    "gated_activation": (lambda h, p: gated_activation(h, p, "silu"), ((T, 2 * D), (T,))),
    "gated_activation, dense": (lambda h: gated_activation(h, None, "gelu"), ((T, 2 * D),)),
    "apply_rope": (
        lambda q: apply_rope(q, *rope_tables(torch.arange(T)[None], 4, 1e4, torch.float32)),
        ((1, T, 2, D),),
    ),
    "cross_entropy": (lambda x: cross_entropy(x, torch.arange(T) % D), ((T, D),)),
    "route": (routed(), ((T, E),)),
    "route, sigmoid": (routed(score="sigmoid", scale=2.5), ((T, E),)),
    "scores": (lambda x: scores(x, "sigmoid"), ((T, E),)),
    "balance_loss": (
        lambda x: balance_loss(x, torch.arange(T * K).view(T, K) % E, torch.arange(T) // 4, 2, valid_T=VALID_T),
        ((T, E),),
    ),
    "global_balance_loss": (lambda x: global_balance_loss(x, torch.arange(E), 9, 8, K), ((T, E),)),
    "z_loss": (z_loss, ((T, E),)),
    "inject_gradient": (lambda x: inject_gradient(x, x.sin().sum(), 0.1), ((T, E),)),
    "permute, unpermute": (there_and_back, ((T, D),)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_it_is_one_graph_and_has_the_same_bits(name: str) -> None:
    function, shapes = CASES[name]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch.compiler.reset()
    with implementation("plain"):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        results = [one if isinstance(one, tuple) else (one,) for one in (function(*leaves), compiled(*leaves))]
        grads = [torch.randn_like(y) for y in results[0]]
        found = [(*result, *torch.autograd.grad(result, leaves, grads)) for result in results]
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)
