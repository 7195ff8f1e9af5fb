"""Runtimes: a localized program turned into numbers, on virtual ranks or on torch.distributed."""
