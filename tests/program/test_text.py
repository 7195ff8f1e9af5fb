"""The printed form of programs and tables, on programs built by hand."""

import json
import operator
from dataclasses import replace
from typing import Literal

import gpt
import torch
from torch import fx

from shardc import compile
from shardc.costs.count import flops_of
from shardc.costs.memory import memory_of
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.record import json_text
from shardc.language.sharding import Sharding, TensorType
from shardc.language.text import (
    bytes_text,
    change_text,
    count_text,
    folded,
    operations_text,
    over_calls,
    seconds_text,
    table,
)
from shardc.ops.contraction import dot
from shardc.program.collective import all_gather, all_reduce, shard_slice
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Endpoint, Origin, ShardingChange, Source
from shardc.program.text import parameters_text, program_text
from shardc.program.traffic import collectives_of, collectives_text
from shardc.report.dump.dot import program_dot
from shardc.report.dump.program_record import program_record

aten = torch.ops.aten
Phase = Literal["forward", "backward", "update"]
CAUSE = "dot_1 (mlp.down) is f32[16@dp, 64]{sum tp}, sum wants f32[16@dp, 64]; tp from mlp.down.weight=tp,-"
MESH = Mesh(dp=2, tp=4)
F32 = torch.float32


def f32(*shape: int) -> TensorType:
    return TensorType(shape, F32)


def cut(spec: str, *shape: int) -> Sharding:
    return P.parse(spec).sharding(MESH, shape, "test")


def megatron() -> Program:
    """``mean(relu(x @ up) @ down)`` with its two weights cut over tp, lowered; and the gradient of ``down``."""
    graph = fx.Graph()
    program = Program(
        graph,
        inputs=(
            Input("mlp.up.weight", "parameter", f32(64, 256), requires_grad=True),
            Input("mlp.down.weight", "parameter", f32(256, 64), requires_grad=True),
            Input("x", "input", f32(16, 64)),
        ),
        outputs=(Output("loss", "output"), Output("mlp.down.weight", "gradient")),
        mesh=MESH,
        level="lowered",
    )

    def known(
        node: fx.Node, type_: TensorType, sharding: Sharding, module: str = "", phase: Phase = "forward"
    ) -> fx.Node:
        program.set_type(node, type_)
        program.set_sharding(node, sharding)
        program.set_source(node, Source(module, f"{module}.py:{len(graph.nodes)}" if module else "", phase))
        return node

    up = known(graph.placeholder("up"), f32(64, 256), cut("-,tp", 64, 256))
    down = known(graph.placeholder("down"), f32(256, 64), cut("tp,-", 256, 64))
    x = known(graph.placeholder("x"), f32(16, 64), cut("dp,-", 16, 64))
    call = graph.call_function
    h = known(call(dot, (x, up, "b k, k n -> b n")), f32(16, 256), cut("dp,tp", 16, 256), "mlp.up")
    a = known(call(aten.relu.default, (h,)), f32(16, 256), cut("dp,tp", 16, 256), "mlp")
    open_sum = replace(cut("dp,-", 16, 64), partial=((MESH.axis("tp"), "sum"),))
    y = known(call(dot, (a, down, "b k, k n -> b n")), f32(16, 64), open_sum, "mlp.down")
    reduced = known(call(all_reduce, (y, ("tp",), "sum")), f32(16, 64), cut("dp,-", 16, 64), "mlp.down")
    came = {"tp": Origin("mlp.down.weight=tp,-", 1, ("dot_1", 0))}
    why = ShardingChange(
        Endpoint("dot_1", "mlp.down"), f32(16, 64), open_sum, Endpoint("sum"), cut("dp,-", 16, 64), origins=came
    )
    program.set_causes(reduced, (why,))
    loss = known(call(aten.sum.default, (reduced,), {"dtype": F32}), f32(), Sharding.replicated(MESH, 0))
    ones = known(
        call(aten.ones.default, ([16, 64],), {"device": torch.device("cpu")}),
        f32(16, 64),
        cut("dp,-", 16, 64),
        "mlp.down",
        "backward",
    )
    partial_grad = replace(cut("tp,-", 256, 64), partial=((MESH.axis("dp"), "sum"),))
    grad = known(call(dot, (a, ones, "b k, b n -> k n")), f32(256, 64), partial_grad, "mlp.down", "backward")
    total = known(call(all_reduce, (grad, ("dp",), "sum")), f32(256, 64), cut("tp,-", 256, 64), "mlp.down", "backward")
    graph.output((loss, total))
    return program


