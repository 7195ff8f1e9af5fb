"""The models of the zoo without attention: convolutional and recurrent ones."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from .models import ROWS, Made, Sizes, images, model, text


@model
def resnet(at: Sizes) -> Made:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10, layer_type="basic")
    weights = {"resnet.encoder.*.layer.0.convolution.weight": ROWS}
    return hf.ResNetForImageClassification(config), images(at, 32), weights


@model
def convnext(at: Sizes) -> Made:
    config = hf.ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], patch_size=2, num_labels=10)
    return hf.ConvNextForImageClassification(config), images(at), {"*.pwconv1.weight": ROWS}


@model
def mobilenet(at: Sizes) -> Made:
    config = hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=10, classifier_dropout_prob=0.0)
    return hf.MobileNetV2ForImageClassification(config), images(at, 32), {"*.expand_1x1.convolution.weight": ROWS}


def double_convolution(wide_in: int, wide_out: int) -> nn.Sequential:
    """Two convolutions, each with a norm."""
    return nn.Sequential(
        nn.Conv2d(wide_in, wide_out, 3, padding=1),
        nn.GroupNorm(4, wide_out),
        nn.SiLU(),
        nn.Conv2d(wide_out, wide_out, 3, padding=1),
        nn.BatchNorm2d(wide_out),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox, 2015: two levels down, two levels up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = double_convolution(3, 8), double_convolution(8, 16)
        self.middle = double_convolution(16, 32)
        self.pool, self.up2, self.up1 = nn.MaxPool2d(2), nn.ConvTranspose2d(32, 16, 2, 2), nn.Upsample(scale_factor=2)
        self.join2, self.join1 = double_convolution(32, 16), double_convolution(24, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        large = self.down1(x)
        half = self.down2(self.pool(large))
        small = self.middle(self.pool(half))
        half = self.join2(torch.cat([self.up2(small), half], 1))
        large = self.join1(torch.cat([self.up1(half), large], 1))
        return F.cross_entropy(self.head(large), labels)


@model
def unet(at: Sizes) -> Made:
    inputs = {"x": torch.randn(at.batch, 3, 16, 16), "labels": torch.randint(5, (at.batch, 16, 16))}
    return UNet(), inputs, {"*.0.weight": ROWS}


class Recurrent(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self, at: Sizes, cell: type[nn.RNNBase], two_ways: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(at.vocab, at.width)
        self.cells = cell(at.width, at.width, 2, batch_first=True, bidirectional=two_ways)
        self.head = nn.Linear(at.width * (1 + two_ways), at.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.cells(self.embed(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@model
def lstm(at: Sizes) -> Made:
    return Recurrent(at, nn.LSTM), text(at), {"cells.weight_*": ROWS, "head.weight": ROWS}


@model
def lstm_two_ways(at: Sizes) -> Made:
    return Recurrent(at, nn.LSTM, two_ways=True), text(at), {"cells.weight_*": ROWS, "head.weight": ROWS}


@model
def gru(at: Sizes) -> Made:
    return Recurrent(at, nn.GRU), text(at), {"cells.weight_*": ROWS, "head.weight": ROWS}
