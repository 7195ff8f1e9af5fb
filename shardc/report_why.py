"""Why everything in a program is as it is, in the form in which the HTML report holds it: what ``explain`` answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardc.alternative import Alternative
from shardc.explain import Explainer
from shardc.explanation import Chain, Explanation, Step
from shardc.explanation_text import reason_text
from shardc.program import Program
from shardc.why_needed import why_needed

Choices = Mapping[str, Sequence[Alternative]]


def why_record(program: Program, choices: Choices) -> dict[str, Any]:
    """``why``: of each value its chains, each the axis and the place of its last step in ``steps``.

    A step is ``[annotation, value, role, via, call, before]``: a place in ``annotations``, what ``Step`` has, and the
    place of the step before it, -1 on the annotated value. ``because``: of each collective its parts, see ``_part``,
    ``seconds`` as they are estimated, ``choices`` as ``Alternative`` has them, ``notes`` as ``Explanation`` has them,
    and ``needed``, what it is there for in any plan like this one.
    """
    table, explainer = _Steps(), Explainer(program)
    nodes = [node for node in program.graph.nodes if node.op != "output" and any(program.origins(node))]
    why = {node.name: table.chains(tuple(explainer.chains.of(node))) for node in nodes}
    because = {}
    for name in explainer.collectives:
        found = explainer.explain(f"value:{name}")
        because[name] = {
            "seconds": found.sent and float(f"{found.sent.seconds:.3g}"),
            "parts": [_part(part, table) for part in found.parts or (found,)],
            "choices": list(map(asdict, choices.get(name, ()))),
            "notes": list(found.notes),
            "needed": _needed(program, explainer, name),
        }
    return {"annotations": list(table.annotations), "steps": list(table.rows), "why": why, "because": because}


def _needed(program: Program, explainer: Explainer, name: str) -> str:
    """Of a lowered program, whose types are global; a message between stages is needed for what its notes say."""
    node = explainer.node_of(name)
    return why_needed(program, node) if node is not None and program.level == "lowered" else ""


def _part(found: Explanation, table: _Steps) -> dict[str, Any]:
    """What is sent for one value: what it ``has``, who ``wants`` it how, sentences why, and the ``chains``."""
    return {
        "has": found.has and asdict(found.has),
        "wants": found.wants and asdict(found.wants),
        "reasons": [reason_text(reason, found.wants) for reason in found.reasons],
        "chains": table.chains(found.chains),
    }


class _Steps:
    """Steps, each once for what came before it: values share those that they come from."""

    def __init__(self) -> None:
        self.annotations: dict[str, int] = {}
        self.rows: dict[tuple[int, str, str, str, str, int], int] = {}

    def chains(self, found: Sequence[Chain]) -> list[list[Any]]:
        """The chains as the page has them."""
        return [[chain.axis, self._last(chain)] for chain in found]

    def _last(self, chain: Chain) -> int:
        before = -1
        for step in chain.steps:
            before = self.rows.setdefault((*self._row(chain, step), before), len(self.rows))
        return before

    def _row(self, chain: Chain, step: Step) -> tuple[int, str, str, str, str]:
        annotation = self.annotations.setdefault(chain.end, len(self.annotations))
        return annotation, step.value, step.role, step.via, step.call
