"""Every model type of transformers at its smallest: two layers, narrow dims, few tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from shardc.cli.targets.inputs import Inputs, Sizes, made_up
from shardc.cli.targets.model import complete, model_classes, on_meta

VOCAB = 99
MOST_PARAMETERS = 60_000_000
DEPTHS = ("layers", "n_layer", "depth", "num_blocks")
HEADS = ("heads_num", "attention_heads", "n_head", "num_heads", "n_heads", "kv_heads", "key_value_heads")
PER_HEAD = ("head_dim", "d_kv", "d_head", "rotary_dim", "rope_section")
WIDTHS = (
    *("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "projection_dim", "model_dim", "hidden_dim"),
    *("dim_per_stage", "channel_list", "output_channels"),
)
INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_size", "mlp_dim", "feedforward", "lora_rank")
IMAGES = ("image_size", "feature_sizes")
EXPERTS = ("num_experts", "routed_experts", "local_experts", "expert_num")
Limits = dict[tuple[str, ...], int]
ONLY_DEPTH: Limits = {("vocab_size",): VOCAB, DEPTHS: 2, ("source_positions",): 32}  # by the endings of field names
LIMITS: Limits = ONLY_DEPTH | {
    ("kv_heads", "key_value_heads", "per_tok", "topk", "moe_k", "n_group", "topk_group"): 2,
    HEADS + EXPERTS: 4,
    ("rotary_dim",): 4,
    ("head_dim", "d_kv", "patch_size"): 8,
    ("lora_rank", "num_pos_feats"): 16,
    (*WIDTHS, "image_size"): 32,
    INNER: 64,
    ("groups", "image_embedding_size"): 4,
    ("context_length",): 64,
}
WIDE: Limits = ONLY_DEPTH | {HEADS: 2, EXPERTS: 4, WIDTHS + INNER: 128}  # for models with a fixed head size of 64


def types() -> list[str]:
    """The model types of transformers that have a config of their own."""
    return list(CONFIG_MAPPING_NAMES)


class CannotBuildError(Exception):
    """Transformers cannot build a small model of a type here; the message says why, ``reason`` in a few words.

    The message is that of the last config that was tried, in most cases the default config of the type.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def build(model_type: str) -> tuple[nn.Module, Inputs]:
    """A small model of a type, from the first config whose forward runs, with inputs. May raise a CannotBuildError."""
    try:
        ways = list(_configs(model_type))
    except Exception as error:
        raise _cannot(error) from error
    for number, make in enumerate(ways, 1):
        try:
            return _run(make())
        except Exception as error:  # of transformers, for settings that do not fit each other
            is_final = isinstance(error, ImportError) or _is_part(error)
            if is_final or number == len(ways):
                raise _cannot(error) from error
    raise AssertionError(model_type)


def decoder(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs] | None:
    """The causal language model of a model's config and its inputs without labels; None if the type has none."""
    config: Any = copy.deepcopy(model.config)
    cls: Any = model_classes(config).get("CAUSAL_LM")
    if cls is None:
        return None
    if isinstance(model, cls):
        return model, {name: value for name, value in inputs.items() if name != "labels"}
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    try:
        made = cls._from_config(config).eval()
        made(input_ids=inputs["input_ids"])
    except Exception as error:  # of transformers
        raise _cannot(error) from error
    return made, {"input_ids": inputs["input_ids"]}


