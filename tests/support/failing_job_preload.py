"""Imported once by the process that jobs are forked from: everything that a first compilation and step import."""

import gc

import torch
from failing_job import PLANS, Model

import shardc
from shardc import Mesh

# Autograd makes a thread for each device at the first backward, and forked processes then have no autograd. A capture
# with a CUDA build pretends that there are devices, so the first backward comes before it.
torch.zeros((), requires_grad=True).backward()

for sizes, annotations, options in PLANS.values():
    args = torch.randn(8, 8), torch.randn(8, 8)
    shardc.parallelize(Model(), Mesh(**sizes), annotations, **options)(*args).backward()
gc.collect()
gc.freeze()
