"""Plans as people write them: those of ``examples/``, the benchmarks and the zoo, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from shardc import Mesh, P, Pipeline, Remat, Zero

from .models import Target
from .plan import Plan

NODE = 8  # ranks of a node, if there are more
MICROBATCHES = 8  # as in the benchmark
STAGES = (2, 4, 8)


def hand_plans(target: Target, ranks: int) -> tuple[Plan, ...]:
    """All plans for this many ranks, without those that equal an earlier one."""
    makers = (data_parallel, hybrid, tensor_parallel, expert_parallel, pipelines, space, table)
    plans = [plan for make in makers for plan in make(target, ranks)]
    return tuple({plan.text: plan for plan in reversed(plans)}.values())[::-1]


def data_parallel(target: Target, ranks: int) -> Iterator[Plan]:
    """Samples over dp: plain, with ZeRO 1 to 3, with FSDP by annotation, and with recomputation of each block."""
    plain = Plan(f"dp={ranks}", Mesh(dp=ranks), target.data("dp"))
    yield plain
    for stage in (1, 2, 3):
        yield replace(plain, name=f"{plain.name} zero{stage}", zero=Zero("dp", stage))
    has_numbers = any(buffer.dim() == 0 for buffer in target.model.buffers())  # such a buffer has no dim to cut
    stored = "param:*.weight" if has_numbers else "param:*"
    yield replace(plain, name=f"{plain.name} fsdp", annotations={**plain.annotations, stored: P("dp")})
    if target.blocks:
        remat = Remat(target.blocks)
        yield replace(plain, name=f"{plain.name} remat", remat=remat)
        yield replace(plain, name=f"{plain.name} zero3 remat", zero=Zero("dp", 3), remat=remat)


def hybrid(target: Target, ranks: int) -> Iterator[Plan]:
    """Samples over two axes: plain data parallelism, and HSDP with ZeRO over one axis, inside or across nodes.

    Also ZeRO++: ZeRO over both axes, with gathers in two steps.
    """
    inside = min(NODE, ranks // 2)
    if inside > 1:
        mesh = Mesh(dp=ranks // inside, fsdp=inside)
        yield Plan(f"dp={ranks // inside}x{inside}", mesh, target.data(("dp", "fsdp")))
        for axis, stage in (("fsdp", 3), ("fsdp", 1), ("dp", 1)):
            name = f"hsdp {ranks // inside}x{inside} zero{stage} over {axis}"
            yield Plan(name, mesh, target.data(("dp", "fsdp")), Zero(axis, stage))
        zero = Zero(("dp", "fsdp"), 3, gather_over="fsdp")
        yield Plan(f"zero++ {ranks // inside}x{inside}", mesh, target.data(("dp", "fsdp")), zero)


def tensor_parallel(target: Target, ranks: int) -> Iterator[Plan]:
    """Megatron's plan for every factorization; inside a node all its forms, with sequences, ZeRO and recomputation."""
    for inside in divisors(ranks):
        for name in target.tensor:
            is_usual = inside == min(NODE, ranks // 2) or inside == ranks
            if is_usual or name == best_form(target):
                yield from _tensor_forms(target, ranks, inside, name, is_usual)


def best_form(target: Target) -> str:
    """The form of tensor parallelism used for every factorization: with the vocabulary, if there is one."""
    return next((name for name in target.tensor if "vocabulary" in name), next(iter(target.tensor), ""))


def _tensor_forms(target: Target, ranks: int, inside: int, name: str, is_usual: bool) -> Iterator[Plan]:
    outside = ranks // inside
    mesh = Mesh(dp=outside, tp=inside) if outside > 1 else Mesh(tp=inside)
    data = target.data("dp") if outside > 1 else {}
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
    plain = Plan(f"{sizes} {name}", mesh, {**data, **target.tensor[name]})
    yield plain
    if name != best_form(target):
        return
    if target.sequence:
        cut = {f"module:{module}": P("dp" if outside > 1 else None, "tp") for module in target.sequence}
        plain = replace(plain, name=f"{sizes} {name} + sequence", annotations={**plain.annotations, **cut})
        yield plain
    if is_usual and outside > 1:
        yield replace(plain, name=f"{plain.name} zero1", zero=Zero("dp", 1))
        yield replace(plain, name=f"{plain.name} zero3", zero=Zero("dp", 3))
    if is_usual and target.blocks:
        yield replace(plain, name=f"{plain.name} remat", remat=Remat(target.blocks))


def expert_parallel(target: Target, ranks: int) -> Iterator[Plan]:
    """Experts over the axis of the samples, over a part of it, and over the tensor parallel axis."""
    experts = {name: P("ep") for name in target.experts}
    for inside in divisors(ranks) if experts else ():
        if num_experts(target) % inside:
            continue
        outside = ranks // inside
        if outside == 1:
            yield Plan(f"ep={ranks}", Mesh(ep=ranks), {**target.data("ep"), **experts})
            continue
        mesh, data = Mesh(dp=outside, ep=inside), target.data(("dp", "ep"))
        plain = Plan(f"dp={outside},ep={inside}", mesh, {**data, **experts})
        yield plain
        yield replace(plain, name=f"{plain.name} zero1", zero=Zero("dp", 1))
        weights = {name: spec for each in target.tensor.values() for name, spec in each.items() if "expert" not in name}
        own = {**target.data("dp"), **weights, **{name: P("tp") for name in experts}}
        yield Plan(f"dp={outside},tp={inside} experts over tp", Mesh(dp=outside, tp=inside), own)


def num_experts(target: Target) -> int:
    """The number of experts of a layer: the size of dim 0 of their parameters."""
    named = target.model.named_parameters()
    return next(len(value) for name, value in named if any(fnmatchcase(name, glob) for glob in target.experts))


def pipelines(target: Target, ranks: int) -> Iterator[Plan]:
    """1F1B over 2, 4 and 8 stages, with samples or tensors cut inside a stage, and GPipe if a stage has one rank."""
    weights = target.tensor.get(best_form(target), {})
    for stages in STAGES if target.blocks and target.has_microbatches else ():
        inside = ranks // stages
        if stages > ranks:
            continue
        name, count = f"pp={stages}", min(MICROBATCHES, max(1, target.batch // inside))
        pipeline = Pipeline(microbatches=count, schedule="1f1b", balance="time")
        if inside == 1:
            yield Plan(f"{name} 1f1b", Mesh(pp=stages), {}, pipeline=pipeline)
            yield Plan(f"{name} gpipe", Mesh(pp=stages), {}, pipeline=replace(pipeline, schedule="gpipe"))
            continue
        yield Plan(f"{name},dp={inside}", Mesh(pp=stages, dp=inside), target.data("dp"), pipeline=pipeline)
        if inside <= NODE and weights:
            pipeline = replace(pipeline, microbatches=MICROBATCHES)
            yield Plan(f"{name},tp={inside}", Mesh(pp=stages, tp=inside), weights, pipeline=pipeline)


def space(target: Target, ranks: int) -> Iterator[Plan]:
    """Images cut by height, over all ranks or inside groups that each have their own samples."""
    for inside in divisors(ranks) if target.space else ():
        outside = ranks // inside
        if outside == 1:
            cut = {f"input:{name}": P(*[None] * dim, "sp") for name, dim in target.space.items()}
            yield Plan(f"sp={inside}", Mesh(sp=inside), cut)
        elif inside <= NODE:
            rows = {f"input:{name}": P("dp", *[None] * (dim - 1), "sp") for name, dim in target.space.items()}
            yield Plan(f"dp={outside},sp={inside}", Mesh(dp=outside, sp=inside), {**target.data("dp"), **rows})


def table(target: Target, ranks: int) -> Iterator[Plan]:
    """The rows or columns of a table over the axis of the samples, or over an axis of their own."""
    if not target.table:
        return
    for name, spec in {"rows": P("dp"), "columns": P(None, "dp")}.items():
        yield Plan(f"dp={ranks} table by {name}", Mesh(dp=ranks), {**target.data("dp"), target.table: spec})
        yield Plan(
            f"dp={ranks} all tables by {name}", Mesh(dp=ranks), {**target.data("dp"), "tables.[0-4].weight": spec}
        )
    yield Plan(f"tp={ranks} table by rows", Mesh(tp=ranks), {target.table: P("tp")})
    for inside in divisors(ranks):
        outside = ranks // inside
        mesh = Mesh(dp=outside, tp=inside)
        for name, spec in {"rows": P("tp"), "columns": P(None, "tp")}.items() if outside > 1 else ():
            annotations = {**target.data("dp"), target.table: spec}
            yield Plan(f"dp={outside},tp={inside} table by {name}", mesh, annotations)


def divisors(ranks: int) -> list[int]:
    """The possible sizes above 1 of an inner axis."""
    return [size for size in range(2, ranks + 1) if ranks % size == 0]