def _cannot(error: Exception) -> CannotBuildError:
    if isinstance(error, CannotBuildError):
        return error
    reason = "package missing" if isinstance(error, ImportError) else "default does not run"
    return CannotBuildError(reason, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def _is_part(error: Exception) -> bool:
    return isinstance(error, CannotBuildError) and error.reason == "part"


def _run(config: Any) -> tuple[nn.Module, Inputs]:
    """A model of the first class of a config whose forward runs, with inputs."""
    complete(config)
    first: Exception = CannotBuildError("part", "it is a part of another type's model")
    for number, cls in enumerate(model_classes(config).values()):
        make: Any = cls._from_config  # type: ignore[attr-defined]
        try:
            probe = on_meta(make, config)
            torch.manual_seed(0)
            inputs = made_up(probe, Sizes(config, 4, 16, 64))
            if sum(parameter.numel() for parameter in probe.parameters()) > MOST_PARAMETERS:
                raise CannotBuildError("only large", "it runs with its default config alone, which is large")
            model = make(config)
            with torch.no_grad():
                model.train()(**inputs)
                model.eval()(**inputs)
            return model, inputs
        except Exception as error:  # of transformers
            first = error if number == 0 else first
    raise first


def _configs(model_type: str) -> Iterator[Callable[[], Any]]:
    """Configs to try: all sizes limited, heads and widths scaled, wide heads, only depth limited, then the default."""
    cls = CONFIG_MAPPING[model_type]
    fields = cls().to_dict()
    few = _limited(fields, ONLY_DEPTH)
    scaled = _scaled(few)
    of_images = [_divided(scaled, {IMAGES: 8})] if _sizes(scaled, IMAGES) else []
    for small in (_limited(fields, LIMITS), *of_images, scaled, _limited(fields, WIDE), few):
        yield lambda small=small: cls.from_dict(small)
        yield lambda small=small: cls.from_dict(small | {"layer_types": None})
    yield cls


def _limited(fields: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of a config and its parts with limited sizes; lists by layer are cut to the limited depth."""
    result: dict[str, Any] = {}
    depths = {value for name, value in fields.items() if _is_size(value) and name.endswith(DEPTHS) and value > 2}
    for name, value in fields.items():
        if name in ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices"):
            continue  # these follow from the number of layers
        result[name] = _limited_value(name, value, depths, limits)
    heads = fields.get("num_attention_heads")
    if heads is not None and heads == fields.get("num_key_value_heads"):
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result


def _limited_value(name: str, value: Any, depths: set[int], limits: Limits) -> Any:
    limit = next((limit for ends, limit in limits.items() if name.endswith(ends)), None)
    if _is_config(name, value):
        per_layer = name == "per_layer_config"
        return {i: each for i, each in value.items() if int(i) < 2} if per_layer else _limited(value, limits)
    if _is_size(value):
        if name.endswith(("token_id", "token_index")):
            return value if value < VOCAB else VOCAB - 1 - sum(map(ord, name)) % 60  # different names get different ids
        return min(value, limit or value)
    if isinstance(value, list) and len(value) in depths:
        is_kind = all(isinstance(each, str) for each in value)
        return (list(dict.fromkeys(value)) * 2)[:2] if is_kind else value[:2]
    if isinstance(value, list) and limit is not None and all(map(_is_size, value)):
        return [min(each, limit) for each in value]
    return value


def _scaled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config with fewer and narrower heads, and all other widths divided by the same factor."""
    heads = _divisor([4, 2], _sizes(fields, HEADS))
    per_head = _divisor([8, 4, 2], _sizes(fields, PER_HEAD))
    return _divided(fields, {HEADS: heads, PER_HEAD: per_head, WIDTHS + INNER: heads * per_head})


def _divisor(choices: list[int], sizes: list[int]) -> int:
    return next((each for each in choices if all(size % each == 0 for size in sizes if size > 1)), 1)


def _sizes(fields: Any, ends: tuple[str, ...]) -> list[int]:
    """All sizes of a config and its parts whose names have these endings."""
    found: list[int] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += _sizes(value, ends)
        elif str(name).endswith(ends):
            found += [each for each in (value if isinstance(value, list) else [value]) if _is_size(each)]
    return found


def _divided(fields: dict[str, Any], divisors: Limits) -> dict[str, Any]:
    def divide(name: str, value: Any) -> Any:
        divisor = next((each for ends, each in divisors.items() if str(name).endswith(ends)), 1)
        if isinstance(value, dict):
            return _divided(value, divisors)
        if isinstance(value, list):
            return [divide(name, each) for each in value]
        return max(1, value // divisor) if _is_size(value) and value > 0 else value

    return {name: divide(name, value) for name, value in fields.items()}


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder"))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