def test_a_program_reads_like_the_model() -> None:
    assert (
        program_text(megatron())
        == """\
program (lowered) on dp=2, tp=4

inputs
  parameter mlp.up.weight: f32[64, 256@tp]
  parameter mlp.down.weight: f32[256@tp, 64]
  input x: f32[16@dp, 64]

forward
  mlp.up
    dot: f32[16@dp, 256@tp] = dot(x, mlp.up.weight, "b k, k n -> b n")  # mlp.up.py:4
  mlp
    relu_default: f32[16@dp, 256@tp] = relu(dot)  # mlp.py:5
  mlp.down
    dot_1: f32[16@dp, 64]{sum tp} = dot(relu_default, mlp.down.weight, "b k, k n -> b n")  # mlp.down.py:6
    all_reduce: f32[16@dp, 64] = all_reduce(dot_1, ("tp",), "sum")  # mlp.down.py:7; 3.1 kB on the wire, because \
dot_1 (mlp.down) is f32[16@dp, 64]{sum tp}, sum wants f32[16@dp, 64]; tp from mlp.down.weight=tp,-
  (model)
    sum_default: f32[] = sum(all_reduce, dtype=float32)

backward
  mlp.down
    ones_default: f32[16@dp, 64] = ones([16, 64])  # mlp.down.py:9
    dot_2: f32[256@tp, 64]{sum dp} = dot(relu_default, ones_default, "b k, b n -> k n")  # mlp.down.py:10
    all_reduce_1: f32[256@tp, 64] = all_reduce(dot_2, ("dp",), "sum")  # mlp.down.py:11; 16.4 kB on the wire

results
  output loss: f32[] = sum_default
  gradient mlp.down.weight: f32[256@tp, 64] = all_reduce_1
"""
    )


def test_a_localized_program_prints_local_shapes_without_shardings() -> None:
    program = megatron().copy(level="localized")
    assert "input x: f32[16, 64]\n" in program_text(program)
    assert "@" not in program_text(program).replace(CAUSE, "")


def test_an_aten_op_with_the_name_of_ours_keeps_its_namespace() -> None:
    program = megatron()
    node = next(node for node in program.calls if node.target is aten.relu.default)
    node.target = aten.dot.default
    assert "relu_default: f32[16@dp, 256@tp] = aten.dot(dot)" in program_text(program)
    assert "= dot(x, mlp.up.weight" in program_text(program)


def test_an_op_with_several_results_prints_all_types_and_the_pick_of_one() -> None:
    graph = fx.Graph()
    program = Program(graph, (Input("x", "input", f32(8, 4)),), (Output("", "output"),), MESH, "annotated")
    x = graph.placeholder("x")
    both = graph.call_function(aten.max.dim, (x, 1))
    picked = graph.call_function(operator.getitem, (both, 1))
    graph.output((picked,))
    rows, index = cut("dp", 8), TensorType((8,), torch.int64)
    program.set_type(x, f32(8, 4))
    program.set_sharding(x, cut("dp", 8, 4))
    program.set_type(both, (f32(8), index))
    program.set_sharding(both, (rows, rows))
    program.set_type(picked, index)
    lines = program_text(program).splitlines()
    assert "    max_dim: (f32[8@dp], i64[8@dp]) = max(x, 1)" in lines and "    getitem: i64[8@dp] = max_dim[1]" in lines


