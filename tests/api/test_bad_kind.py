"""Arguments of a wrong kind are errors in four parts: axes, options, models, inputs, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, Pipeline, Precision, Remat, ShardingError, Zero
from shardc.language.errors import CaptureError, OrderError

MESH = Mesh(dp=2, tp=4)
X = torch.zeros(4, 8)


class Net(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Any], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 16), nn.Linear(16, 8), function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        if self.function is not None:
            return self.function(self, x)
        return (self.down(self.up(x).relu()) * self.scale).mean()


def compile(annotations: Any = None, function: Any = None, args: Any = (X,), mesh: Any = MESH, **options: Any) -> Any:
    return shardc.compile(Net(function), mesh, annotations or {}, args=args, **options)


def both(model: Any, x: Any) -> dict[str, Tensor]:
    logits = model.up(x)
    return {"loss": logits.mean(), "logits": logits}


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a mesh without names": (
        lambda: Mesh(2, 4),
        "Mesh: 2, 4\n"
        "  every axis has a name\n"
        "  write Mesh(dp=2, tp=4), or Mesh(**{'dp': 2})",
    ),
    "a size that is a flag": (
        lambda: Mesh(dp=True),
        "Mesh: axis 'dp' has size True\n"
        "  a size is a whole number of ranks, 1 or more\n"
        "  write Mesh(dp=2)",
    ),
    "an axis that cannot be typed": (
        lambda: Mesh(**{"tp:": 2}),
        "Mesh: axis 'tp:' of size 2\n"
        "  a name is of letters, digits and _, as a name in Python is\n"
        "  write Mesh(dp=2)",
    ),
    "one device for a list": (
        lambda: Mesh(dp=2, device_ids=1),  # type: ignore[arg-type]
        "Mesh: device_ids=(1,)\n"
        "  Mesh(dp=2, device_ids=(1,)) has 2 ranks, each must appear once\n"
        "  list each of 0..1 once",
    ),
    "a cut of a number": (
        lambda: compile({"scale": P("tp")}),
        "parameter 'scale': P('tp') on shape []\n"
        "  1 entry for 0 dims\n"
        "  write P(): it has no dim to cut",
    ),
    "a part of no size": (
        lambda: compile({"x": P("tp:(0)2")}),
        "input 'x': P('tp:(0)2') on shape [4, 8], dim 0: axis part 'tp:(0)2'\n"
        "  a part reads axis:(pre)size\n"
        "  write for example 'tp:(2)2', or 'cp:zigzag' for positions",
    ),
    "a list of axes": (
        lambda: P(["dp", "tp"]),  # type: ignore[arg-type]
        "P(['dp', 'tp']): entry 0 is ['dp', 'tp']\n"
        "  an entry is the name of a mesh axis, a tuple of names, blocks(...), None or P.OPEN\n"
        "  write ('dp', 'tp')",
    ),
    "an axis without a name": (
        lambda: P(""),
        "P(''): entry 0 is ''\n"
        "  an entry is the name of a mesh axis, a tuple of names, blocks(...), None or P.OPEN\n"
        "  write P('dp', None)",
    ),
    "a priority that is no number": (
        lambda: P("dp", priority="first"),  # type: ignore[arg-type]
        "P('dp', priority=first): priority='first'\n"
        "  it is no whole number from 0 on\n"
        "  say priority=0, 1, ...: lower propagates first",
    ),
    "a tuple for a P": (
        lambda: compile({"x": ("dp", None)}),
        "annotation 'x': ('dp', None)\n"
        "  an annotation is a P or a sequence of DTensor placements\n"
        "  write P('dp', None)",
    ),
    "a SPEC for a P": (
        lambda: compile({"x": "dp,?"}),
        "annotation 'x': 'dp,?'\n"
        "  an annotation is a P or a sequence of DTensor placements\n"
        "  write P('dp', P.OPEN)",
    ),
    "an annotation outside a model": (
        lambda: shardc.annotate(X, "dp"),  # type: ignore[arg-type]
        "annotate (test_bad_kind.py:LINE): 'dp'\n"
        "  an annotation inside a model is a P\n"
        "  write P('dp')",
    ),
    "an annotation of a number": (
        lambda: compile(function=lambda model, x: model.up(x) * shardc.annotate(3, P("dp"))),  # type: ignore[arg-type]
        "annotate (test_bad_kind.py:LINE): of type int\n"
        "  only a tensor lies on a mesh\n"
        "  annotate the tensors in it, one by one",
    ),
    "an axis that zero does not find": (
        lambda: compile(zero=Zero("dq")),
        "Zero('dq'): the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  did you mean dp?",
    ),
    "no axis for zero": (
        lambda: compile(zero=Zero(None)),  # type: ignore[arg-type]
        "Zero(None): the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  use one of dp, tp",
    ),
    "zero over the stages": (
        lambda: compile(zero=Zero("dp"), pipeline=Pipeline("dp", 2)),
        "Zero('dp'): with Pipeline('dp')\n"
        "  a parameter is held by the ranks of one stage\n"
        "  name another axis in one of them",
    ),
    "an axis that the pipeline does not find": (
        lambda: compile(pipeline=Pipeline("pp")),
        "Pipeline('pp'): the mesh is Mesh(dp=2, tp=4)\n"
        "  it has no such axis\n"
        "  did you mean tp or dp?",
    ),
    "an output cut over the stages": (
        lambda: compile({"output:logits": P(None, "dp")}, both, pipeline=Pipeline("dp", 2)),
        "output 'logits': P(None, 'dp') on shape [4, 16], dim 1: axis 'dp'\n"
        "  it is the axis of the pipeline's stages, and a value is held by the ranks of one stage\n"
        "  leave 'dp' out, or name another axis in Pipeline",
    ),
    "a value cut over the stages of a mesh of these alone": (
        lambda: compile(
            function=lambda model, x: shardc.annotate(model.up(x), P("pp")).mean(),
            mesh=Mesh(pp=2), pipeline=Pipeline("pp", 2),
        ),
        "annotate in the model (test_bad_kind.py:LINE): P('pp') on shape [4, 16], dim 0: axis 'pp'\n"
        "  it is the axis of the pipeline's stages, and a value is held by the ranks of one stage\n"
        "  leave 'pp' out, or name another axis in Pipeline",
    ),
    "a value cut in microbatches": (
        lambda: compile({"x": P("microbatch")}, pipeline=Pipeline("dp", 2)),
        "input 'x': P('microbatch') on shape [4, 8], dim 0: axis 'microbatch'\n"
        "  it is the time of a pipeline\n"
        "  say which dim is cut in microbatches: Pipeline(batch={...})",
    ),
    "more stages than parts": (
        lambda: compile(mesh=Mesh(pp=64), pipeline=Pipeline("pp")),
        "the model: it has 3 parts that compute, for 64 stages on 64 ranks\n"
        "  every stage computes something\n"
        "  say from 1 to 3 stages: a smaller axis, or fewer chunks",
    ),
    "a pipeline of nothing": (
        lambda: compile(function=lambda model, x: x[0, 0], pipeline=Pipeline("dp", 1, batch={"x": None})),
        "the model: it has 0 parts that compute, for 2 stages on 2 ranks\n"
        "  every stage computes something\n"
        "  compute something",
    ),
    "settings of a pipeline of other kinds": (
        lambda: Pipeline("pp", cuts="h.4", max_memory="8GB", loss_scale=1.0),  # type: ignore[arg-type]
        "3 problems:\n"
        "Pipeline: cuts='h.4'\n"
        "  it lists globs over the paths of modules\n"
        "  say cuts=('h.4', 'h.8')\n"
        "Pipeline: max_memory='8GB'\n"
        "  it is a whole number of bytes\n"
        "  say max_memory=8 * 10**9 for 8 gigabytes\n"
        "Pipeline: loss_scale=1.0\n"
        "  it is no torch.amp.GradScaler\n"
        "  say loss_scale=torch.amp.GradScaler(), the one that you step",
    ),
    "a batch dim by name": (
        lambda: Pipeline("pp", batch={"x": "0"}),  # type: ignore[dict-item]
        "Pipeline: batch={'x': '0'}\n"
        "  it maps the names of inputs to a dim, or to None\n"
        "  say batch={'mask': 1, 'table': None}",
    ),
    "a dtype that is none": (
        lambda: Precision("bf16"),  # type: ignore[arg-type]
        "Precision(compute='bf16'): of type str\n"
        "  it is no floating dtype\n"
        "  say torch.bfloat16, torch.float16 or torch.float32",
    ),
    "blocks that are a number": (
        lambda: Remat(3),  # type: ignore[arg-type]
        "Remat: blocks=3\n"
        "  it is a glob over the paths of modules\n"
        "  say blocks='h.*', or budget= for a number of bytes",
    ),
    "a budget in words": (
        lambda: Remat(budget="3MB"),  # type: ignore[arg-type]
        "Remat: budget='3MB'\n"
        "  it is a whole number of bytes, 0 or more\n"
        "  say budget=10**9 for a gigabyte",
    ),
    "arguments of compile of other kinds, all at once": (
        lambda: compile(args="x", kwargs=[X], train="no", strict=1, differentiable="logits"),
        "5 problems:\n"
        "train: 'no'\n"
        "  it is yes or no\n"
        "  say train=True or train=False\n"
        "strict: 1\n"
        "  it is yes or no\n"
        "  say strict=True or strict=False\n"
        "args: 'x'\n"
        "  it holds the positional arguments of forward, in order\n"
        "  say args=(x,) for a single input\n"
        "kwargs: of type list\n"
        "  it holds the arguments of forward that are given by name\n"
        "  say kwargs={'name': value}\n"
        "differentiable: 'logits'\n"
        "  it lists names of outputs\n"
        "  say differentiable=('logits',)",
    ),
    "a class for a model": (
        lambda: shardc.parallelize(Net, MESH, {}),  # type: ignore[arg-type]
        "model: the class Net\n"
        "  shardc compiles an nn.Module\n"
        "  make one: Net(...)",
    ),
    "a function for a model": (
        lambda: shardc.parallelize(lambda x: x, MESH, {}),  # type: ignore[arg-type]
        "model: of type function\n"
        "  shardc compiles an nn.Module\n"
        "  put the function in a module's forward",
    ),
    "annotations in a list, before any call": (
        lambda: shardc.parallelize(Net(), MESH, [P()]),  # type: ignore[arg-type]
        "annotations: of type list\n"
        "  annotations map patterns to specs\n"
        "  write {'*.weight': P('tp')}",
    ),
    "a model that torch.compile has": (
        lambda: shardc.compile(torch.compile(Net()), MESH, {}, args=(X,)),  # type: ignore[arg-type]
        "model: a Net in torch.compile\n"
        "  it is compiled already\n"
        "  give the Net itself, and to parallelize compile='inductor'",
    ),
    "a parameter without a shape": (
        lambda: shardc.compile(nn.Sequential(nn.LazyLinear(8)), MESH, {}, args=(X,)),
        "parameter '0.weight': it has no shape yet, as 1 others\n"
        "  its module is lazy\n"
        "  call the model once, so that it is made",
    ),
    "two inputs of one name": (
        lambda: compile(function=lambda model, x: x["a"]["b"], args=({"a.b": X, "a": {"b": X}},)),
        "input 'x.a.b': a tensor in a container\n"
        "  two tensors have this path: a key with a dot reads as two\n"
        "  rename one of the keys",
    ),
    "an input in a set": (
        lambda: compile(function=lambda model, x: model.up(next(iter(x))), args=({X},)),
        "input 'x': a tensor in a container\n"
        "  it is in a set, which has no order: none says which tensor is which\n"
        "  use a list or a tuple",
    ),
    "an input without values": (
        lambda: compile().simulate(X.to("meta")),
        "input 'x': shape [4, 8], on meta\n"
        "  a program runs on values\n"
        "  give a tensor that has some",
    ),
    "a gradient without a name": (
        lambda: compile().simulate(X, grad_outputs=torch.ones(())),
        "grad_outputs: tensor(1.)\n"
        "  it maps the names of outputs to their gradients\n"
        "  say grad_outputs={'output': ...}",
    ),
    "a gradient that is a number": (
        lambda: compile().simulate(X, grad_outputs={"output": 1.0}),
        "grad_outputs['output']: 1.0\n"
        "  a gradient is a tensor\n"
        "  give a tensor like the output",
    ),
    "a state that is no dict": (
        lambda: shardc.parallelize(Net(), MESH, {}).load_state_dict(None),  # type: ignore[arg-type]
        "state_dict: of type NoneType\n"
        "  it maps names to tensors\n"
        "  give what model.state_dict() or torch.load returns",
    ),
    "shapes, dtypes and shardings to go between": (
        lambda: shardc.reshard_plan(MESH, 8, torch.float32, P("dp"), P("tp")),  # type: ignore[arg-type]
        "shape: 8\n"
        "  it holds the sizes of dims, 0 or more\n"
        "  write for example (8, 64)",
    ),
    "a dtype by name": (
        lambda: shardc.reshard_plan(MESH, (8, 8), "float32", P("dp"), P("tp")),  # type: ignore[arg-type]
        "dtype: 'float32'\n"
        "  it is no dtype of torch\n"
        "  write for example torch.float32",
    ),
    "an axis for a sharding": (
        lambda: shardc.reshard_plan(MESH, (8, 8), torch.float32, "dp", P("tp")),  # type: ignore[arg-type]
        "src: 'dp'\n"
        "  it is no P and no Sharding\n"
        "  write for example P('dp', None)",
    ),
    "ranks in lists": (
        lambda: Mesh(dp=2, device_ids=[[0], [1]]),  # type: ignore[list-item]
        "Mesh: device_ids=([0], [1])\n"
        "  Mesh(dp=2, device_ids=([0], [1])) has 2 ranks, each must appear once\n"
        "  list each of 0..1 once",
    ),
    "more ranks than anyone has": (
        lambda: compile(mesh=Mesh(dp=10**9)),
        "Mesh(dp=1000000000): 1000000000 ranks\n"
        "  a mesh has at most 1048576\n"
        "  say sizes whose product is at most 1048576",
    ),
    "one number of stages for places": (
        lambda: Pipeline("pp", cuts=3),  # type: ignore[arg-type]
        "Pipeline: cuts=3\n"
        "  it lists globs over the paths of modules\n"
        "  say cuts=('h.4', 'h.8')",
    ),
    "an input for the inputs": (
        lambda: shardc.parallelize(Net(), MESH, {}, args="x"),  # type: ignore[arg-type]
        "args: 'x'\n"
        "  it holds the positional arguments of forward, in order\n"
        "  say args=(x,) for a single input",
    ),
    "a link in a list": (
        lambda: compile(links={"tp": ["nvlink"]}),
        "links['tp']: ['nvlink']\n"
        "  there is no such link\n"
        "  did you mean nvlink or nvlink5 or nvlink4?",
    ),
    "tables in a list": (
        lambda: compile().dump(only=["memory"]),
        "only=['memory']: of type list\n"
        "  it names tables and globs in one text\n"
        "  say only='memory,blocks.0.*'",
    ),
    "a runner in a list": (
        lambda: shardc.parallelize(Net(), MESH, {}, compile=["eager"]),  # type: ignore[arg-type]
        "parallelize: compile=['eager']\n"
        "  there is no such compile\n"
        "  did you mean eager?",
    ),
    "a pipeline by name": (
        lambda: shardc.parallelize(Net(), Mesh(pp=2), {}, pipeline="pp"),  # type: ignore[arg-type]
        "option pipeline: pipeline='pp'\n"
        "  it is no shardc.Pipeline\n"
        "  say pipeline=shardc.Pipeline('pp', microbatches=8)",
    ),
    "seconds in words": (
        lambda: shardc.StageCost(forward="a"),  # type: ignore[arg-type]
        "cost of a stage: forward='a'\n"
        "  it is negative, or no number\n"
        "  say seconds and bytes of 0 or more",
    ),
    "a schedule of no text": (
        lambda: shardc.Schedule.from_csv(None),  # type: ignore[arg-type]
        "schedule: of type NoneType\n"
        "  a CSV is text\n"
        "  give what to_csv() returns, or Path(file).read_text()",
    ),
    "initial values from no seed": (
        lambda: shardc.init_parameters(Net, MESH, seed="a"),  # type: ignore[arg-type]
        "seed: 'a'\n"
        "  it is a whole number of less than 64 bits\n"
        "  say seed=0",
    ),
    "factors in a list": (
        lambda: shardc.register_rule(
            torch.ops.aten.mm.default, "m k, k n -> m n", whole=["k"], override=True  # type: ignore[arg-type]
        ),
        "register_rule(aten.mm.default): whole=['k']\n"
        "  it is text, words with blanks between them\n"
        "  say whole='d'",
    ),
    "no weights": (
        lambda: shardc.balance(None, 2),  # type: ignore[arg-type]
        "balance: weights=None\n"
        "  there is no list of weights\n"
        "  write balance([3, 1], 2)",
    ),
    "stages in words": (
        lambda: shardc.schedule("1f1b", "2", 2),  # type: ignore[arg-type]
        "schedule 1f1b: num_stages='2'\n"
        "  it counts from 1\n"
        "  say num_stages=1 or more",
    ),
    "times in words": (
        lambda: shardc.schedule("1f1b", 2, 2).simulate("fast"),  # type: ignore[arg-type]
        "costs: 'fast'\n"
        "  it is no shardc.Costs and no shardc.StageCost\n"
        "  say StageCost(...) for all stages alike",
    ),
    "a batch on no job": (
        lambda: shardc.shard_batch(X, MESH, P("dp")),  # type: ignore[arg-type]
        "shard_batch: the mesh Mesh(dp=2, tp=4)\n"
        "  only the ranks of a job hold shards\n"
        "  give the DeviceMesh of init_device_mesh",
    ),
    "a number to initialise": (
        lambda: shardc.init_parameters(3, MESH, {}),  # type: ignore[arg-type]
        "init_parameters: 3\n"
        "  it takes a model on meta, or a function that makes one\n"
        "  give init_parameters(lambda: Model(config), ...)",
    ),
    "a function that makes no model": (
        lambda: shardc.init_parameters(lambda: 3, MESH, {}),  # type: ignore[arg-type, return-value]
        "model: of type int\n"
        "  shardc compiles an nn.Module\n"
        "  give an nn.Module",
    ),
    "links of no axes": (
        lambda: compile(links=3),
        "links: 3\n"
        "  it maps axes to links\n"
        "  say links={'tp': 'nvlink'}, or name a file",
    ),
    "no name to explain": (
        lambda: compile({"x": P("dp")}).explain(None),
        "explain None: the program has LINE names\n"
        "  no parameter, input, output, module, value or collective is named so\n"
        "  did you mean down?",
    ),
    "a seed that is none": (
        lambda: compile().simulate(X, seed="a"),
        "seed: 'a'\n"
        "  it is a whole number of less than 64 bits\n"
        "  say seed=0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_of_a_wrong_kind_are_refused(name: str) -> None:
    action, expected = MISTAKES[name]
    with pytest.raises(ShardingError) as raised:
        action()
    error, lines = raised.value, expected.split("LINE")
    assert all((error.who, error.what, error.problem, error.remedy))
    assert str(error).startswith(lines[0]) and str(error).endswith(lines[-1]), error


def test_a_program_before_any_call_is_an_error_of_order() -> None:
    with pytest.raises(OrderError) as raised:
        _ = shardc.parallelize(Net(), MESH, {}).program
    assert str(raised.value) == (
        "program: of a module that was not called\n"
        "  a call is compiled when it is made\n"
        "  call the module once, or give args= to parallelize"
    )


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (lambda model, x: {model.up(x)}, "it is in a set, which has no order: none says which tensor is which"),
        (
            lambda model, x: {"a.b": model.up(x), "a": {"b": model.up(x)}},
            "two tensors have this path: a key with a dot reads as two",
        ),
    ],
)
def test_outputs_with_clashing_names_are_refused(output: Any, problem: str) -> None:
    with pytest.raises(CaptureError) as raised:
        compile(function=output)
    assert raised.value.problem == problem
