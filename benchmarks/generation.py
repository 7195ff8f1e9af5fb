"""Time a token of ``generate``: a parallel module compared with plain eager, and with transformers' tensor parallelism.

    python benchmarks/generation.py                                        # one virtual rank and plain eager
    torchrun --standalone --nproc-per-node 2 benchmarks/generation.py      # tp=2 and tp_plan="auto"

All generate the same 64 tokens with a two-layer Llama, in turn. Prints the medians, their ratio, whether the tokens are
those of one device, and how many programs were compiled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, logging

import shardc
from shardc import Mesh, P

NEW = 64
COLUMNS, ROWS = P("tp", None), P(None, "tp")
PLAN = {
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    "*.o_proj.weight": ROWS, "*.down_proj.weight": ROWS, "lm_head.weight": COLUMNS,
}  # fmt: skip


def main() -> None:
    """Time both models in turn and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    is_job = "RANK" in os.environ
    if is_job:
        dist.init_process_group("gloo")
    folder = _saved(options.hidden, is_job)
    alone = LlamaForCausalLM.from_pretrained(folder).eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)) if is_job else Mesh(tp=1)
    parallel: Any = shardc.parallelize(alone, mesh, PLAN)
    other = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval() if is_job else alone
    expected, first = _tokens(alone), _tokens(parallel)
    _tokens(other)
    times: dict[str, list[float]] = {"other": [], "shardc": []}
    for _ in range(options.rounds):
        times["other"].append(_seconds(lambda: _tokens(other), is_job))
        times["shardc"].append(_seconds(lambda: _tokens(parallel), is_job))
    theirs, ours = (median(each) / NEW for each in times.values())
    if not is_job or dist.get_rank() == 0:
        name = "tp_plan" if is_job else "eager"
        same = "the tokens of one device" if torch.equal(first, expected) else "OTHER tokens than one device"
        print(f"{name} {1e3 * theirs:.1f} ms a token, shardc {1e3 * ours:.1f}, ratio {ours / theirs:.2f}; {same}, "
              f"{parallel.shardc.num_compiled} compiles")  # fmt: skip
    if is_job:
        dist.destroy_process_group()


def _saved(hidden: int, is_job: bool) -> Path:
    """Write the model into a new folder on the first rank; returns the folder on all ranks."""
    names = [tempfile.mkdtemp() if not is_job or dist.get_rank() == 0 else ""]
    if is_job:
        dist.broadcast_object_list(names)
    if not is_job or dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 4096}
        heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(names[0])
    if is_job:
        dist.barrier()
    return Path(names[0])


def _tokens(model: Any) -> Tensor:
    prompt = torch.randint(3, 4096, (2, 16), generator=torch.Generator().manual_seed(1))
    tokens: Tensor = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, do_sample=False)
    return tokens


def _seconds(run: Callable[[], Any], is_job: bool) -> float:
    if is_job:
        dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
