"""Stages are balanced as requested, follow the data, and are cut where little crosses."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from gpt import GPT, Config
from torch import Tensor, fx, nn

import shardc
from shardc import ShardingError
from shardc.capture.capture import capture
from shardc.costs.count import flops_of
from shardc.costs.stages.choose import ChosenStages, SplitOptions, choose_stages
from shardc.costs.stages.units import flow_of, forward_calls, units_of
from shardc.program.program import Program

pytestmark = pytest.mark.xdist_group("choose_stages")  # who shares what is made once
GPT2_SMALL = Config(vocab=50257, context=1024, layers=12, heads=12, width=768, tied=True, dropout=0.1)


def program_of(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    return capture(model, args, kwargs).program


@cache
def gpt(config: Config) -> Program:
    with torch.device("meta"):
        ids = torch.zeros(1, config.context, dtype=torch.int64)
        return program_of(GPT(config), ids, ids)


def modules(stages: ChosenStages) -> list[tuple[str, str]]:
    units = stages.loads.units
    return [(units[min(its)].first, units[max(its)].last) for its in map(stages.units, range(len(stages.masks)))]


def totals(stages: ChosenStages, balance: str) -> list[int]:
    return [stages.loads.weight(balance, mask) for mask in stages.masks]


def unevenness(parts: list[int]) -> float:
    return round(max(parts) * len(parts) / sum(parts), 2)


def check_monotone(assignment: Mapping[fx.Node, int], program: Program, num_stages: int) -> None:
    assert set(assignment) == set(forward_calls(program))
    assert set(assignment.values()) == set(range(num_stages))
    for node, stage in assignment.items():
        assert all(assignment.get(operand, 0) <= stage for operand in node.all_input_nodes), node


@pytest.mark.slow
def test_gpt2_small_in_four_by_parameters_and_by_operations() -> None:
    program = gpt(GPT2_SMALL)
    by_params, by_flops = choose_stages(program, SplitOptions(4)), choose_stages(program, SplitOptions(4, "flops"))
    parameters, flops = totals(by_params, "params"), totals(by_params, "flops")
    assert sum(parameters) == 124_439_808 and sum(flops) == flops_of(program)
    assert (unevenness(parameters), unevenness(flops)) == (1.27, 2.04)
    assert unevenness(totals(by_flops, "flops")) <= 1.09
    assert modules(by_params)[1:3] == [("blocks.0", "blocks.3"), ("blocks.4", "blocks.7")]
    for stages in (by_params, by_flops):
        check_monotone(stages.assignment, program, 4)


@pytest.mark.parametrize("balance", ["params", "flops", "time", "memory"])
def test_stages_follow_the_data_whatever_is_balanced(balance: str) -> None:
    program = gpt(Config(layers=3, dropout=0.1))
    for num_stages in (1, 2, 3, 5):
        check_monotone(choose_stages(program, SplitOptions(num_stages, balance)).assignment, program, num_stages)


def test_a_unit_begins_where_the_residual_stream_alone_crosses() -> None:
    program = gpt(Config(layers=2))
    units = units_of(flow_of(program), 4)
    stream = 32 * 64 * 4
    assert [unit.first for unit in units[1:5]] == ["blocks.0", "blocks.0.norm2", "blocks.1", "blocks.1.norm2"]
    assert {flow_of(program).crossing[unit.start] for unit in units[1:]} == {stream}


def test_a_new_stage_begins_where_the_user_says() -> None:
    program = gpt(Config(layers=4))
    stages = choose_stages(program, SplitOptions(3, cuts=("blocks.1", "blocks.2")))
    assert [first for first, _ in modules(stages)][1:] == ["blocks.1", "blocks.2"]
    nested = choose_stages(program, SplitOptions(2, cuts=("blocks.3.mlp",)))
    assert [first for first, _ in modules(nested)][1:] == ["blocks.3.mlp"]
    check_monotone(nested.assignment, program, 2)
    more = choose_stages(program, SplitOptions(3, cuts=("blocks.3",)))
    assert len(more.masks) == 3 and "blocks.3" in [first for first, _ in modules(more)]


def test_impossible_stages_are_refused() -> None:
    program = gpt(Config(layers=2))
    with pytest.raises(ShardingError, match=r"did you mean blocks.1"):
        choose_stages(program, SplitOptions(2, cuts=("block.1",)))
    with pytest.raises(ShardingError, match=r"in blocks.0.norm1, blocks.1.norm1, head.*\n.*2 stages for these 4 begin"):
        choose_stages(program, SplitOptions(2, cuts=("blocks.*", "head")))
    with pytest.raises(ShardingError, match=r"did you mean params"):
        choose_stages(program, SplitOptions(2, "parms"))
    with pytest.raises(ShardingError, match="every stage computes something"):
        choose_stages(program, SplitOptions(1000))


class Masked(nn.Module):
    """A mask that two layers read, a skip over both, and a counter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        self.calls += 1
        mask = ~keep
        a = self.a(x)
        b = self.b(a.masked_fill(mask, 0.0))
        return (self.c(b.masked_fill(mask, 0.0)) + a).sum()


def test_values_computed_from_inputs_alone_go_to_their_first_reader() -> None:
    program = program_of(Masked(), torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bool))
    assignment = choose_stages(program, SplitOptions(3)).assignment
    check_monotone(assignment, program, 3)
    named = {node.name: stage for node, stage in assignment.items()}
    assert named["bitwise_not"] == min(named["masked_fill"], named["masked_fill_1"]) < 2
    assert {"bitwise_not", "t"} <= {node.name for node in flow_of(program).cheap}