def test_collectives_are_counted_by_phase_kind_and_axes_in_bytes_of_one_rank() -> None:
    found = collectives_of(megatron())
    assert [(c.kind, c.axes, c.phase, c.local_shape_in, c.bytes, c.wire_bytes) for c in found] == [
        ("all_reduce", ("tp",), "forward", (8, 64), 2048, 3072),
        ("all_reduce", ("dp",), "backward", (64, 64), 16384, 16384),
    ]
    text = collectives_text(found)
    assert text.startswith(
        "phase     kind        axes  count    bytes  wire bytes\n"
        "forward   all_reduce  tp        1   2.0 kB      3.1 kB\n"
        "backward  all_reduce  dp        1  16.4 kB     16.4 kB\n"
        "total                           2  18.4 kB     19.5 kB\n"
    )
    assert CAUSE in text


def test_a_slice_is_no_collective_and_a_gather_pays_for_its_output() -> None:
    program = megatron()
    node = next(node for node in program.calls if node.target is all_reduce)
    node.target, node.args = shard_slice, (node.args[0], ("tp",), 0)
    assert [c.axes for c in collectives_of(program)] == [("dp",)]
    node.target = all_gather
    program.set_sharding(node.args[0], cut("dp+tp,-", 16, 64))
    gather = collectives_of(program)[0]
    assert (gather.local_shape_in, gather.local_shape_out) == ((2, 64), (8, 64))
    assert (gather.bytes, gather.wire_bytes) == (2048, 1536)


def test_parameters_show_what_one_rank_holds() -> None:
    assert parameters_text(megatron()) == (
        "parameter        sharding         on one rank    bytes\n"
        "mlp.up.weight    f32[64, 256@tp]  f32[64, 64]  16.4 kB\n"
        "mlp.down.weight  f32[256@tp, 64]  f32[64, 64]  16.4 kB\n"
    )


def test_memory_is_by_class_on_one_rank() -> None:
    parameter = 64 * 64 * 4
    x, hidden, loss = 8 * 64 * 4, 8 * 64 * 4, 4
    # the peak is at the last all_reduce: inputs, the loss, the gradient before and after, and Adam's states all along
    assert memory_of(megatron()) == {
        "parameters": 2 * parameter,
        "gradients": parameter,
        "optimizer": 2 * parameter,
        "saved": hidden,
        "gathered": 0,
        "peak": 2 * parameter + x + loss + 2 * parameter + 2 * parameter,
    }


def test_flops_count_two_for_each_product_of_a_contraction() -> None:
    program = megatron()
    assert flops_of(program) == 3 * 2 * 16 * 64 * 256
    assert flops_of(program, of_rank=True) * MESH.size == flops_of(program)


