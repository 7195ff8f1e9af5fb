"""``generate`` on a parallel module: every rank gets the tokens that one device would give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor.experimental import implicit_replication

from .conversion import DistributedConversion

# The longest cache so far, which ``generate`` notes on the model; programs do not depend on it.
LENGTH = ("_previous_max_cache_length",)
ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # remove tokens from a cache


def generating(generate: Callable[..., Any]) -> Callable[..., Any]:
    """The ``generate`` of a model's class for its parallel module.

    Logits come back whole, caches stay cut, and all ranks draw the numbers of the first rank. If nothing says which
    cache a transformers model uses, it gets a static one if it can, so that two programs serve all tokens.
    """

    @functools.wraps(generate)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.shardc.returning_whole(), _drawing_alike(self.shardc.conversion):
            return generate(self, *args, **{**_defaults(self, args, kwargs), **kwargs})

    return run


def preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a model's class that makes a static cache, for its parallel module.

    A sliding-window layer of the cache counts tokens in Python until the window is full, which would take a program for
    each token. Here it becomes a full layer; the mask limits attention to the window.
    """

    @functools.wraps(prepare)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        cache = prepare(self, *args, **kwargs)
        own = getattr(cache, "self_attention_cache", cache)
        for i, layer in enumerate(own.layers):
            if type(layer) is StaticSlidingWindowLayer:
                own.layers[i] = StaticLayer(getattr(self, *LENGTH))
        return cache

    return run


def _defaults(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of transformers' ``generate`` whose defaults a parallel module changes."""
    if not hasattr(module, "prepare_inputs_for_generation"):
        return {}
    given = [kwargs.get("generation_config"), *args[1:2], getattr(module, "generation_config", None)]
    config = next((each for each in given if each is not None), None)
    options: dict[str, Any] = {"disable_compile": True}  # shardc has compiled programs already
    asks_for_cache = "past_key_values" in kwargs or kwargs.get("use_cache", True) is False
    is_assisted = any(kwargs.get(name) or getattr(config, name, None) for name in ASSISTED)
    is_assisted |= bool(getattr(config, "is_assistant", False))
    device = module.shardc.conversion.comm.device.type
    can_be_static = getattr(module, "_can_compile_fullgraph", False) and not torch.is_autocast_enabled(device)
    if can_be_static and not is_assisted and not asks_for_cache and not getattr(config, "cache_implementation", None):
        options["cache_implementation"] = "static"
    return options


@contextmanager
def _drawing_alike(conversion: Any) -> Iterator[None]:
    """Context in which all ranks draw the first rank's numbers; afterwards other ranks have their own states again."""
    with ExitStack() as stack:
        if isinstance(conversion, DistributedConversion):
            stack.enter_context(implicit_replication())  # a cache that is a DTensor is indexed by plain tensors
            if conversion.agreement is not None:
                _share_states(conversion, stack)
        yield


def _share_states(conversion: DistributedConversion, stack: ExitStack) -> None:
    device = conversion.torch_comm.device
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    for generator in generators:
        own = generator.get_state()
        shared = own.to(device, copy=True)
        conversion.initial_values.broadcast([shared])
        generator.set_state(shared.cpu())
        if conversion.job.position != 0:
            stack.callback(generator.set_state, own)
