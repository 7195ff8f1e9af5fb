"""Forty-three ways in which models use masks, counts and checks, by field. Each is a loss of activations and a batch.

``h``: activations of shape (8, 6, 8). The batch has ``mask`` of shape (8, 6), with a true element in each row;
``ids``, integers below 8 of shape (8, 6); ``edges`` between 8 nodes, of shape (2, 12); and ``sizes``, integers that
sum to 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

How = Literal["rows", "guard", "plain"]
Loss = Callable[[Tensor, "Batch"], Tensor]


@dataclass(frozen=True)
class Batch:
    """The inputs besides the activations."""

    mask: Tensor
    ids: Tensor
    edges: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class Idiom:
    """``how`` it compiles: to one program for all ``rows``, to one for each outcome of a ``guard``, or as ``plain``."""

    name: str
    how: How
    loss: Loss

    def __str__(self) -> str:
        return self.name


IDIOMS: list[Idiom] = []


def idiom(how: How) -> Callable[[Loss], Loss]:
    """Add a function to the idioms."""

    def add(loss: Loss) -> Loss:
        IDIOMS.append(Idiom(loss.__name__, how, loss))
        return loss

    return add


# Masked language models.


@idiom("rows")
def mlm_loss_of_masked_tokens(h: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(h[b.mask], b.ids[b.mask])


@idiom("rows")
def mlm_active_loss_over_a_flat_batch(h: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(h.view(-1, 8)[b.mask.view(-1) == 1], b.ids.view(-1)[b.mask.view(-1) == 1])


@idiom("rows")
def mlm_head_on_masked_tokens_alone(h: Tensor, b: Batch) -> Tensor:
    weight = torch.linspace(-1, 1, 64, dtype=h.dtype).view(8, 8)
    return F.cross_entropy(F.layer_norm(F.gelu(F.linear(h[b.mask], weight)), (8,)), b.ids[b.mask], label_smoothing=0.1)


@idiom("rows")
def mlm_accuracy_beside_the_loss(h: Tensor, b: Batch) -> Tensor:
    accuracy = (h[b.mask].argmax(-1) == b.ids[b.mask]).double().mean()
    return F.cross_entropy(h.transpose(1, 2), b.ids.masked_fill(~b.mask, -100)) + 0 * accuracy


@idiom("plain")
def mlm_mask_token_written_over_embeddings(h: Tensor, b: Batch) -> Tensor:
    h = h.clone()
    h[b.mask] = h.mean((0, 1))
    return h.square().mean()


@idiom("plain")
def mlm_padding_set_to_a_number(h: Tensor, b: Batch) -> Tensor:
    h = h.clone()
    h[~b.mask] = -1.0
    return h.square().mean()


@idiom("rows")
def mlm_copy_of_unmasked_rows(h: Tensor, b: Batch) -> Tensor:
    result = torch.zeros_like(h)
    result[b.mask] = h[b.mask]
    return result.square().mean()


@idiom("guard")
def mlm_positions_of_masked_tokens(h: Tensor, b: Batch) -> Tensor:
    rows, places = b.mask.nonzero(as_tuple=True)
    return F.cross_entropy(h[rows, places], b.ids[rows, places])


@idiom("guard")
def mlm_loss_by_the_number_of_tokens_as_a_number(h: Tensor, b: Batch) -> Tensor:
    return (h.square().mean(-1) * b.mask).sum() / b.mask.sum().item()


# Detection.


@idiom("rows")
def detection_boxes_of_matched_anchors(h: Tensor, b: Batch) -> Tensor:
    wanted = h.detach().roll(1, 0)[..., :4]
    loss = F.smooth_l1_loss(h[..., :4][b.mask], wanted[b.mask], reduction="sum")
    return loss / b.mask.sum().clamp(min=1)


@idiom("rows")
def detection_objectness_of_sampled_anchors(h: Tensor, b: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(h[..., 0][b.mask], (b.ids > 3).to(h.dtype)[b.mask])


@idiom("rows")
def detection_width_and_height_of_kept_boxes(h: Tensor, b: Batch) -> Tensor:
    kept = h[b.mask]
    return ((kept[:, 2:4] - kept[:, 0:2]) ** 2).sum(-1).mean()


@idiom("guard")
def detection_boxes_above_a_score(h: Tensor, b: Batch) -> Tensor:
    boxes = h[..., :4][h[..., 4] > 0.1]
    return boxes.square().sum() / max(len(boxes), 1)


@idiom("guard")
def detection_none_matched_has_no_loss(h: Tensor, b: Batch) -> Tensor:
    matched = h[b.mask]
    return matched.square().mean() if matched.numel() else h.sum() * 0


@idiom("rows")
def detection_hard_negatives(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean(-1)
    rank = loss.detach().masked_fill(b.mask, 0.0).argsort(1, descending=True).argsort(1)
    hard = rank < b.mask.sum(1, keepdim=True)
    return loss[b.mask].sum() + loss[hard].sum()


@idiom("guard")
def detection_pairs_of_rows_and_labels(h: Tensor, b: Batch) -> Tensor:
    rows = torch.where(b.mask.any(1) & (b.ids[:, 0] > 3))[0]
    return h[rows, 0, b.ids[rows, 0]].sum()


@idiom("plain")
def detection_top_k(h: Tensor, b: Batch) -> Tensor:
    scores, places = h[..., 0].topk(3, dim=1)
    return (scores * h.gather(1, places[..., None].expand(-1, -1, 8)).sum(-1)).mean()


# Mixtures of experts.


@idiom("rows")
def moe_tokens_of_each_expert_by_mask(h: Tensor, b: Batch) -> Tensor:
    result = torch.zeros_like(h)
    for expert in range(4):
        routed = b.ids == expert
        result[routed] = F.silu(h[routed] * (expert + 1))
    return result.square().mean()


@idiom("guard")
def moe_tokens_of_each_expert_by_index(h: Tensor, b: Batch) -> Tensor:
    flat, result = h.flatten(0, 1), torch.zeros_like(h).flatten(0, 1)
    for expert in range(2):
        (rows,) = torch.where(b.ids.flatten() == expert)
        result.index_add_(0, rows, torch.tanh(flat[rows] * (expert + 1)))
    return result.square().mean()


@idiom("guard")
def moe_tokens_sorted_and_split_by_counts(h: Tensor, b: Batch) -> Tensor:
    order = b.ids.flatten().argsort(stable=True)
    counts = torch.bincount(b.ids.flatten(), minlength=8).tolist()
    parts = h.flatten(0, 1)[order].split(counts)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)]).square().mean()


@idiom("plain")
def moe_load_of_experts(h: Tensor, b: Batch) -> Tensor:
    return (F.one_hot(b.ids, 8).to(h.dtype).mean((0, 1)) * h.softmax(-1).mean((0, 1))).sum()


@idiom("guard")
def moe_capacity_of_the_fullest_expert(h: Tensor, b: Batch) -> Tensor:
    capacity = int(F.one_hot(b.ids, 8).sum((0, 1)).max())
    return h.flatten(0, 1)[:capacity].square().mean()


@idiom("plain")
def moe_weights_of_the_best_two(h: Tensor, b: Batch) -> Tensor:
    weights, experts = h.softmax(-1).topk(2)
    return torch.zeros_like(h).scatter_(-1, experts, weights).square().sum()


# Graphs.


@idiom("rows")
def graph_loss_of_training_nodes(h: Tensor, b: Batch) -> Tensor:
    return F.nll_loss(h[:, 0].log_softmax(-1)[b.mask[:, 1]], b.ids[:, 0][b.mask[:, 1]])


@idiom("plain")
def graph_messages_along_edges(h: Tensor, b: Batch) -> Tensor:
    source, target = b.edges
    return torch.zeros_like(h).index_add_(0, target, h[source]).square().mean()


@idiom("guard")
def graph_number_of_nodes(h: Tensor, b: Batch) -> Tensor:
    count = int(b.edges.max()) + 1
    return torch.zeros(count, 8, dtype=h.dtype).index_add(0, b.edges[1], h[b.edges[0], 0]).square().mean()


@idiom("guard")
def graph_without_self_loops(h: Tensor, b: Batch) -> Tensor:
    source, target = b.edges[:, b.edges[0] != b.edges[1]]
    return (h[source] * h[target]).mean()


@idiom("guard")
def graph_nodes_in_order_of_their_names(h: Tensor, b: Batch) -> Tensor:
    names, places = torch.unique(b.ids, return_inverse=True)
    return torch.zeros(len(names), 8, dtype=h.dtype).index_add(0, places.flatten(), h.flatten(0, 1)).square().mean()


@idiom("plain")
def graph_softmax_over_edges(h: Tensor, b: Batch) -> Tensor:
    source, target = b.edges
    scores = (h[source, 0] * h[target, 0]).sum(-1)
    highest = torch.full((8,), -1e9, dtype=h.dtype).scatter_reduce(0, target, scores, "amax")
    weights = (scores - highest[target]).exp()
    return (weights / torch.zeros(8, dtype=h.dtype).index_add(0, target, weights)[target]).square().sum()


@idiom("guard")
def graph_pooling_of_a_batch_by_sizes(h: Tensor, b: Batch) -> Tensor:
    return torch.stack([part.mean((0, 1)) for part in h.split(b.sizes.tolist())]).square().sum()


@idiom("guard")
def graph_rows_repeated_by_sizes(h: Tensor, b: Batch) -> Tensor:
    return (h[: len(b.sizes), 0].repeat_interleave(b.sizes, 0) * h[:, 1]).mean()


# Reinforcement learning.


@idiom("rows")
def rl_mean_of_valid_steps(h: Tensor, b: Batch) -> Tensor:
    ratio = (h[..., 0] - h[..., 0].detach()).exp()
    return torch.minimum(ratio * h[..., 1], ratio.clamp(0.8, 1.2) * h[..., 1])[b.mask].mean()


@idiom("rows")
def rl_targets_of_steps_that_are_not_last(h: Tensor, b: Batch) -> Tensor:
    target = h[..., 0].detach().clone()
    target[~b.mask] += 0.9 * h.detach().amax(-1)[~b.mask]
    return F.mse_loss(h[..., 1], target)


@idiom("guard")
def rl_advantages_of_valid_steps_normalized(h: Tensor, b: Batch) -> Tensor:
    valid = h[..., 0][b.mask]
    return (h[..., 1] * (h[..., 0] - valid.mean()) / (valid.std() + 1e-8)).mean()


@idiom("plain")
def rl_returns_from_the_last_step_back(h: Tensor, b: Batch) -> Tensor:
    total, returns = torch.zeros(8, dtype=h.dtype), []
    for step in reversed(range(6)):
        total = h[:, step, 0] + 0.9 * total * (~b.mask[:, step]).to(h.dtype)
        returns.append(total)
    return torch.stack(returns, 1).square().mean()


@idiom("plain")
def rl_values_of_the_actions_taken(h: Tensor, b: Batch) -> Tensor:
    return h.gather(-1, b.ids[..., None]).squeeze(-1).square().mean()


@idiom("guard")
def rl_episodes_cut_at_their_lengths(h: Tensor, b: Batch) -> Tensor:
    return sum((row[:length].mean() for row, length in zip(h, b.mask.sum(1).tolist(), strict=True)), h.sum() * 0)


@idiom("guard")
def rl_padding_cut_to_the_longest_episode(h: Tensor, b: Batch) -> Tensor:
    return h[:, : int(b.ids[:, 0].max())].square().mean()


@idiom("guard")
def rl_logarithms_where_they_are_defined(h: Tensor, b: Batch) -> Tensor:
    h = h.clone()
    h[h > 0] = torch.log(h[h > 0])
    return h.mean()


# All of them.


@idiom("plain")
def checks_of_shapes_and_values(h: Tensor, b: Batch) -> Tensor:
    assert h.isfinite().all(), "not finite"
    if b.mask.sum() == 0:
        raise ValueError("nothing to learn from")
    return h.square().mean()


@idiom("plain")
def loss_that_is_printed(h: Tensor, b: Batch) -> Tensor:
    loss = h.square().mean()
    print(f"loss {loss.item():.3f}, {b.mask.sum().item()} tokens", end="", file=_NOWHERE)
    return loss


@idiom("plain")
def similarities_off_the_diagonal(h: Tensor, b: Batch) -> Tensor:
    rows = h.mean(1)
    others = (rows @ rows.T).masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
    return others.logsumexp(-1).mean()


@idiom("guard")
def similarities_of_others_by_a_fixed_mask(h: Tensor, b: Batch) -> Tensor:
    rows = h.mean(1)
    return (rows @ rows.T)[~torch.eye(8, dtype=torch.bool)].view(8, 7).logsumexp(-1).mean()


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()
