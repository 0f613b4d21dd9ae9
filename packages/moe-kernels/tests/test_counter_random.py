"""Shape legend: T tokens, N numbers per token, D features, K choices, E experts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_kernels import MoeKernelsError, RouterConfig, TokenRandom, balanced_choices, route
from moe_kernels.jitter import jitter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(*index: int, **options: object) -> TokenRandom:
    return replace(
        TokenRandom(seed=1, step=2, index_T=torch.tensor(index, dtype=torch.int64, device=DEVICE)), **options
    )


def test_numbers_are_those_of_splitmix64() -> None:
    """Written out with unsigned integers of any size."""
    random, mask = tokens(0, 5, 2**40, -1), 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def number(index: int, counter: int) -> float:
        token = mix((index * 0x9E3779B97F4A7C15 + random.key) & mask)
        return (mix((token + counter * 0x9E3779B97F4A7C15) & mask) >> 40) / 2**24

    expected = [[number(index, counter) for counter in (1, 2, 3)] for index in random.index_T.tolist()]
    assert random.uniform(3, torch.float64).tolist() == expected


def test_every_dtype_draws_the_same_numbers_and_the_first_do_not_depend_on_how_many() -> None:
    random = tokens(*range(20))
    uniform_TN = random.uniform(30, torch.float64)
    assert torch.equal(random.uniform(30, torch.float32).double(), uniform_TN)
    assert torch.equal(random.uniform(7, torch.float64), uniform_TN[:, :7])


def test_a_token_draws_the_same_wherever_it_is() -> None:
    whole_TN = tokens(*range(12)).uniform(4, torch.float64)
    assert torch.equal(tokens(7, 3, 7).uniform(4, torch.float64), whole_TN[[7, 3, 7]])


@pytest.mark.parametrize("other", [{"seed": 3}, {"step": 3}, {"purpose": "x"}, {"seed": 12, "step": 0}])
def test_seed_step_and_purpose_draw_numbers_of_their_own(other: dict[str, object]) -> None:
    first, second = tokens(*range(50)), tokens(*range(50), **other)
    same = first.uniform(20, torch.float64) == second.uniform(20, torch.float64)
    assert same.double().mean() < 0.01
    assert first.of("a").of("b").key != first.of("b").of("a").key


@pytest.mark.parametrize("step", [0, 7, 2**40])
def test_a_step_that_is_a_tensor_draws_the_numbers_of_one_that_is_none(step: int, implementation: str) -> None:
    """Graphs read it anew, and the step before they were captured did not."""
    number, tensor = tokens(*range(9), step=step), tokens(*range(9), step=torch.tensor(step, device=DEVICE))
    for purpose in ("", "layers.3/jitter"):
        one, other = replace(number, purpose=purpose), replace(tensor, purpose=purpose)
        assert isinstance(other.key, Tensor)
        assert other.key.item() == one.key
        assert torch.equal(other.uniform(5, torch.float64), one.uniform(5, torch.float64))
        assert torch.equal(balanced_choices(7, 3, other), balanced_choices(7, 3, one))
        x_TD = torch.randn(9, 12, device=DEVICE)
        assert torch.equal(jitter(x_TD, 0.3, other), jitter(x_TD, 0.3, one)), implementation


def test_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    """Standard errors are 0.0009 for the mean and 0.0032 for a correlation."""
    uniform_TN = tokens(*range(1000)).uniform(100, torch.float64)
    assert abs(float(uniform_TN.mean()) - 0.5) < 0.005
    assert abs(float(uniform_TN.var()) * 12 - 1) < 0.02
    assert uniform_TN.min() >= 0
    assert uniform_TN.max() < 1
    for one, other in ((uniform_TN[1:], uniform_TN[:-1]), (uniform_TN[:, 1:], uniform_TN[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])) < 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [12, 1100])
def test_jitter_multiplies_value_and_gradient_by_the_same_numbers(
    dtype: torch.dtype, features: int, implementation: str
) -> None:
    random = tokens(3, 9, -1, 10**12)
    wide_TD = torch.randn(4, 2 * features, device=DEVICE).to(dtype)
    x_TD = wide_TD[:, ::2].requires_grad_()
    y_TD = jitter(x_TD, 0.2, random)
    grad_TD = torch.randn(4, features, device=DEVICE).to(dtype)
    (dx_TD,) = torch.autograd.grad(y_TD, x_TD, grad_TD)
    factor_TD = 1 + 0.2 * (2 * random.uniform(features, torch.float32) - 1)
    for got, given in ((y_TD, x_TD), (dx_TD, grad_TD)):
        exact = given.double() * factor_TD.double()
        assert got.dtype == dtype
        eps = torch.finfo(dtype).eps
        assert ((got.double() - exact).abs() <= eps * exact.abs() + 1e-30).all()
    assert factor_TD.min() < 0.95
    assert factor_TD.max() > 1.05


def test_jitter_in_fp64_and_none() -> None:
    x_TD = torch.randn(3, 4, dtype=torch.float64, device=DEVICE)
    assert torch.equal(jitter(x_TD, 0.0, tokens(0, 1, 2)), x_TD)
    one_TD = jitter(torch.ones_like(x_TD), 0.5, tokens(0, 1, 2))
    assert torch.equal(one_TD, 0.5 + tokens(0, 1, 2).uniform(4, torch.float64))


@pytest.mark.usefixtures("implementation")
def test_jitter_is_traced_and_its_operator_is_what_it_says(implementation: str) -> None:
    if implementation == "triton":
        from moe_kernels.triton_kernels import jitter as kernels

        key = torch.tensor(2**62, device=DEVICE)
        arguments = (torch.randn(3, 5, device=DEVICE), torch.arange(3, device=DEVICE), 0.1, key)
        torch.library.opcheck(kernels.jitter, arguments, test_utils=("test_schema", "test_faketensor"))
    assert jitter(torch.zeros(0, 5, device=DEVICE), 0.1, tokens()).shape == (0, 5)


def test_jitter_that_is_none_is_refused() -> None:
    with pytest.raises(MoeKernelsError, match=r"not at 1\.0"):
        jitter(torch.zeros(1, 2), 1.0, tokens(0))
    with pytest.raises(MoeKernelsError, match=r"3 tokens have as many indices, not \(2,\)"):
        jitter(torch.zeros(3, 2), 0.1, tokens(0, 1))


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (12, 5), (7, 7), (6, 1)])
def test_forced_balance_gives_every_expert_as_many_choices(experts: int, k: int) -> None:
    ids_TK = balanced_choices(experts, k, tokens(*range(5, 5 + 3 * experts)))
    assert torch.bincount(ids_TK.flatten(), minlength=experts).tolist() == [3 * k] * experts
    assert all(len(set(ids)) == k for ids in ids_TK.tolist())
    assert torch.equal(balanced_choices(experts, k, tokens(9, 6))[1], ids_TK[1])


def test_forced_balance_spreads_the_choices_of_a_token() -> None:
    ids_TK = balanced_choices(8, 4, tokens(*range(8)))
    assert all(sorted(e // 2 for e in ids) == [0, 1, 2, 3] for ids in ids_TK.tolist())
    with pytest.raises(MoeKernelsError, match="9 different experts cannot be chosen of 8"):
        balanced_choices(8, 9, tokens(0))


@pytest.mark.usefixtures("implementation")
def test_forced_balance_acts_in_training_only_and_weighs_by_the_logits() -> None:
    logits_TE = torch.randn(8, 4, device=DEVICE) + torch.tensor([9.0, 0, 0, 0], device=DEVICE)
    logits_TE.requires_grad_()
    config = RouterConfig(top_k=2, force_balance=True)
    valid_T = torch.ones(8, dtype=torch.bool, device=DEVICE)
    evaluated, trained = (route(logits_TE, config, valid_T=valid_T, random=r) for r in (None, tokens(*range(8))))
    assert evaluated.counts_E()[0] == 8
    assert trained.counts_E().tolist() == [4, 4, 4, 4]
    expected_TK = logits_TE.gather(-1, trained.ids_TK).softmax(-1)
    torch.testing.assert_close(trained.probs_TK, expected_TK)
    grads: list[Tensor] = [
        torch.autograd.grad(p_TK.square().sum(), logits_TE)[0] for p_TK in (trained.probs_TK, expected_TK)
    ]
    torch.testing.assert_close(*grads)
    repeated = route(logits_TE, config, ids_TK=evaluated.ids_TK, random=tokens(*range(8)))
    assert torch.equal(repeated.ids_TK, evaluated.ids_TK)
