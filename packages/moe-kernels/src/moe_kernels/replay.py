"""Router replay: the choices of one run, forced in another.

Choices are kept by step, microbatch and layer. A microbatch here is one of the global order of a step: microbatch i has
the sequences i * B to i * B + B - 1, whichever rank works on it and however many of them it runs at once. A recording
therefore fits a run with another number of ranks or another cut, and the recordings of ranks can be put together.

Weights are not kept: `route(..., ids_TK=...)` computes them from the logits of now, and gradients flow through them.

Shape legend: M microbatches that are run at once, T tokens of one, K choices per token; `ids_TK` of M is [M * T, K].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError

_NAME = re.compile(r"step-(?P<step>\d+)/microbatch-(?P<microbatch>\d+)/(?P<layer>.+)")


@dataclass(frozen=True)
class ReplayKey:
    """What a recorded tensor belongs to.

    Attributes:
        step: optimizer step.
        microbatch: place in the global order of the step.
        layer: name of the router's layer.
    """

    step: int
    microbatch: int
    layer: str

    def __str__(self) -> str:
        return f"step {self.step}, microbatch {self.microbatch}, layer {self.layer!r}"

    @property
    def name(self) -> str:
        """Name of the tensor in a file, such as `step-00000003/microbatch-00000/layers.0`."""
        return f"step-{self.step:08}/microbatch-{self.microbatch:05}/{self.layer}"

    @classmethod
    def from_name(cls, name: str) -> "ReplayKey":
        """The key that a name was made of.

        Raises:
            MoeKernelsError: the name is of another form.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise MoeKernelsError(
                f"{name!r} is not the name of recorded choices, such as 'step-00000003/microbatch-00000/layers.0'"
            )
        return cls(int(found["step"]), int(found["microbatch"]), found["layer"])


