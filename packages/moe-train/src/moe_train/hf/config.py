"""`config.json` of Hugging Face to our configuration and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from moe_train.errors import MoeTrainError
from moe_train.hf.families import FAMILIES, HFFamily, Values
from moe_train.models.config import DecoderConfig

# Options that have had two names.
_ALIASES = (("num_experts", "num_local_experts"), ("num_nextn_predict_layers", "num_mtp_layers"))
# What a file that does not say it means.
_DEFAULTS = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "qkv_bias": True,
    "norm_topk_prob": False,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Our configuration from the content of a `config.json`.

    Raises:
        MoeTrainError: another family, an option that is missing, or one with a value that our models do not have.
    """
    family = FAMILIES.get(hf.get("model_type", ""))
    if family is None:
        raise MoeTrainError(f"unknown model_type {hf.get('model_type')!r}; known here: {', '.join(sorted(FAMILIES))}")
    for name, value in family.required.items():
        if hf.get(name, value) != value:
            raise MoeTrainError(f"{family.model_type} with {name} = {hf[name]!r} is not supported, only {value!r} is")
    hf = {**_DEFAULTS, **hf}
    for names in _ALIASES:
        known = [hf[name] for name in names if name in hf]
        hf |= {name: known[0] for name in names if known and name not in hf}
    missing = [theirs for theirs in family.options.values() if theirs not in hf]
    if missing:
        raise MoeTrainError(f"the config.json of {family.model_type} lacks {', '.join(missing)}")
    direct = {ours: hf[theirs] for ours, theirs in family.options.items()}
    config: DecoderConfig = _with(
        DecoderConfig(), {**family.fixed, **direct, **family.read(hf), **_read_rope(hf, family)}
    )
    return config


def config_to_hf(config: DecoderConfig, family: HFFamily, vocab_size: int) -> Values:
    """The content of a `config.json` of the family.

    Raises:
        MoeTrainError: the configuration has an option that a file of the family cannot say.
    """
    hf: Values = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": vocab_size,
        **{name: value for name, value in family.required.items() if value is not None},
        **{theirs: _get(config, ours) for ours, theirs in family.options.items()},
        **family.write(config),
        **_write_rope(config),
    }
    again = config_from_hf(hf)
    kept = replace(again, mtp_weight=config.mtp_weight, balance=replace(config.balance, aux=again.balance.aux))
    different = [name for name, value in _flat(config) if _get(kept, name) != value and not _close(kept, config, name)]
    if different:
        raise MoeTrainError(f"a file of {family.model_type} cannot say {', '.join(different)}")
    return hf


def _read_rope(hf: Mapping[str, Any], family: HFFamily) -> Values:
    rope = {"rope_theta": hf.get("rope_theta"), **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    values: Values = {"rope_base": float(rope["rope_theta"] or 10_000.0)}
    if kind == "default":
        return values
    scales = [rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0]
    latent = family.fixed["attention"] == "latent"
    if kind != "yarn" or rope.get("attention_factor") is not None or (any(scales) and not (all(scales) and latent)):
        raise MoeTrainError(f"rotary positions of {family.model_type} with {rope} are not supported")
    if any(scales):
        values |= {"yarn.mscale": float(scales[0]), "yarn.mscale_all_dim": float(scales[1])}
    original = rope.get("original_max_position_embeddings")
    return values | {
        "yarn.factor": float(rope.get("factor") or hf["max_position_embeddings"] / original),
        "yarn.original_tokens": original,
        "yarn.beta_fast": float(rope.get("beta_fast") or 32),
        "yarn.beta_slow": float(rope.get("beta_slow") or 1),
        "yarn.truncate": rope.get("truncate", True),
    }


def _write_rope(config: DecoderConfig) -> Values:
    yarn = config.yarn
    if yarn.factor == 1:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base}}
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {}
    parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_base,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_tokens,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
        **scales,
    }
    return {"rope_parameters": parameters, "max_position_embeddings": int(yarn.original_tokens * yarn.factor)}


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with dotted options replaced."""
    changed: Values = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        changed[first] = _with(changed.get(first, getattr(config, first)), {rest: value}) if rest else value
    return replace(config, **changed)


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        found += _flat(value, f"{prefix}{field.name}.") if is_dataclass(value) else [(f"{prefix}{field.name}", value)]
    return found


def _close(one: Any, other: Any, name: str) -> bool:
    a, b = _get(one, name), _get(other, name)
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-12 * max(abs(a), abs(b))
