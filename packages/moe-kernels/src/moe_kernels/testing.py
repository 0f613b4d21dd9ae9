"""What this package ships for tests: ragged cases, poisoned memory, and the conformance kit of grouped GEMM backends.

Shape legend: T tokens, K choices per token (of `ragged_ids`), R rows, E experts, K and N features (of the kit).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.grouped_gemm.api import GroupedGemm


@dataclass(frozen=True)
class RaggedCase:
    """How many rows each expert has, and how many rows follow that belong to none."""

    name: str
    counts: tuple[int, ...]
    rows_after: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.counts) + self.rows_after

    def offsets_E(self, device: str = "cpu") -> Tensor:
        """int32, inclusive."""
        return torch.tensor(self.counts, device=device).cumsum(0).to(torch.int32)


RAGGED_CASES = (
    RaggedCase("balanced", (8, 8, 8, 8)),
    RaggedCase("uneven", (1, 13, 4, 7, 30)),
    RaggedCase("first and last empty", (0, 9, 5, 0)),
    RaggedCase("only the last", (0, 0, 0, 21)),
    RaggedCase("one row each", (1, 1, 1)),
    RaggedCase("one expert", (17,)),
    RaggedCase("rows after", (6, 0, 11), rows_after=5),
    RaggedCase("all empty, rows after", (0, 0, 0), rows_after=4),
    RaggedCase("no rows", (0, 0)),
)
# What finds most, for a backend that takes long.
FEW_RAGGED_CASES = tuple(case for case in RAGGED_CASES if case.name in ("uneven", "rows after", "no rows"))


def ragged_ids(
    num_tokens: int, num_choices: int, num_experts: int, *, seed: int, skew: float = 1.0, dropped: float = 0.0
) -> Tensor:
    """Choices for a test, int64 [T, K]: distinct experts in each token, low ids preferred.

    Args:
        seed: of a generator of its own.
        skew: expert e is preferred with weight exp(-skew * e); 0 is even, and 2 leaves high ids without tokens.
        dropped: share of choices that become -1, and of tokens that lose all their choices.
    """
    if num_choices > num_experts:
        raise MoeKernelsError(f"{num_choices} distinct choices need at least as many experts, not {num_experts}")
    generator = torch.Generator().manual_seed(seed)
    noise_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    key_TE = -torch.log(-torch.log(noise_TE)) - skew * torch.arange(num_experts)
    ids_TK = key_TE.argsort(-1, descending=True)[:, :num_choices]
    lost_TK = torch.rand(ids_TK.shape, generator=generator) < dropped
    lost_T = torch.rand(num_tokens, 1, generator=generator) < dropped
    return ids_TK.masked_fill(lost_TK | lost_T, -1)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN or the largest integer, so that reading what nobody wrote shows at the first step."""
    memory: Any = torch.utils.deterministic
    # Unlike torch.use_deterministic_algorithms this does not import the compiler, which takes two seconds.
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill


def rounding_error(dtype: torch.dtype, implementation: str) -> float:
    """Largest relative error of a normal number that is rounded once: half a unit in the last place.

    Triton's interpreter truncates to bfloat16 where a GPU rounds, which costs a whole unit.
    """
    truncates = implementation == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available()
    return torch.finfo(dtype).eps * (1 if truncates else 0.5)


class GroupedGemmConformance:
    """What every `GroupedGemm` must do. Subclass it in a test module, name the class `Test...`, and set the attributes.

    Results are judged per expert against a dense fp64 reference: the relative error may be twice that of the same
    product formed plainly in the dtype under test, and in fp32 that of a sum in another order. Inputs are of order one
    and every test runs in poisoned memory.

    Attributes:
        backend: the implementation under test.
        dtypes: those it supports.
        device: where tensors live.
        features: pairs (K, N); the odd ones are not aligned to anything.
        cases: how many rows each expert has.
    """

    backend: GroupedGemm
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    device: str = "cpu"
    features: tuple[tuple[int, int], ...] = ((32, 48), (31, 17), (12, 20))
    cases: tuple[RaggedCase, ...] = RAGGED_CASES

    def test_forward_is_the_product_with_each_experts_weight(self) -> None:
        def check(problem: _Problem) -> None:
            y_RN = self.backend.forward(problem.x_RK, problem.w_EKN, problem.offsets_E)
            problem.check_rows(y_RN, problem.x_RK, problem.w_EKN)

        self._for_every_problem(check)

    def test_dgrad_is_the_product_with_each_experts_transposed_weight(self) -> None:
        def check(problem: _Problem) -> None:
            dx_RK = self.backend.dgrad(problem.grad_RN, problem.w_EKN, problem.offsets_E)
            problem.check_rows(dx_RK, problem.grad_RN, problem.w_EKN.transpose(1, 2))

        self._for_every_problem(check)

    def test_wgrad_is_each_experts_product_and_zero_for_experts_without_rows(self) -> None:
        def check(problem: _Problem) -> None:
            problem.check_weights(self.backend.wgrad(problem.x_RK, problem.grad_RN, problem.offsets_E))

        self._for_every_problem(check)

    def test_main_grad_is_added_to_in_its_own_dtype(self) -> None:
        def check(problem: _Problem) -> None:
            start_EKN = problem.random_main_grad()
            main_grad_EKN = start_EKN.clone()
            result = self.backend.wgrad(problem.x_RK, problem.grad_RN, problem.offsets_E, main_grad_EKN=main_grad_EKN)
            assert result is main_grad_EKN, f"{problem}: the main gradient itself is returned"
            problem.check_weights(main_grad_EKN, start_EKN)

        self._for_every_problem(check)

    def test_main_grad_of_masked_experts_is_left_alone(self) -> None:
        def check(problem: _Problem) -> None:
            start_EKN = problem.random_main_grad()
            main_grad_EKN = start_EKN.clone()
            wanted_E = torch.arange(len(problem.case.counts), device=self.device) % 2 == 1
            self.backend.wgrad(
                problem.x_RK,
                problem.grad_RN,
                problem.offsets_E,
                main_grad_EKN=main_grad_EKN,
                accumulate_E=wanted_E,
            )
            assert torch.equal(main_grad_EKN[~wanted_E], start_EKN[~wanted_E]), f"{problem}: masked experts changed"
            problem.check_weights(main_grad_EKN, start_EKN, wanted_E)

        self._for_every_problem(check)

    def test_inputs_are_left_alone_and_a_second_call_gives_the_same_bits(self) -> None:
        def check(problem: _Problem) -> None:
            tensors = (problem.x_RK, problem.w_EKN, problem.grad_RN, problem.offsets_E)
            before = [tensor.clone() for tensor in tensors]
            results = [
                (
                    self.backend.forward(problem.x_RK, problem.w_EKN, problem.offsets_E),
                    self.backend.dgrad(problem.grad_RN, problem.w_EKN, problem.offsets_E),
                    self.backend.wgrad(problem.x_RK, problem.grad_RN, problem.offsets_E),
                )
                for _ in range(2)
            ]
            for tensor, copy in zip(tensors, before, strict=True):
                assert torch.equal(tensor, copy), f"{problem}: an input changed"
            for first, second in zip(*results, strict=True):
                assert torch.equal(first, second), f"{problem}: two calls differ"

        self._for_every_problem(check)

    def _for_every_problem(self, check: Callable[["_Problem"], None]) -> None:
        with poisoned_memory():
            for dtype in self.dtypes:
                for case in self.cases:
                    for k, n in self.features:
                        check(_Problem.draw(case, k, n, dtype, self.device))


