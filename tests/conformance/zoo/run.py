"""The model zoo: each model sharded on small meshes equals the single device; and what that costs.

Every model is compiled from a few annotations for dp=2, tp=2 and dp=2,tp=2, and for the last once more with dropout on
and once with sizes that do not divide. ``shardc verify`` holds outputs and every gradient, in float64 and float32,
against the single device, and that against the eager model; a step is rehearsed on meta. ``--all`` takes every model
type of transformers, as small as it can be built, on dp=2,tp=2; what transformers cannot build or run small is apart.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rehearsal import StallError, rehearse
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardc import CaptureError, Mesh, P, ShardingError, parallelize
from shardc.api import Compiled
from shardc.costs.count import flops_of
from shardc.language.text import bytes_text, table
from shardc.program.node import op_name
from shardc.program.traffic import fallbacks_of
from shardc.verify import LOOSEST, NUM_ROUNDINGS, TOLERANCES, Difference, difference, verify

from ..suite import Result, chosen, exit_code, print_counts, read_json, run_cases, write_json
from . import convolutions as convolutions
from . import further as further
from . import small
from .models import MODELS, Made, Sizes

MESHES = {"dp=2": Mesh(dp=2), "tp=2": Mesh(tp=2), "dp=2,tp=2": Mesh(dp=2, tp=2)}
SIZES = {"even": Sizes(), "dropout": Sizes(), "uneven": Sizes(batch=5, seq=7, vocab=67, heads=3)}
DROPOUT = 0.1
AGAINST_EAGER = "single device against eager"
FEW_ROUNDINGS = 1e-9  # in float64, of a tensor of which float32 has few digits


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh; ``variant`` is a name of ``SIZES``."""

    model: str
    variant: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.model} {self.variant} {self.mesh}"

    def make(self) -> Made:
        """The model, ready to be trained, its inputs and its annotations."""
        torch.manual_seed(0)
        model, inputs, weights = MODELS[self.model](SIZES[self.variant])
        set_dropout(model, DROPOUT if self.variant == "dropout" else 0.0)
        batch = {f"input:{name}": P("dp") for name, value in inputs.items() if isinstance(value, Tensor)}
        annotations = {"dp=2": batch, "tp=2": weights, "dp=2,tp=2": batch | dict(weights)}
        return model.train(), inputs, annotations[self.mesh]


