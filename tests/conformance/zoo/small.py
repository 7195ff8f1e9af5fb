"""Every model type of transformers at its smallest: two layers, narrow dims, few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from shardc.cli.huggingface.inputs import Inputs, Sizes, made_up
from shardc.cli.huggingface.model import model_classes, on_meta

VOCAB = 99
MOST_PARAMETERS = 60_000_000
LIMITS = {  # by how the name of a field ends
    ("vocab_size",): VOCAB,
    ("layers", "n_layer", "depth", "num_blocks", "kv_heads", "key_value_heads", "per_tok", "topk", "moe_k"): 2,
    (
        "heads_num",
        "attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "num_experts",
        "routed_experts",
        "local_experts",
    ): 4,
    ("head_dim", "d_kv", "patch_size"): 8,
    ("lora_rank",): 16,
    ("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "projection_dim", "model_dim", "image_size"): 32,
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_size", "mlp_dim", "feedforward"): 64,
}


def types() -> list[str]:
    """The model types of which transformers makes models by themselves."""
    return list(CONFIG_MAPPING_NAMES)


class CannotBuildError(Exception):
    """Transformers makes no small model of a type here; the message says why."""


def build(model_type: str) -> tuple[nn.Module, Inputs]:
    """The smallest model of a type whose forward runs, with inputs. Raises a CannotBuildError."""
    first = ""
    try:
        ways = list(_configs(model_type))
    except Exception as error:
        raise CannotBuildError(_text(error)) from error
    for make in ways:
        try:
            return _run(make())
        except Exception as error:  # of transformers, on settings that may not fit each other
            first = first or _text(error)
    raise CannotBuildError(first)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _run(config: Any) -> tuple[nn.Module, Inputs]:
    """The first kind of model of a config whose forward runs, with inputs."""
    first: Exception = CannotBuildError("it is a part of another type's model")
    for number, cls in enumerate(model_classes(config).values()):
        make: Any = cls._from_config  # type: ignore[attr-defined]
        try:
            probe = on_meta(make, config)
            if sum(parameter.numel() for parameter in probe.parameters()) > MOST_PARAMETERS:
                raise CannotBuildError("it is large at its smallest")
            torch.manual_seed(0)
            inputs, model = made_up(probe, Sizes(config, 4, 16)), make(config)
            with torch.no_grad():
                model.eval()(**inputs)
            return model, inputs
        except Exception as error:  # of transformers
            first = error if number == 0 else first
    raise first


def _configs(model_type: str) -> Iterator[Callable[[], Any]]:
    """Configs to try: with every size limited, then less and less."""
    cls = CONFIG_MAPPING[model_type]
    fields = cls().to_dict()
    yield lambda: cls.from_dict(_limited(fields, LIMITS))
    yield lambda: cls.from_dict(_limited(fields, LIMITS) | {"layer_types": None})
    only_depth = {("layers", "n_layer", "depth"): 2}
    yield lambda: cls.from_dict(_limited(fields, only_depth))
    yield lambda: cls.from_dict(_limited(fields, only_depth) | {"layer_types": None})
    yield cls


def _limited(fields: dict[str, Any], limits: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """The fields of a config with sizes limited, its parts' too, and lists of layers as long as their number."""
    result: dict[str, Any] = {}
    depths = {value for name, value in fields.items() if _is_size(value) and _limit(name, limits) == 2 and value > 2}
    for name, value in fields.items():
        if name in ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices"):
            continue  # they follow from the number of layers
        result[name] = _limited_value(name, value, depths, limits)
    heads = fields.get("num_attention_heads")
    if heads is not None and heads == fields.get("num_key_value_heads"):
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result


def _limited_value(name: str, value: Any, depths: set[int], limits: dict[tuple[str, ...], int]) -> Any:
    if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
        per_layer = name == "per_layer_config"
        return {i: each for i, each in value.items() if int(i) < 2} if per_layer else _limited(value, limits)
    if _is_size(value):
        if name.endswith(("token_id", "token_index")) and limits is LIMITS:
            return value if value < VOCAB else VOCAB - 1 - sum(map(ord, name)) % 60  # another one for another name
        return min(value, _limit(name, limits) or value)
    if isinstance(value, list) and len(value) in depths:
        is_kind = all(isinstance(each, str) for each in value)
        return (list(dict.fromkeys(value)) * 2)[:2] if is_kind else value[:2]
    return value


def _limit(name: str, limits: dict[tuple[str, ...], int]) -> int | None:
    return next((limit for ends, limit in limits.items() if name.endswith(ends)), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
