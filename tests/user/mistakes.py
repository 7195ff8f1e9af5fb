"""Task 10: ten mistakes of a first day, each with the code that a user typed and words that the error must contain."""

import torch
from gpt import GPT, Config

import shardc
from shardc import Mesh, P, Pipeline, Remat, Zero

CONFIG = Config(vocab=64, context=16, layers=1, heads=2, width=32)
DATA = {"ids": P("dp"), "targets": P("dp")}
IDS = torch.randint(64, (8, 16))
CALL = (IDS, IDS)


def run(mesh, annotations, args=CALL, kwargs=None, **options):
    torch.manual_seed(0)
    return shardc.parallelize(GPT(CONFIG), mesh, annotations, args=args, kwargs=kwargs, **options)


# The typed code, the words that name the argument, and words of the remedy.
MISTAKES = {
    "a name with a slip": (lambda: run(Mesh(dp=2), {"idz": P("dp")}), "annotation 'idz'", "did you mean ids"),
    "an axis that the mesh lacks": (lambda: run(Mesh(dp=2), DATA | {"*.down.weight": P(None, "tp")}), "'tp'", "dp"),
    "more entries than dims": (lambda: run(Mesh(dp=2), {"*.norm1.weight": P(None, "dp")}), "*.norm1.weight", "1"),
    "one axis twice": (lambda: run(Mesh(dp=2), {"*.down.weight": P("dp", "dp")}), "'dp'", "once"),
    "a text in place of P": (lambda: run(Mesh(dp=2), {"ids": "dp"}), "ids", "P("),
    "ZeRO over an axis that is not there": (lambda: run(Mesh(tp=2), {}, zero=Zero("dp", 3)), "Zero('dp')", "tp"),
    "a number in place of Zero": (lambda: run(Mesh(dp=2), DATA, zero=3), "zero", "Zero("),
    "a schedule with a slip": (lambda: Pipeline("pp", schedule="1f1"), "schedule='1f1'", "did you mean 1f1b"),
    "a glob of no module": (lambda: run(Mesh(dp=2), DATA, remat=Remat("layers.*")), "layers.*", "blocks"),
    "an argument that forward lacks": (lambda: run(Mesh(dp=2), DATA, (IDS,), {"labels": IDS}), "labels", "targets"),
}


if __name__ == "__main__":
    for what, (typed, *_) in MISTAKES.items():
        try:
            typed()
        except shardc.ShardingError as error:
            print(f"{what}:\n{error}\n")
