"""A checkpoint of a pipeline is resumed with more stages, and training equals that of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gloo_pool import GlooPool
from parallel_models import whole
from pipeline_models import Model, some_targets
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardc
from shardc import Mesh, P, Zero
from shardc.options import Pipeline
from shardc.runtime.comm.distributed import make_device_mesh

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # param_groups differ from rank to rank
NEAR = 1e-12


class Run:
    """What a researcher keeps: no decay for vectors, a schedule of rates, two backwards a step, a clip."""

    def __init__(self, model: Any) -> None:
        self.model = model
        matrices, vectors = ([each for each in model.parameters() if (each.dim() > 1) == is_one] for is_one in (1, 0))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
        self.rates = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def step(self) -> tuple[float, float]:
        """The loss and the norm of the gradients."""
        for _ in range(2):
            loss = self.model(*some_targets(10))
            loss.backward()
        norm = self.model.clip_grad_norm_(0.1)
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "rates": self.rates.state_dict(),
        }

    def load(self, path: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)
        self.rates.load_state_dict(state["rates"])


def new_run(sizes: Mapping[str, int], stage: int | None, **options: Any) -> Run:
    pipeline, zero = Pipeline(microbatches=4, **options), None if stage is None else Zero("dp", stage)
    mesh, data = make_device_mesh(Mesh(**sizes)), {"ids": P("dp"), "targets": P("dp")}
    annotations = data if "dp" in sizes else {}
    return Run(shardc.parallelize(new_model(), mesh, annotations, pipeline=pipeline, zero=zero, args=some_targets(10)))


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Model(is_tied=True, dropout=0.3).double()


def resume(path: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]], float]:
    """Two steps on two stages with ZeRO, saved; two more on four stages; the same four on one device, in one go."""
    first = new_run({"dp": 2, "pp": 2}, 2)
    found = [first.step() for _ in range(2)]
    dcp.save(first.state(), checkpoint_id=path)
    second = new_run({"pp": 4}, None, schedule="zb-h1")
    second.load(path)
    second.model.step = first.model.step
    found += [second.step() for _ in range(2)]
    alone = Run(shardc.parallelize(new_model(), Mesh(one=1)))
    wanted = [alone.step() for _ in range(4)]
    others = dict(alone.model.named_parameters())
    held = ((whole(each.detach()), others[name].detach()) for name, each in second.model.named_parameters())
    return found, wanted, max(float((one - other).abs().max()) for one, other in held)


def test_a_checkpoint_is_resumed_with_more_stages_than_it_was_saved_with(gloo: GlooPool, tmp_path: Any) -> None:
    for found, wanted, off in gloo.run(resume, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=NEAR)
        assert off <= NEAR