class Bare(nn.Module):
    """No parameters at all."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x).relu().sum()


def test_a_model_of_few_units_is_cut_between_its_ops() -> None:
    program = program_of(Bare(), torch.ones(4, 4, requires_grad=True))
    check_monotone(choose_stages(program, SplitOptions(3, "flops")).assignment, program, 3)


class Towers(nn.Module):
    """Two towers of unlike width, one after the other in the text of the model, and what joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.right = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.join = nn.Linear(28, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.left:
            x = layer(x).relu()
        for layer in self.right:
            y = layer(y).relu()
        return self.join(torch.cat([x, y], -1)).sum()


def test_two_towers_are_cut_across_each_other() -> None:
    program = program_of(Towers(), torch.ones(2, 16), torch.ones(2, 12))
    stages = choose_stages(program, SplitOptions(2))
    check_monotone(stages.assignment, program, 2)
    names = [{stages.loads.units[i].first.split(".")[0] for i in stages.units(stage)} for stage in (0, 1)]
    assert names == [{"left", "right"}, {"left", "right", "join"}]
    assert max(totals(stages, "params")) < 5 * (16 * 16 + 16)  # what the cut between the towers has


def test_with_two_stages_a_rank_a_tied_embedding_is_held_once_in_a_v_and_twice_looped() -> None:
    program = gpt(Config(layers=6, tied=True, vocab=1024))

    def heaviest(place: tuple[int, ...]) -> int:
        stages = choose_stages(program, SplitOptions(4, place=place))
        check_monotone(stages.assignment, program, 4)
        ranks = [sum(m for m, home in zip(stages.masks, place, strict=True) if home == rank) for rank in (0, 1)]
        held = [stages.loads.parameters_of(mask) for mask in ranks]
        return max(sum(map(stages.loads.elements, names)) for names in held)

    total = sum(put.type.nbytes // 4 for put in program.inputs if put.kind == "parameter")
    assert heaviest((0, 1, 1, 0)) <= 1.05 * total / 2 < heaviest((0, 1, 0, 1))


def test_stages_fit_into_the_memory_that_there_is_or_the_error_says_how_much_is_missing() -> None:
    program = gpt(Config(layers=6, tied=True, vocab=1024))
    free = choose_stages(program, SplitOptions(4, "flops", microbatches=8))
    most = [free.loads.memory(mask, 4 - stage) for stage, mask in enumerate(free.masks)]
    by_memory = choose_stages(program, SplitOptions(4, "memory", microbatches=8))
    least = max(by_memory.loads.memory(mask, 4 - stage) for stage, mask in enumerate(by_memory.masks))
    assert least < max(most)
    fitted = choose_stages(program, SplitOptions(4, "flops", microbatches=8, max_memory=least))
    assert max(fitted.loads.memory(mask, 4 - stage) for stage, mask in enumerate(fitted.masks)) <= least
    with pytest.raises(ShardingError, match=f"the fullest rank holds {least} bytes, 1 more"):
        choose_stages(program, SplitOptions(4, "flops", microbatches=8, max_memory=least - 1))
    with pytest.raises(ShardingError, match="more"):
        choose_stages(program, SplitOptions(4, "flops", place=(0, 1, 1, 0), max_memory=1000))


class Marked(nn.Module):
    """Says itself where stages begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i in (1, 5):
                shardc.stage_boundary()
            x = layer(x).relu()
        return x.sum()


def test_a_new_stage_begins_where_the_model_says() -> None:
    model, x = Marked(), torch.ones(2, 8)
    assert torch.equal(model(x), model(x))  # outside shardc it says nothing
    program = program_of(model, x)
    stages = choose_stages(program, SplitOptions(3))
    assert [first for first, _ in modules(stages)] == ["layers.0", "layers.1", "layers.5"]
    check_monotone(stages.assignment, program, 3)
    four = choose_stages(program, SplitOptions(4))
    assert [first for first, _ in modules(four)] == ["layers.0", "layers.1", "layers.3", "layers.5"]
    with pytest.raises(ShardingError, match="2 stages for these 3 beginnings"):
        choose_stages(program, SplitOptions(2))


class Bottleneck(nn.Module):
    """Two narrow layers beside a wide skip: less crosses before and after it than within."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid, self.up = nn.Linear(16, 4), nn.Linear(4, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.mid(self.down(x).relu()).relu())


def test_a_nested_list_of_blocks_is_cut_between_these_and_not_beside_their_skips() -> None:
    stages = (nn.Sequential(Bottleneck(), Bottleneck()) for _ in range(2))
    program = program_of(nn.Sequential(nn.Linear(16, 16), *stages), torch.ones(2, 16))
    assert [unit.first for unit in units_of(flow_of(program), 2)] == ["0", "1", "1.1", "2", "2.1"]
    assert [unit.first for unit in units_of(flow_of(program), 2, is_fine=False)] == ["0", "1", "2"]


@pytest.mark.sweep
def test_encoder_and_decoder_of_t5_are_cut_where_little_crosses() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=3, d_model=64, d_ff=256, d_kv=16, num_heads=4, vocab_size=512, decoder_start_token_id=0
    )
    config.use_cache = False
    with torch.device("meta"):
        ids = torch.zeros(2, 16, dtype=torch.int64)
        program = program_of(T5ForConditionalGeneration(config), input_ids=ids, labels=ids)
    stages = choose_stages(program, SplitOptions(4, "flops"))
    check_monotone(stages.assignment, program, 4)
    sent = [stages.loads.received(mask) for mask in stages.masks]
    assert sent[0] == () and all(len(values) <= 4 for values in sent)
    assert {c.name for c in sent[2]} & {c.name for c in sent[3]}  # what the encoder made goes to both, to each once
    assert stages.bound <= stages.heaviest <= stages.bound / 0.98
