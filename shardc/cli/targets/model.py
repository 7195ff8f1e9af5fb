"""A model of transformers and its inputs, by the model's type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardc.cli.targets.inputs import HAS_VALUES, Inputs, Sizes, made_up, text_inputs
from shardc.language.errors import UsageError

# Kinds of models by the names of transformers' mappings. Kinds that models are trained as come first.
KINDS = (
    *(
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
        "IMAGE_TEXT_TO_TEXT",
        "CAUSAL_LM",
        "IMAGE_CLASSIFICATION",
    ),
    *("MULTIMODAL_LM", "CTC", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION"),
    *("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION"),
    *("TIME_SERIES_PREDICTION", "VISUAL_QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION", "MASK_GENERATION"),
    *("TEXT_TO_WAVEFORM", "BACKBONE", "PRETRAINING"),
)
SERIES = 8  # steps of a time series
TEXT = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")  # kinds whose inputs need no trial
LONGEST = 4096  # most tokens a row by default: models of 131,072 positions are trained on fewer


def model_classes(config: Any) -> dict[str, type[nn.Module]]:
    """The classes that transformers maps a config's type to, by kind; ``BASE`` is the bare model.

    Empty for a type that is only a part of another type's model.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = {kind: getattr(auto, f"MODEL_FOR_{kind}_MAPPING", {}) for kind in KINDS} | {"BASE": auto.MODEL_MAPPING}
    found = {kind: mapping[type(config)] for kind, mapping in mappings.items() if type(config) in mapping}
    return {kind: each[0] if isinstance(each, (list, tuple)) else each for kind, each in found.items()}


def model_and_inputs(config: Any, batch: int | None, seq: int | None, device: str) -> tuple[nn.Module, Inputs]:
    """A model with random weights and inputs for it; ``batch`` is 8 unless it is given.

    On meta, text is as long as the model has positions, at most ``LONGEST``; elsewhere, and beside images or sound, it
    has at most 64 tokens. The model is of the first kind that transformers can build and for which inputs can be made
    up; if there is none, the error of the first kind is raised.
    """
    classes = model_classes(config)
    complete(config)
    if not classes:
        problem = "it is a part of another type's model, and transformers makes none of it alone"
        remedy = "name the type of the whole model, or write a function: path.py:function"
        raise UsageError(f"TARGET hf:{config.model_type}", type(config).__name__, problem, remedy)
    longest = _longest(config, seq)
    sizes = Sizes(config, batch or 8, seq or min(64, longest))
    text_sizes = sizes if seq or device != "meta" else replace(sizes, seq=_rounded(min(LONGEST, longest)))
    first: Exception | None = None
    for kind, cls in classes.items():
        make: Any = cls._from_config  # type: ignore[attr-defined]
        try:
            inputs = text_inputs(text_sizes) if kind in TEXT else made_up(on_meta(make, config), sizes)
            with torch.device(device):
                model: nn.Module = make(config)
        except Exception as error:  # of transformers
            first = first or error
        else:
            return model, {name: each if name in HAS_VALUES else each.to(device) for name, each in inputs.items()}
    assert first is not None
    raise first


def complete(config: Any) -> None:
    """Set the numbers of steps that a config of time series leaves open, as default configs do."""
    for name in ("prediction_length", "context_length"):
        if getattr(config, name, 0) is None:
            setattr(config, name, SERIES)


def on_meta(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """A model on meta, without values, to try inputs on."""
    with torch.device("meta"):
        return make(config).to(torch.bfloat16)


def _rounded(length: int) -> int:
    """A length without the positions that some models reserve: 512 of RoBERTa's 514."""
    return length // 64 * 64 or length


def _longest(config: Any, seq: int | None) -> int:
    """The longest sequence that a model has positions for. Raises a UsageError if ``seq`` is longer."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 64
    if (seq or 0) > longest > 1 and hasattr(text, "max_position_embeddings"):
        what, problem = f"max_position_embeddings={longest}", "the model has no position for what is longer"
        raise UsageError(f"--seq {seq}", what, problem, f"say --seq {longest} or less")
    return int(longest)