class RouterReplay:
    """Recorded choices, in memory on the CPU, in the smallest of int16 and int32 that holds them.

    A choice of -1 (padding token, dropped choice) is kept and forced as it is. What is recorded again must be the same,
    as it is when a forward pass is recomputed.
    """

    def __init__(self) -> None:
        self._ids: dict[ReplayKey, Tensor] = {}

    def __len__(self) -> int:
        """Number of recorded tensors."""
        return len(self._ids)

    def record(self, step: int, microbatches: range, layer: str, ids_TK: Tensor) -> None:
        """Keep the choices of microbatches that were run at once; the host is synchronised.

        Args:
            step: optimizer step.
            microbatches: places in the global order of the step, of equally many tokens each.
            layer: name of the router's layer.
            ids_TK: [M * T, K], the microbatches one after another, of any integer dtype. A microbatch is recorded as a
                whole: where ranks share its tokens (tensor or context parallelism), gather them first.

        Raises:
            MoeKernelsError: the rows cannot be cut into M parts, an id is not an expert's, or other choices are
                recorded already; the message names the key.
        """
        keys = _keys(step, microbatches, layer)
        if ids_TK.dim() != 2 or ids_TK.shape[0] % len(keys):
            raise MoeKernelsError(
                f"choices of {_among(keys)} are [tokens, choices] with equally many tokens in each of {len(keys)} "
                f"microbatches, not {tuple(ids_TK.shape)}"
            )
        parts_MTK = ids_TK.detach().cpu().reshape(len(keys), ids_TK.shape[0] // len(keys), ids_TK.shape[1])
        for key, part_TK in zip(keys, parts_MTK, strict=True):
            self._put(key, part_TK)

    def choices(
        self,
        step: int,
        microbatches: range,
        layer: str,
        *,
        device: torch.device | str,
        shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Recorded choices as `route` takes them: int64 [M * T, K] on the device, microbatch after microbatch.

        Args:
            step, microbatches, layer: as in `record`; the cut may be another one.
            device: of the result.
            shape: (M * T, K) that the caller needs; anything else is an error.

        Raises:
            MoeKernelsError: nothing is recorded for a key, or something of another shape; the message names the key.
        """
        keys = _keys(step, microbatches, layer)
        parts = []
        for key in keys:
            if key not in self._ids:
                raise MoeKernelsError(f"no choices are recorded for {key}; {self._recorded_instead(key)}")
            parts.append(self._ids[key])
        wanted = shape or (parts[0].shape[0] * len(keys), parts[0].shape[1])
        for key, part_TK in zip(keys, parts, strict=True):
            if (part_TK.shape[0] * len(keys), part_TK.shape[1]) != wanted:
                raise MoeKernelsError(
                    f"the choices recorded for {key} are {_size(*part_TK.shape)}, "
                    f"but {_size(*wanted)} are asked for in {len(keys)} equal microbatches"
                )
        return torch.cat([part_TK.to(torch.int64) for part_TK in parts]).to(device)

    def merge(self, other: "RouterReplay") -> None:
        """Take over what another rank has recorded.

        Raises:
            MoeKernelsError: both have recorded a key, and not the same; the message names it.
        """
        for key, ids_TK in other._ids.items():
            self._put(key, ids_TK)

    def tensors(self) -> dict[str, Tensor]:
        """All recorded tensors by name, in the order of their keys; they share no memory with each other."""
        order = sorted(self._ids, key=lambda key: (key.step, key.microbatch, key.layer))
        return {key.name: self._ids[key] for key in order}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "RouterReplay":
        """The recording that `tensors` gave, for instance after it was read from a file.

        Raises:
            MoeKernelsError: a name or a tensor is not a recording's.
        """
        replay = cls()
        for name, ids_TK in tensors.items():
            replay._put(ReplayKey.from_name(name), ids_TK)
        return replay

    def _put(self, key: ReplayKey, ids_TK: Tensor) -> None:
        compact_TK = _compact(key, ids_TK)
        known_TK = self._ids.setdefault(key, compact_TK)
        if known_TK.shape != compact_TK.shape:
            raise MoeKernelsError(
                f"choices are recorded for {key} already, {_size(*known_TK.shape)}; now {_size(*compact_TK.shape)} came"
            )
        if known_TK.dtype != compact_TK.dtype or not torch.equal(known_TK, compact_TK):
            others = int((known_TK != compact_TK).any(1).sum())
            raise MoeKernelsError(
                f"other choices are recorded for {key} already, {others} of {known_TK.shape[0]} tokens differ; "
                "record a step once, and keep its choices when a forward pass is repeated"
            )

    def _recorded_instead(self, key: ReplayKey) -> str:
        """What comes closest to a missing key: the other microbatches of its layer, layers of its step, or steps."""
        microbatches = sorted(k.microbatch for k in self._ids if (k.step, k.layer) == (key.step, key.layer))
        if microbatches:
            return f"of this step and layer there are microbatches {_short(microbatches)}"
        layers = sorted({k.layer for k in self._ids if k.step == key.step})
        if layers:
            return f"of this step there are layers {_short(layers)}"
        return f"there are steps {_short(sorted({k.step for k in self._ids}))}" if self._ids else "nothing is recorded"


@dataclass(frozen=True, kw_only=True)
class ReplaySlot:
    """The part of a recording that concerns what is run right now; a router uses it without knowing the mode.

        routing = route(logits_TE, config, ids_TK=slot.recall(layer, device=logits_TE.device))
        slot.remember(layer, routing.ids_TK)

    Attributes:
        replay: the recording.
        step: optimizer step.
        microbatches: those that are run at once.
        mode: `record` keeps what the router chooses, `force` repeats what was kept.
    """

    replay: RouterReplay
    step: int
    microbatches: range
    mode: Literal["record", "force"]

    def recall(
        self, layer: str, *, device: torch.device | str = "cpu", shape: tuple[int, int] | None = None
    ) -> Tensor | None:
        """Choices to force, or None where the router is free; see `RouterReplay.choices`."""
        if self.mode == "record":
            return None
        return self.replay.choices(self.step, self.microbatches, layer, device=device, shape=shape)

    def remember(self, layer: str, ids_TK: Tensor) -> None:
        """Keep what was chosen if this is being recorded; see `RouterReplay.record`."""
        if self.mode == "record":
            self.replay.record(self.step, self.microbatches, layer, ids_TK)


def _keys(step: int, microbatches: range, layer: str) -> list[ReplayKey]:
    if step < 0 or not microbatches or min(microbatches) < 0 or not layer:
        raise MoeKernelsError(
            f"choices belong to a step, to at least one microbatch, both counted from 0, and to a named layer; "
            f"step {step}, {microbatches} and layer {layer!r} were given"
        )
    return [ReplayKey(step, microbatch, layer) for microbatch in microbatches]


def _compact(key: ReplayKey, ids_TK: Tensor) -> Tensor:
    """A copy in the smallest dtype, so that nothing else writes to it and it can be saved alone."""
    if ids_TK.dim() != 2 or ids_TK.is_floating_point() or ids_TK.is_complex() or ids_TK.dtype == torch.bool:
        raise MoeKernelsError(
            f"choices of {key} are integers [tokens, choices], not {ids_TK.dtype} of shape {tuple(ids_TK.shape)}"
        )
    smallest, largest = (int(bound) for bound in ids_TK.aminmax()) if ids_TK.numel() else (0, 0)
    if smallest < -1 or largest > torch.iinfo(torch.int32).max:
        found = smallest if smallest < -1 else largest
        raise MoeKernelsError(f"{found} among the choices of {key} is no expert id; -1 stands for no expert")
    dtype = torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
    return ids_TK.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _among(keys: list[ReplayKey]) -> str:
    return str(keys[0]) if len(keys) == 1 else f"{keys[0]} to microbatch {keys[-1].microbatch}"


def _size(tokens: int, top_k: int) -> str:
    return f"{tokens} tokens with {top_k} choices"


def _short(values: list[int] | list[str]) -> str:
    """The values in words, of many the first and the last."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:4], "..", shown[-1]])
