"""The process that jobs are forked from imports this file: all modules that a first compilation and step import."""

import gc

import torch
from failing_job import PLANS, Model

import shardc
from shardc import Mesh

# Autograd starts a thread for each device at the first backward, and processes that are forked later have no autograd.
# A capture with a CUDA build pretends that there are devices, so the first backward runs before it.
torch.zeros((), requires_grad=True).backward()

for sizes, annotations, options in PLANS.values():
    args = torch.randn(8, 8), torch.randn(8, 8)
    shardc.parallelize(Model(), Mesh(**sizes), annotations, **options)(*args).backward()
gc.collect()
gc.freeze()
