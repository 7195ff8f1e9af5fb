"""The model zoo: compares each model, sharded on small meshes, with one device, and counts its costs.

Every model is compiled from a few annotations for dp=2, tp=2 and dp=2,tp=2, and for the last also with dropout and with
sizes that do not divide. ``shardc verify`` compares outputs and all gradients, in float64 and float32, with one device,
and one device with the eager model; a step is rehearsed on meta. ``--all`` takes every model type of transformers, as
small as it can be built, on dp=2,tp=2. Types that transformers cannot build or run at a small size count as apart.
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
FEW_ROUNDINGS = 1e-9  # tolerance in float64 for a tensor that has few digits in float32


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh; ``variant`` is a name of ``SIZES``."""

    model: str
    variant: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.model} {self.variant} {self.mesh}"

    def make(self) -> Made:
        """The model in training mode, its inputs and its annotations."""
        torch.manual_seed(0)
        model, inputs, weights = MODELS[self.model](SIZES[self.variant])
        set_dropout(model, DROPOUT if self.variant == "dropout" else 0.0)
        batch = {f"input:{name}": P("dp") for name, value in inputs.items() if isinstance(value, Tensor)}
        annotations = {"dp=2": batch, "tp=2": weights, "dp=2,tp=2": batch | dict(weights)}
        return model.train(), inputs, annotations[self.mesh]


def set_dropout(model: nn.Module, chance: float) -> None:
    """Set the dropout chance of every module and config, whatever the name of the field.

    Whole layers are not dropped: that is a branch on a random number, which a graph cannot have. Spans of speech are
    not masked, since numpy draws them.
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
    """Every model and variant on ``meshes``; by default, even sizes on all meshes, other variants on the largest."""
    for name in MODELS:
        for variant in variants if fnmatch.fnmatch(name, only or "*") else ():
            for mesh in meshes or (MESHES if variant == "even" else ["dp=2,tp=2"]):
                yield Case(name, variant, mesh)


def run(case: Case) -> Result:
    """Compile the case, compare its values, and count the costs of the program."""
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
    """The costs of a program. ``redundant``: operations of all ranks per operation of the model, 1 if none repeats."""
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
    """Run a model type of transformers as ``run`` does a case, with the batch and every linear weight cut.

    A causal language model also runs without gradients, as in text generation.
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
    """Why the differences of a type are not an error of shardc; empty if they are.

    A sum of large numbers that is nearly 0, like the gradient of a bias before a batch norm, has few digits in float32.
    Then float64 must be right, and differences in float32 must be explained by rounding.
    """
    bad = [each for each in found if not each.is_small]
    lost = NUM_ROUNDINGS * max(each.rounding for each in found)
    most = {"float32": lost, "float64": FEW_ROUNDINGS}
    if lost > LOOSEST and all(each.difference <= most[each.dtype] for each in bad):
        return "float32 has few digits"
    if all(each.check == AGAINST_EAGER for each in bad) and _draws_in_evaluation(model, inputs):
        return "draws in evaluation"  # eager torch and shardc draw different numbers
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
    """The difference of the logits of a parallel model from the eager model's, with caches and all other outputs on."""
    parallel = parallelize(model.eval(), mesh, _annotations(model, inputs))
    with torch.no_grad():
        return difference(parallel(**inputs).logits, model(**inputs).logits)


# The command.

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
HEADER = ("case", "float64", "float32", "capture s", "passes s", "nodes", *KINDS, "wire", "FLOPs", "run whole")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--variant", action="append", choices=tuple(SIZES), help="only this one; may be given again")
    parser.add_argument("--all", action="store_true", help="every model type of transformers, on dp=2,tp=2 alone")
    parser.add_argument("--mesh", action="append", choices=tuple(MESHES), help="only this one; may be given again")
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="of --all: seconds for a type (default 240)"
    )
    parser.add_argument("--resume", action="store_true", help="of --all: keep results that FILE has")


def main(options: argparse.Namespace) -> int:
    """Run the cases; print a row for each, the compile time by pass, and the counts."""
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
    """The results of all types, written after each type; a resumed run does not repeat types that have a result."""
    known = read_json(options.json) if options.resume else []
    cases = [name for name in chosen(small.types(), options) if name not in {result.name for result in known}]

    def write(results: list[Result]) -> None:
        write_json(options.json, [*known, *results])

    return [*known, *run_cases(run_type, cases, options.jobs, options.limit, write)]


def _shares(results: Sequence[Result]) -> str:
    """The share of right types among those built small, the reasons of others, and the number of decoders that ran."""
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
    """Silence warnings of transformers about small configs, and of torch about ops that it cannot trace."""
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
