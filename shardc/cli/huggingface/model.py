"""A model of transformers by its type."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardc.cli.huggingface.inputs import HAS_VALUES, Inputs, Sizes, made_up, text_inputs
from shardc.language.errors import UsageError

# Kinds of models by the names of transformers' mappings: those that models are trained as come before others.
KINDS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    *("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION"),
    *("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION"),
    *("TIME_SERIES_PREDICTION", "VISUAL_QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION", "MASK_GENERATION"),
    *("TEXT_TO_WAVEFORM", "BACKBONE", "PRETRAINING"),
)


TEXT = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")


def model_class(config: Any) -> tuple[str, type[nn.Module] | None]:
    """The first kind that transformers maps a config's type to, and its class; ``BASE`` is the bare model.

    None for a type that is a part of another model alone.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = {kind: getattr(auto, f"MODEL_FOR_{kind}_MAPPING", {}) for kind in KINDS} | {"BASE": auto.MODEL_MAPPING}
    for kind, mapping in mappings.items():
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return kind, found[0] if isinstance(found, (list, tuple)) else found
    return "", None


def model_and_inputs(config: Any, batch: int | None, seq: int | None, device: str) -> tuple[nn.Module, Inputs]:
    """A model with random weights and inputs for it; ``batch`` is 8 and ``seq`` at most 64 unless they are given."""
    kind, cls = model_class(config)
    if cls is None:
        problem = "it is a part of another type's model, and transformers makes none of it alone"
        remedy = "name the type of the whole model, or write a function: path.py:function"
        raise UsageError(f"TARGET hf:{config.model_type}", type(config).__name__, problem, remedy)
    longest = _longest(config, seq)
    sizes = Sizes(config, batch or 8, seq or min(64, longest))
    make: Any = cls._from_config  # type: ignore[attr-defined]
    with torch.device(device):
        model: nn.Module = make(config)
    if kind in TEXT:
        inputs = text_inputs(sizes)
    else:
        with torch.device("meta"):
            probe = make(config).to(torch.bfloat16)
        inputs = made_up(probe, sizes)
    return model, {name: value if name in HAS_VALUES else value.to(device) for name, value in inputs.items()}


def _longest(config: Any, seq: int | None) -> int:
    """The longest sequence that a model has positions for. Raises a UsageError if ``seq`` is longer."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 64
    if (seq or 0) > longest > 1 and hasattr(text, "max_position_embeddings"):
        what, problem = f"max_position_embeddings={longest}", "the model has no position for what is longer"
        raise UsageError(f"--seq {seq}", what, problem, f"say --seq {longest} or less")
    return int(longest)