def test_flops_of_a_convolution_come_from_torch() -> None:
    graph = fx.Graph()
    program = Program(graph, (Input("x", "input", f32(2, 3, 8, 8)), Input("w", "parameter", f32(5, 3, 3, 3))), ())
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(aten.convolution.default, (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    graph.output(())
    for node, type_ in ((x, f32(2, 3, 8, 8)), (w, f32(5, 3, 3, 3)), (y, f32(2, 5, 8, 8))):
        program.set_type(node, type_)
    assert flops_of(program) == 2 * (2 * 8 * 8) * 5 * 3 * 3 * 3


def test_attention_on_a_cpu_counts_as_torch_counts_it() -> None:
    graph = fx.Graph()
    program = Program(graph, tuple(Input(name, "input", f32(2, 4, 16, 8)) for name in "qkv"), ())
    qkv = [graph.placeholder(name) for name in "qkv"]
    attend = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (*qkv, 0.0, True))
    graph.output(())
    for node in qkv:
        program.set_type(node, f32(2, 4, 16, 8))
    program.set_type(attend, (f32(2, 4, 16, 8), f32(2, 4, 16)))
    assert flops_of(program) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_the_json_form_holds_what_the_contract_names() -> None:
    record = json.loads(json_text(program_record(megatron(), {})))
    assert record["version"] == 1 and record["mesh"] == {"dp": 2, "tp": 4}
    assert set(record) >= {
        "parameters",
        "inputs",
        "outputs",
        "collectives",
        "fallbacks",
        "memory",
        "flops",
        "stages",
        "nodes",
    }
    assert record["parameters"][0] == {
        "name": "mlp.up.weight",
        "shape": [64, 256],
        "dtype": "float32",
        "sharding": "f32[64, 256@tp]",
        "local_shape": [64, 64],
    }
    assert record["collectives"][0] == {
        "id": "all_reduce",
        "kind": "all_reduce",
        "axes": ["tp"],
        "dtype": "float32",
        "local_shape_in": [8, 64],
        "local_shape_out": [8, 64],
        "bytes": 2048,
        "wire_bytes": 3072,
        "wire_bytes_total": 3072 * MESH.size,
        "phase": "forward",
        "node": "dot_1",
        "source": "mlp.down.py:7",
        "cause": CAUSE,
    }
    assert [node["name"] for node in record["nodes"]][:4] == ["up", "down", "x", "dot"]
    assert "seconds" not in record and program_record(megatron(), {"capture": 0.5}).seconds == {"capture": 0.5}


def test_two_dumps_are_equal_to_the_byte() -> None:
    first, second = megatron(), megatron()
    assert program_text(first) == program_text(second)
    assert json_text(program_record(first, {})) == json_text(program_record(second, {}))
    assert program_dot(first) == program_dot(second)


def test_the_drawing_boxes_modules_and_colours_collectives() -> None:
    text = program_dot(megatron())
    assert text.startswith("digraph program {") and text.endswith("}\n") and text.count("{") == text.count("}")
    assert 'label="mlp.down";' in text and '"dot" -> "relu_default";' in text
    coloured = [line.split()[0] for line in text.splitlines() if "fillcolor" in line]
    assert coloured == ['"all_reduce"', '"all_reduce_1"']


def test_a_table_aligns_numbers_right_and_leaves_empty_columns_out() -> None:
    text = table(("name", "count", "why"), [("a", 1, ""), ("long", 10, "")])
    assert text == "name  count\na         1\nlong     10\n"


def test_seconds_and_operations_are_printed_in_units_and_never_with_an_exponent() -> None:
    times = list(map(seconds_text, (0, 2e-5, 1.311e-3, 0.9, 2.5, 123456)))
    assert times == ["0.0 us", "20.0 us", "1.311 ms", "900.000 ms", "2.5 s", "123456 s"]
    assert list(map(operations_text, (0, 20480, 3e18))) == ["0 FLOP", "20.5 kFLOP", "3000.0 PFLOP"]
    assert list(map(count_text, (7, 27008, 7e9))) == ["7", "27.0 k", "7.0 G"]
    assert change_text(2000, 500) == "-1.5 kB" and change_text(1, 3) == "+2 B" and bytes_text(999_999) == "1.0 MB"


def test_rows_of_equal_layers_are_one_and_numbers_are_no_layers() -> None:
    rows = [("h.0.up", "65.5 kB"), ("h.1.up", "65.5 kB"), ("h.2.up", "8 B"), ("head", "1 B"), ("h.3.up", "65.5 kB")]
    assert folded(rows) == [["h.*.up x 3", "65.5 kB"], ("h.2.up", "8 B"), ("head", "1 B")]
    assert folded([("0.1.w", 2), ("3.0.w", 2)]) == [["*.*.w x 2", "2"]]
    calls = [("sum_1", "dot_2 (h.0.fc_1) wants x"), ("sum", "dot (h.1.fc_1) wants x"), ("sum_3", "dot_2 (h.0.fc_2)")]
    assert folded(calls, alike=over_calls) == [["sum_1 x 2", "dot_2 (h.*.fc_1) wants x"], calls[2]]


def test_a_dump_of_equal_layers_has_a_row_for_all_of_them() -> None:
    model, args, kwargs, annotations = gpt.gpt()
    program = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs)
    text = program.dump(only="parameters,collectives")
    assert "blocks.*.mlp.up.weight x 2  " in text and "(blocks.*.attn.proj)" in text and "blocks.0." not in text


def test_bytes_are_printed_in_powers_of_a_thousand() -> None:
    assert list(map(bytes_text, (0, 999, 2_000_000, 1.5e9, 3e12))) == ["0 B", "999 B", "2.0 MB", "1.5 GB", "3.0 TB"]