@dataclass(frozen=True)
class _Problem:
    case: RaggedCase
    dtype: torch.dtype
    x_RK: Tensor
    w_EKN: Tensor
    grad_RN: Tensor
    offsets_E: Tensor

    @classmethod
    def draw(cls, case: RaggedCase, k: int, n: int, dtype: torch.dtype, device: str) -> "_Problem":
        shapes = ((case.num_rows, k), (len(case.counts), k, n), (case.num_rows, n))
        x_RK, w_EKN, grad_RN = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        return cls(case, dtype, x_RK, w_EKN, grad_RN, case.offsets_E(device))

    def __str__(self) -> str:
        return f"{self.case.name}, {self.dtype}, K={self.w_EKN.shape[1]}, N={self.w_EKN.shape[2]}"

    def random_main_grad(self) -> Tensor:
        return torch.randn(self.w_EKN.shape, device=self.w_EKN.device, dtype=internal_dtype(self.dtype))

    def check_rows(self, y_RN: Tensor, x_RK: Tensor, w_EKN: Tensor) -> None:
        """y of `x[r] @ w[e(r)]`, and zero for rows after the last offset."""
        assert y_RN.shape == (x_RK.shape[0], w_EKN.shape[2]), f"{self}: shape {tuple(y_RN.shape)}"
        assert y_RN.dtype == self.dtype, f"{self}: dtype {y_RN.dtype}"
        for expert, rows in enumerate(self._rows()):
            self._check(f"expert {expert}", y_RN[rows], x_RK[rows], w_EKN[expert])
        assert not y_RN[sum(self.case.counts) :].any(), f"{self}: rows after the last offset are not zero"

    def check_weights(self, dw_EKN: Tensor, start_EKN: Tensor | None = None, wanted_E: Tensor | None = None) -> None:
        """dw of `x_e.T @ grad_e`, on top of `start` for a main gradient, of the wanted experts."""
        assert dw_EKN.shape == self.w_EKN.shape, f"{self}: shape {tuple(dw_EKN.shape)}"
        assert dw_EKN.dtype == (self.dtype if start_EKN is None else start_EKN.dtype), f"{self}: dtype {dw_EKN.dtype}"
        for expert, rows in enumerate(self._rows()):
            if wanted_E is not None and not wanted_E[expert]:
                continue
            start = None if start_EKN is None else start_EKN[expert]
            self._check(f"expert {expert}", dw_EKN[expert], self.x_RK[rows].t(), self.grad_RN[rows], start)

    def _rows(self) -> Iterator[slice]:
        start = 0
        for count in self.case.counts:
            yield slice(start, start + count)
            start += count

    def _check(self, what: str, got: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> None:
        exact = a.double() @ b.double()
        # Without rows the plain product is exactly zero, and so must the result be.
        plain = (a @ b).double()
        if start is not None:
            exact, plain = exact + start.double(), plain + start.double()
        scale = float(exact.norm())
        limit = 2 * float((plain - exact).norm())
        if start is not None or self.dtype == torch.float64:
            # The addition rounds once more; and fp64 is as exact as its reference.
            limit += 16 * torch.finfo(got.dtype).eps * scale
        elif self.dtype == internal_dtype(self.dtype):
            # Summed in the dtype itself, where one term after another rounds more than the partial sums of a library:
            # by 0.2 sqrt(terms) eps, of terms of order one.
            limit += a.shape[1] ** 0.5 / 4 * torch.finfo(self.dtype).eps * scale
        elif limit > 0:
            # A plain product may be exact by luck, and then another order of summation is no fault.
            limit += torch.finfo(self.dtype).eps / 16 * scale
        error = float((got.double() - exact).norm())
        # Not `error > limit`: an error of NaN must fail.
        assert error <= limit, (
            f"{self}, {what}: error {error:.3g} of a result of norm {scale:.3g}, the limit is {limit:.3g}"
        )
