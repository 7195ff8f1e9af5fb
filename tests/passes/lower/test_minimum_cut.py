"""What is saved at a price is known from what was found before, for other prices and for ranks with like stages."""

from __future__ import annotations

import gpt
from hypothesis import given
from hypothesis import strategies as st

import shardc
from shardc import Mesh, Pipeline, Remat
from shardc.passes.lower.minimum_cut import UNIT, Call, Cuts, Form, cuts_of


@st.composite
def forms(draw: st.DrawFn) -> Form:
    calls: list[Call] = []
    count = 0
    for _ in range(draw(st.integers(1, 8))):
        operands = draw(st.sets(st.integers(0, count - 1), max_size=3)) if count else set()
        results = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
        calls.append(Call(draw(st.integers(0, 60)), draw(st.booleans()), tuple(sorted(operands)), tuple(results)))
        count += len(results)
    return Form(tuple(calls), tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))))


def cost(form: Form, saved: frozenset[int], price: float) -> float:
    """Of what is saved, and of the calls that backward repeats."""
    makers = [call for call in form.calls for _ in call.results]
    sizes = [nbytes for call in form.calls for nbytes in call.results]
    again, stack = set[int](), list(form.read)
    while stack:
        number = stack.pop()
        if number not in saved and id(makers[number]) not in again:
            again.add(id(makers[number]))
            stack += makers[number].operands
    repeated = [call for call in form.calls if id(call) in again]
    assert not any(call.is_fixed for call in repeated)
    return sum(round(UNIT * 2**price * sizes[each]) for each in saved) + sum(UNIT * call.cost for call in repeated)


@given(forms(), st.lists(st.integers(-40, 40), min_size=1, max_size=8), st.sets(st.integers(0, 3)))
def test_what_is_saved_costs_as_little_after_other_prices_as_alone(
    form: Form, prices: list[int], held: set[int]
) -> None:
    held = {each for each in held if each in form.read}
    together = Cuts(form)
    for price in (each / 8 for each in prices):
        found, alone = (cuts.saved(price, frozenset(held)) for cuts in (together, Cuts(form)))
        assert cost(form, found, price) == cost(form, alone, price)


def test_ranks_with_like_stages_share_their_cuts() -> None:
    """The two in the middle of four, which have two and three microbatches under way; the last one saves little."""
    model, args, _, _ = gpt._target(gpt.Config(layers=4, dropout=0.0, width=32, context=16), {})
    whole = shardc.compile(model, Mesh(pp=4), args=args, pipeline=Pipeline(microbatches=4, schedule="1f1b"))
    cuts_of.cache_clear()
    whole.recompile(remat=Remat(budget=whole.memory["saved"] // 4))
    ranks = cuts_of.cache_info()
    assert ranks.hits >= 1 and ranks.misses <= 3
