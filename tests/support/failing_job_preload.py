"""Imported once by the process that jobs are forked from: everything that a first compilation and step import."""

import gc

import torch
from failing_job import PLANS, Model

import shardc
from shardc import Mesh

for sizes, annotations, options in PLANS.values():
    args = torch.randn(8, 8), torch.randn(8, 8)
    shardc.parallelize(Model(), Mesh(**sizes), annotations, **options)(*args).backward()
gc.collect()
gc.freeze()
