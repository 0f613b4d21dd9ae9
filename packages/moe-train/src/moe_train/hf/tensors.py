"""Tensors of a model between ours and those of a file, in memory."""

import difflib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_train.errors import MoeTrainError
from moe_train.hf.names import LAYOUTS, FamilyNames, Layout, TensorMap, copies, tensor_maps
from moe_train.models.config import DecoderConfig

# Names in one message.
_SHOWN_NAMES = 5
_TIED_HEAD = "lm_head.weight"


def our_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and expert biases by global name, as live storage."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def import_tensors(model: nn.Module, config: DecoderConfig, names: FamilyNames, tensors: Mapping[str, Tensor]) -> None:
    """Fill a whole model, on one rank, from the tensors of a file in either layout. Values are cast to our dtypes.

    Raises:
        MoeTrainError: a tensor is missing, not used, of another shape, or a copy that differs from its original;
            nothing was changed.
    """
    ours = our_tensors(model)
    maps = _best_maps(config, names, ours, tensors)
    used = {name for tensor in maps for name in tensor.theirs}
    repeated = copies(config)
    if config.tied_embeddings:
        repeated[_TIED_HEAD] = "embedding.weight"
    _check_names(used, set(repeated), tensors)
    values = {tensor.ours: tensor.to_ours(tensors, config) for tensor in maps}
    for name, value in values.items():
        if value.shape != ours[name].shape:
            raise MoeTrainError(f"{name} would have the shape {list(value.shape)}, here it is {list(ours[name].shape)}")
    for copy, original in repeated.items():
        if copy in tensors and not torch.equal(tensors[copy], values[original]):
            raise MoeTrainError(
                f"{copy} differs from {original}, of which it would be a copy; the model was not trained with "
                f"{'tied embeddings' if copy == _TIED_HEAD else 'shared embeddings'}"
            )
    for name, value in values.items():
        ours[name].copy_(value)


@torch.no_grad()
def export_tensors(
    model: nn.Module, config: DecoderConfig, names: FamilyNames, *, layout: Layout = "per_expert"
) -> dict[str, Tensor]:
    """The tensors of a file from a whole model on one rank, with what a file repeats; in our dtypes.

    They may share storage with the model, and with each other where the file repeats one.
    """
    ours = our_tensors(model)
    found: dict[str, Tensor] = {}
    for tensor in tensor_maps(names, config, ours, layout):
        found.update(tensor.to_theirs(ours[tensor.ours].detach(), config))
    for copy, original in copies(config).items():
        found[copy] = ours[original].detach()
    return found


def _best_maps(
    config: DecoderConfig, names: FamilyNames, ours: Iterable[str], tensors: Mapping[str, Tensor]
) -> list[TensorMap]:
    """Of each tensor that of a layout in which the file has it; where it has none, that of most of the file."""

    def share(maps: list[TensorMap]) -> float:
        theirs = [name for tensor in maps for name in tensor.theirs]
        return sum(name in tensors for name in theirs) / len(theirs)

    by_layout = sorted((tensor_maps(names, config, ours, layout) for layout in LAYOUTS), key=share, reverse=True)
    return [
        max(choices, key=lambda tensor: tensors.keys() >= set(tensor.theirs))
        for choices in zip(*by_layout, strict=True)
    ]


def _check_names(used: set[str], optional: set[str], tensors: Mapping[str, Tensor]) -> None:
    missing = sorted(used - tensors.keys())
    unused = sorted(tensors.keys() - used - optional)
    if not missing and not unused:
        return
    said = []
    if missing:
        guesses = {name: difflib.get_close_matches(name, unused, n=1) for name in missing[:_SHOWN_NAMES]}
        hints = [f"{name} (is it {close[0]}?)" if close else name for name, close in guesses.items()]
        said.append(f"the file lacks {_listed(hints, len(missing))}")
    if unused:
        said.append(f"the model has no place for {_listed(unused[:_SHOWN_NAMES], len(unused))}")
    raise MoeTrainError(f"the tensors are not those of this model: {'; '.join(said)}")


def _listed(names: list[str], count: int) -> str:
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
