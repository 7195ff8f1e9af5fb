"""Made-up inputs for a model of transformers, from its config and the arguments of its forward.

No single place has the names and sizes of a model type's inputs. So candidates are tried, the fullest first, and the
first one that a forward on meta tensors takes is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = dict[str, Tensor]
Maker = Callable[["Sizes"], Tensor]
PARTS = (
    *("vision_config", "image_config", "vit_config", "backbone_config", "text_config", "audio_config"),
    *("speech_config", "audio_encoder_config", "encoder_config", "encoder", "decoder", "decoder_config"),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of made-up inputs: requested ones, and those that a config fixes."""

    config: Any
    batch: int
    seq: int
    side: int = 224  # of images, if the config has no size

    def of(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these fields in the config, or else in its parts."""
        for config in (self.config, *_parts(self.config)):
            for name in names:
                value = getattr(config, name, None)
                if value is not None and not hasattr(value, "to_dict"):
                    return value
        return default

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of an image."""
        height, width = _pair(self.of("image_size", "img_size", "input_size", "max_img_size", default=self.side))
        smallest = round(self.patch / min(self.of("scaled_images_ratios", default=[math.inf])))
        return max(height, smallest), max(width, smallest)

    @property
    def patch(self) -> int:
        """Height of a patch of an image."""
        return _pair(self.of("patch_size", default=14))[0]

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return int(self.of("num_channels", "in_channels", "in_chans", default=3))


def _parts(config: Any) -> Iterator[Any]:
    for name in dict.fromkeys((*PARTS, *getattr(config, "sub_configs", ()))):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            yield part
            yield from _parts(part)


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that a config gives as one number, as a list or by name."""
    if isinstance(size, Mapping):
        size = (size.get("height", 224), size.get("width", 224))
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    return (int(pair[-2]), int(pair[-1])) if len(pair) > 1 else (int(pair[0]), int(pair[0]))


# Makers of tensors. MAKERS has one or several for each name of an argument.


def _tokens(sizes: Sizes, length: int | None = None) -> Tensor:
    vocab = int(
        sizes.config.get_text_config().vocab_size if _has_vocab(sizes.config) else sizes.of("vocab_size", default=64)
    )
    special = [getattr(sizes.config, name, None) for name in IMAGE_TOKENS]
    tokens = torch.randint(vocab, (sizes.batch, length or sizes.seq))
    for token in filter(None, special):  # which stand for an image
        tokens[tokens == token] = 1
    return tokens


def _tokens_with_image(sizes: Sizes) -> Tensor:
    return _tokens(sizes, _places_of_image(sizes).shape[1])


def _places_of_image(sizes: Sizes) -> Tensor:
    """A mask of the tokens of an image, which come before the text."""
    count = int(sizes.of("latent_query_num", default=0))
    return (torch.arange(count + sizes.seq) < count).long().repeat(sizes.batch, 1)


def _has_vocab(config: Any) -> bool:
    return isinstance(getattr(config.get_text_config(), "vocab_size", None), int)


IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_token_id", "video_token_id", "audio_token_id")


def _classes(sizes: Sizes) -> Tensor:
    return torch.randint(max(1, int(getattr(sizes.config, "num_labels", 2))), (sizes.batch,))


def _class_of_each_pixel(sizes: Sizes) -> Tensor:
    return torch.randint(max(1, int(getattr(sizes.config, "num_labels", 2))), (sizes.batch, *sizes.image))


def _images(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, sizes.channels, *sizes.image)


def _patches(sizes: Sizes) -> Tensor:
    """The patches of the images of ``_grid``, one a row, for models that take images of any size."""
    times = int(sizes.of("temporal_patch_size", default=1))
    return torch.randn(int(_grid(sizes).prod(1).sum()), sizes.channels * times * sizes.patch**2)


def _few_images(sizes: Sizes) -> Tensor:
    """Two images for each row: the examples of a text with images, or a pair to compare."""
    return torch.randn(sizes.batch, 2, sizes.channels, *sizes.image)


def _patches_of_each(sizes: Sizes) -> Tensor:
    """The patches of each image one after another, for models that take images of any shape."""
    return torch.randn(sizes.batch, _side(sizes) ** 2, sizes.channels * sizes.patch**2)


def _side(sizes: Sizes) -> int:
    """The number of patches along each side of an image that comes as patches."""
    pooled = sizes.of("pooling_kernel_size")
    return 2 * int(pooled) if pooled else math.isqrt(int(sizes.of("num_patches", default=16)))


def _half_images(sizes: Sizes) -> Tensor:
    """Images of half the height, which a model puts below others."""
    height, width = sizes.image
    return torch.randn(sizes.batch, sizes.channels, height // 2, width)


def _flattened_patches(sizes: Sizes) -> Tensor:
    """Patches with their row and column in front, all in the first row and column."""
    width = int(sizes.of("patch_embed_hidden_size", default=sizes.channels * sizes.patch**2))
    return F.pad(torch.randn(sizes.batch, sizes.seq, width), (2, 0))


def _shape_of_each(sizes: Sizes) -> Tensor:
    return torch.full((sizes.batch, 2), _side(sizes))


def _positions_of_patches(sizes: Sizes) -> Tensor:
    """Column and row of each patch."""
    side = torch.arange(_side(sizes))
    return torch.cartesian_prod(side, side).flip(1).repeat(sizes.batch, 1, 1)


def _ones(make: Maker, dim: int) -> Maker:
    """A maker of a mask that hides nothing, as long as a dim of another input."""
    return lambda sizes: torch.ones(sizes.batch, make(sizes).shape[dim], dtype=torch.int64)


def _grid(sizes: Sizes) -> Tensor:
    """One frame of two by two merged patches for each row."""
    side = 2 * _merge(sizes)
    return torch.tensor([[1, side, side]] * sizes.batch)


def _merge(sizes: Sizes) -> int:
    """The number of patches, along each side, that become one token."""
    return int(sizes.of("spatial_merge_size", "merge_size", default=2))


def _video(sizes: Sizes) -> Tensor:
    frames = int(sizes.of("num_frames", "frames_per_clip", default=8))
    return torch.randn(sizes.batch, frames, sizes.channels, *sizes.image)


def _wave(sizes: Sizes) -> Tensor:
    """A wave long enough for ``seq`` frames from convolutions with a total stride of 320."""
    return torch.randn(sizes.batch, 320 * sizes.seq + 80)


def _one_channel_wave(sizes: Sizes) -> Tensor:
    return _wave(sizes)[:, None]


def _bands(sizes: Sizes) -> int:
    return int(
        sizes.of(
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "n_mels",
            "mel_bins",
            "input_feat_size",
            default=80,
        )
    )


def _whole_spectrogram(sizes: Sizes) -> Tensor:
    """Bands by frames, enough frames for all positions of the model."""
    return torch.randn(sizes.batch, _bands(sizes), 2 * int(sizes.of("max_source_positions", default=sizes.seq)))


def _frames(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, int(sizes.of("max_length", default=8 * sizes.seq)), _bands(sizes))


def _image_of_frames(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, 1, int(sizes.of("spec_size", default=256)) * 4, _bands(sizes))


def _history(sizes: Sizes) -> Tensor:
    """A value for each step of the context, and for the steps before it that the model's lags reach."""
    lags = sizes.of("lags_sequence", default=[0])
    length = sizes.of("context_length", "prediction_length", default=sizes.seq)
    return torch.randn(sizes.batch, int(length) + max(lags))


def _channels_of_history(sizes: Sizes) -> Tensor:
    channels = int(sizes.of("num_input_channels", "input_size", default=1))
    return torch.randn(sizes.batch, int(sizes.of("context_length", default=sizes.seq)), channels)


def _time_features(sizes: Sizes) -> Tensor:
    history = _history(sizes)
    return torch.randn(*history.shape, int(sizes.of("num_time_features", default=0)))


def _future(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, int(sizes.of("prediction_length", default=sizes.seq)))


def _future_features(sizes: Sizes) -> Tensor:
    return torch.randn(*_future(sizes).shape, int(sizes.of("num_time_features", default=0)))


def _steps(*names: str) -> Maker:
    """A maker of a vector for each step of an episode; the config has its size under one of the names."""
    return lambda sizes: torch.randn(sizes.batch, sizes.seq, int(sizes.of(*names, default=1)))


def _hidden_states(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, sizes.seq, int(sizes.of("hidden_size", "d_model", default=64)))


def _boxes(sizes: Sizes) -> Tensor:
    return torch.zeros(sizes.batch, sizes.seq, 4, dtype=torch.int64)


MAKERS: dict[str, tuple[Maker, ...]] = {
    "input_ids": (_tokens,),
    "decoder_input_ids": (_tokens,),
    "qformer_input_ids": (_tokens,),
    "bbox": (_boxes,),
    "pixel_values": (_images, _video, _patches, _few_images),
    "pixel_position_ids": (_positions_of_patches,),
    "pixel_attention_mask": (_ones(_patches_of_each, 1),),
    "spatial_shapes": (_shape_of_each,),
    "prompt_pixel_values": (_half_images,),
    "prompt_masks": (_half_images,),
    "grid_thw": (_grid,),
    "image_grid_thw": (_grid,),
    "merge_sizes": (lambda sizes: torch.full((sizes.batch,), _merge(sizes)),),
    "pixel_values_videos": (_video,),
    "input_features": (_whole_spectrogram, _frames, _image_of_frames),
    "input_features_mask": (_ones(_whole_spectrogram, 2), _ones(_frames, 1)),
    "audio_mel": (_frames,),
    "audio_mel_mask": (lambda sizes: torch.zeros(_frames(sizes).shape[:2], dtype=torch.bool),),
    "flattened_patches": (_flattened_patches,),
    "inputs": (_tokens, _wave, _images),
    "visual_feats": (_steps("visual_feat_dim"),),
    "visual_pos": (_steps("visual_pos_dim"),),
    "states": (_steps("state_dim"),),
    "actions": (_steps("act_dim"),),
    "rewards": (_steps(),),
    "returns_to_go": (_steps(),),
    "timesteps": (lambda sizes: torch.arange(sizes.seq).repeat(sizes.batch, 1),),
    "query_embeds": (_hidden_states,),
    "latents": (_hidden_states,),
    "future_values": (_future,),
    "future_time_features": (_future_features,),
    "image_embeds_position_mask": (_places_of_image,),
    "image_attention_mask": (lambda sizes: torch.ones(sizes.batch, sizes.seq, 2, dtype=torch.int64),),
    "attention_mask": (_ones(_tokens, 1),),
    "input_values": (_wave, _frames, _one_channel_wave),
    "past_values": (_history, _channels_of_history),
    "past_time_features": (_time_features,),
    "past_observed_mask": (lambda sizes: torch.ones_like(_history(sizes)),),
    "hidden_states": (_patches, _hidden_states),
    "inputs_embeds": (_hidden_states,),
}
PARTNERS: dict[str, dict[str, Maker]] = {  # inputs that must fit another one
    "grid_thw": {"pixel_values": _patches},
    "spatial_shapes": {"pixel_values": _patches_of_each},
    "pixel_position_ids": {"pixel_values": _patches_of_each},
    "prompt_pixel_values": {"pixel_values": _half_images},
    "image_attention_mask": {"pixel_values": _few_images},
    "image_embeds_position_mask": {
        "pixel_values": _images,
        "input_ids": _tokens_with_image,
        "labels": _tokens_with_image,
        "attention_mask": _ones(_tokens_with_image, 1),
    },
}
LABELS: dict[str, Maker] = {  # by a part of the name of the model's class
    "TokenClassification": _tokens,
    "Classification": _classes,
    "SemanticSegmentation": _class_of_each_pixel,
    "LM": _tokens,
    "Generation": _tokens,
    "CTC": _tokens,
    "Seq2Seq": _tokens,
}
OPTIONAL = (
    "labels",
    "decoder_input_ids",
    "pixel_values",
    "input_features",
    "input_values",
    "bbox",
)  # the last one is left out first


EXTRA = (  # arguments that are optional by the signature, but needed by some forwards
    *("input_features_mask", "pixel_attention_mask", "spatial_shapes", "visual_feats", "visual_pos", "actions"),
    *("rewards", "returns_to_go", "timesteps", "future_values", "future_time_features", "image_attention_mask"),
    "image_embeds_position_mask",
    *("prompt_pixel_values", "prompt_masks", "pixel_position_ids", "query_embeds", "input_ids", "attention_mask"),
)
HAS_VALUES = (  # inputs whose numbers a model reads, to find images or padding
    "grid_thw",
    "image_grid_thw",
    "merge_sizes",
    "spatial_shapes",
    "attention_mask",
)


def text_inputs(sizes: Sizes) -> Inputs:
    """The inputs of a model that is trained on text."""
    names = ("input_ids", "decoder_input_ids", "labels") if sizes.config.is_encoder_decoder else ("input_ids", "labels")
    return {name: _tokens(sizes) for name in names}


def made_up(model: nn.Module, sizes: Sizes) -> Inputs:
    """Inputs that the model's forward takes. Raises the error of the first candidate if it takes none.

    ``model``: on meta, in bfloat16.
    """
    first: Exception | None = None
    for candidate in candidates(model, sizes):
        try:
            with torch.no_grad():
                model(**_on_meta(candidate))
            return candidate
        except Exception as error:  # of code that is not ours, on inputs that may not fit
            if _is_of_meta(error):
                return candidate
            first = first or error
    raise first or ValueError("it is not known what its forward takes")


def _on_meta(inputs: Inputs) -> Inputs:
    """The inputs on meta, in bfloat16: a few of torch's ops run on meta in no other dtype."""
    return {
        name: value.to("meta", torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }


def _is_of_meta(error: Exception) -> bool:
    """Whether a forward failed only because it ran on meta: it reads values, or has an op without bfloat16."""
    texts = (
        *("meta tensor", "register_meta function for torch.nonzero", "not on the expected device meta"),
        "Unsupported dtype BFloat16",
    )
    return isinstance(error, (RuntimeError, NotImplementedError)) and any(text in str(error) for text in texts)


def candidates(model: nn.Module, sizes: Sizes) -> Iterator[Inputs]:
    """Inputs to try: with an image in the text, then with all usual inputs of a forward, then with fewer.

    The last candidates have all inputs that the forward can read, and text alone.
    """
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [main] if isinstance(main, str) else list(main)
    needed += [
        name for name, each in parameters.items() if each.default is each.empty and each.kind.name != "VAR_KEYWORD"
    ]
    names = list(dict.fromkeys(name for name in needed if name in parameters and name in MAKERS))
    if {"input_ids", "pixel_values"} <= parameters.keys():
        yield from _with_image_tokens(model, sizes)
    labels = next((make for part, make in LABELS.items() if part in type(model).__name__), None)
    makers_of = MAKERS | ({"labels": (labels,)} if labels is not None else {})
    optional = [name for name in OPTIONAL if name in parameters and name in makers_of and name not in names]
    for count in range(len(optional), -1, -1):
        for extra in combinations(optional, count):
            yield from _made([*names, *extra], makers_of, sizes)
    rest = [name for name in EXTRA if name in parameters and name not in names]
    if rest:
        for further in (optional, [name for name in optional if name != "labels"]):
            yield from _made(list(dict.fromkeys([*names, *further, *rest])), makers_of, sizes)
    if "input_ids" in parameters and "labels" in parameters:
        yield from _made(["input_ids", "labels"], {**makers_of, "labels": (_tokens,)}, sizes)


def _made(names: list[str], makers_of: dict[str, tuple[Maker, ...]], sizes: Sizes) -> Iterator[Inputs]:
    """Inputs of these names, by every combination of their makers."""
    fixed = {other: (make,) for name in names for other, make in PARTNERS.get(name, {}).items()}
    for makers in product(*((makers_of | fixed)[name] for name in names)):
        yield {name: make(sizes) for name, make in zip(names, makers, strict=True)}


def _with_image_tokens(model: Any, sizes: Sizes) -> Iterator[Inputs]:
    """An image for each row of text, for a model that puts the image's features in place of tokens."""
    token = next((each for name in IMAGE_TOKENS[:3] if (each := getattr(sizes.config, name, None)) is not None), None)
    if token is None or not hasattr(model, "get_image_features"):
        return
    for images in ({"pixel_values": _images(sizes)}, {"pixel_values": _patches(sizes), "image_grid_thw": _grid(sizes)}):
        count = _num_image_tokens(model, images, sizes)
        if count:
            text = _tokens(sizes, count + sizes.seq)
            text[:, 1 : 1 + count] = token
            kinds = {"mm_token_type_ids": (text == token).long()}
            images |= kinds if "mm_token_type_ids" in inspect.signature(model.forward).parameters else {}
            yield {"input_ids": text, **images, "labels": text}
            yield {"input_ids": text, **images}


def _num_image_tokens(model: Any, images: Inputs, sizes: Sizes) -> int:
    """The number of tokens that the features of one image take; 0 if the model does not take such images."""
    if "image_grid_thw" in images:
        return int(images["image_grid_thw"][0].prod()) // _merge(sizes) ** 2
    try:
        with torch.no_grad():
            found = model.get_image_features(**_on_meta(images))
    except Exception:  # of code that is not ours, on inputs that may not fit
        return 0
    return sum(each.shape[:-1].numel() for each in _tensors(found)) // sizes.batch


def _tensors(found: Any) -> Iterable[Tensor]:
    """The feature tensors in a result of ``get_image_features``, whose form depends on transformers' version."""
    found = getattr(found, "pooler_output", found)
    return found if isinstance(found, (list, tuple)) else [found]