def set_dropout(model: nn.Module, chance: float) -> None:
    """Give every module that drops, by whatever name it keeps its chance, the same one.

    Layers are not dropped whole: that is a branch on a drawn number, which no graph holds. Nor are spans of speech
    masked, which numpy draws.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            if hasattr(holder, "mask_time_prob"):
                holder.apply_spec_augment = False
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                drops = "drop" in name or (isinstance(holder, nn.Dropout) and name == "p")
                wanted = 0.0 if "layer" in name else chance
                if drops and isinstance(value, (int, float)) and not isinstance(value, bool) and value != wanted:
                    setattr(holder, name, wanted)


def cases(
    only: str | None = None, variants: Sequence[str] = tuple(SIZES), meshes: Sequence[str] = ()
) -> Iterator[Case]:
    """Every model on every mesh; the further variants on the largest mesh alone, if no meshes are asked for."""
    for name in MODELS:
        for variant in variants if fnmatch.fnmatch(name, only or "*") else ():
            for mesh in meshes or (MESHES if variant == "even" else ["dp=2,tp=2"]):
                yield Case(name, variant, mesh)


def run(case: Case) -> Result:
    """Compile the case, compare its numbers, and count what the program costs."""
    seen: list[Compiled] = []
    try:
        model, inputs, annotations = case.make()
        found = verify(model, MESHES[case.mesh], annotations, kwargs=inputs, watch=seen.append)
        rehearse(seen[-1])
    except StallError as error:
        return Result(str(case), "wrong", str(error))
    except Exception as error:  # whatever stops one model, the next is tried
        return Result(str(case), "refused", f"{type(error).__name__}: {error}")
    wrong = [_text(each) for each in found if not each.is_small]
    facts = _worst(found) | {"roundings": sum(each.is_rounding for each in found)} | _costs(seen[-1])
    return Result(str(case), "wrong" if wrong else "right", "; ".join(wrong[:4]), facts)


def _text(found: Difference) -> str:
    return f"{found.check}, {found.dtype}: {found.name} {found.difference:.1e}"


def _worst(found: Sequence[Difference]) -> dict[str, float]:
    return {dtype: max(each.difference for each in found if each.dtype == dtype) for dtype in ("float64", "float32")}


def _costs(compiled: Compiled) -> dict[str, Any]:
    """``redundant``: operations of all ranks together over those of the model, 1 when nothing is computed twice."""
    program = compiled.program
    whole, all_ranks = flops_of(compiled.at("canonicalize")), flops_of(program, of_rank=True) * compiled.mesh.size
    return {
        "seconds": dict(compiled.seconds),
        "nodes": len(program.graph.nodes),
        "collectives": dict(Counter(found.kind for found in compiled.collectives)),
        "wire_bytes": sum(found.wire_bytes for found in compiled.collectives),
        "redundant": all_ranks / max(1, whole),
        "fallbacks": dict(Counter(op_name(node.target) for node in fallbacks_of(program))),
    }


def run_type(model_type: str) -> Result:
    """The same of any model type of transformers: rows of the batch and every linear weight are cut.

    A causal language model also runs without gradients, as it is called to generate text.
    """
    try:
        model, inputs = small.build(model_type)
    except small.CannotBuildError as error:
        return Result(model_type, "apart", str(error), {"reason": error.reason})
    set_dropout(model, 0.0)
    mesh, seen = MESHES["dp=2,tp=2"], list[Compiled]()
    try:
        found = verify(model.train(), mesh, _annotations(model, inputs), kwargs=inputs, watch=seen.append)
        facts = _worst(found) | {"roundings": sum(each.is_rounding for each in found)} | _costs(seen[-1])
        wrong = [_text(each) for each in found if not each.is_small]
        if wrong and (reason := reason_of(found, model, inputs)):
            return Result(model_type, "apart", f"{reason}: {'; '.join(wrong[:4])}", facts | {"reason": reason})
        decoder = small.decoder(model, inputs)
        if decoder is not None:
            facts["no_grad"] = distance = _without_gradients(*decoder, mesh)
            wrong += [f"no_grad: logits {distance:.1e}"] if distance > TOLERANCES[torch.float32] else []
    except small.CannotBuildError as error:
        facts["no decoder"] = str(error)
    except (CaptureError, ShardingError) as error:
        return Result(model_type, "refused", " | ".join(line.strip() for line in str(error).splitlines()))
    except Exception as error:  # whatever stops one model, the next is tried
        return Result(model_type, "wrong", f"a traceback: {type(error).__name__}: {str(error)[:300]}")
    return Result(model_type, "wrong" if wrong else "right", "; ".join(wrong[:4]), facts)


def reason_of(found: Sequence[Difference], model: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """Why the differences of a type say nothing of shardc, if they do not.

    A sum of large numbers that is nearly 0, as the gradient of a bias before a batch norm is, has few digits in
    float32. Where that is so, float64 must be right, and float32 is held to what rounding explains.
    """
    bad = [each for each in found if not each.is_small]
    lost = NUM_ROUNDINGS * max(each.rounding for each in found)
    most = {"float32": lost, "float64": FEW_ROUNDINGS}
    if lost > LOOSEST and all(each.difference <= most[each.dtype] for each in bad):
        return "float32 has few digits"
    if all(each.check == AGAINST_EAGER for each in bad) and _draws_in_evaluation(model, inputs):
        return "draws in evaluation"  # eager and we draw other numbers
    return ""


def _draws_in_evaluation(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    outputs: list[list[Tensor]] = []
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            outputs.append([leaf for leaf in tree_leaves(model.eval()(**inputs)) if isinstance(leaf, Tensor)])
    return not all(map(torch.equal, *outputs))


def _annotations(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, P]:
    batch = max(len(value) for value in inputs.values())
    annotations = {f"input:{name}": P("dp") for name, value in inputs.items() if len(value) == batch}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return annotations | {f"param:{name}.weight": P("tp") for name in linear}


def _without_gradients(model: nn.Module, inputs: Mapping[str, Tensor], mesh: Mesh) -> float:
    """How far the logits of a parallel model are from the eager model's, caches and all other outputs on."""
    parallel = parallelize(model.eval(), mesh, _annotations(model, inputs))
    with torch.no_grad():
        return difference(parallel(**inputs).logits, model(**inputs).logits)


# The command.

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
HEADER = ("case", "float64", "float32", "capture s", "passes s", "nodes", *KINDS, "wire", "FLOPs", "run whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which variants, on which meshes."""
    parser.add_argument("--variant", action="append", choices=tuple(SIZES), help="only this one; may be given again")
    parser.add_argument("--all", action="store_true", help="every model type of transformers, on dp=2,tp=2 alone")
    parser.add_argument("--mesh", action="append", choices=tuple(MESHES), help="only this one; may be given again")
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="of --all: seconds for a type (default 240)"
    )
    parser.add_argument("--resume", action="store_true", help="of --all: keep results that FILE has")


def main(options: argparse.Namespace) -> int:
    """Run the cases; print a row for each, where the time of compiling went, and the counts."""
    quiet()
    if options.all:
        results = _all_types(options)
    else:
        found = list(cases(options.only, options.variant or tuple(SIZES), options.mesh or ()))[:: options.every]
        results = run_cases(run, found, options.jobs)
    print(table(HEADER, [_row(result) for result in results if "seconds" in result.facts]))
    print(_slowest(results))
    print_counts("zoo", results)
    if options.all:
        print(_shares(results))
    without = [result for result in results if result.outcome == "right" and not result.facts["fallbacks"]]
    print(f"zoo: {len(without)} of them right with no op run whole")
    for result in results:
        if num := result.facts.get("roundings"):
            print(f"  {result.name}: {num} tensors held to four times what float32 is off by on one device")
    write_json(options.json, results)
    return exit_code(results)


def _all_types(options: argparse.Namespace) -> list[Result]:
    """The results of every type, written as they come; those of an earlier run are not run again if it is resumed."""
    known = read_json(options.json) if options.resume else []
    cases = [name for name in chosen(small.types(), options) if name not in {result.name for result in known}]

    def write(results: list[Result]) -> None:
        write_json(options.json, [*known, *results])

    return [*known, *run_cases(run_type, cases, options.jobs, options.limit, write)]


def _shares(results: Sequence[Result]) -> str:
    """How many types are right of those that can be built small, why others cannot, and how many decoders ran."""
    apart = Counter(result.facts["reason"] for result in results if result.outcome == "apart")
    num_built = len(results) - apart.total()
    right = sum(result.outcome == "right" for result in results)
    decoders = [result for result in results if "no_grad" in result.facts]
    return "\n".join(
        (
            f"zoo: {right} right of {num_built} types that are built small: {100 * right / max(1, num_built):.1f} %",
            f"zoo: {apart.total()} are not: " + ", ".join(f"{count} {reason}" for reason, count in apart.most_common()),
            f"zoo: {len(decoders)} causal language models ran without gradients, caches on",
        )
    )


def quiet() -> None:
    """What transformers says of small configs, and torch of ops that it cannot trace, is no news."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def _row(result: Result) -> tuple[str, ...]:
    facts, seconds = result.facts, dict(result.facts["seconds"])
    capture = seconds.pop("capture")
    return (
        *(result.name, f"{facts['float64']:.0e}", f"{facts['float32']:.0e}"),
        *(f"{capture:.2f}", f"{sum(seconds.values()):.2f}", str(facts["nodes"])),
        *(str(facts["collectives"].get(kind, 0)) for kind in KINDS),
        *(bytes_text(facts["wire_bytes"]), f"{facts['redundant']:.2f}"),
        ", ".join(f"{name} {count}" for name, count in facts["fallbacks"].items()),
    )


def _slowest(results: Sequence[Result]) -> str:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.facts.get("seconds", {}))
    return table(("slowest", "seconds"), [(name, f"{took:.1f}") for name, took in total.most_common()])
