"""Runtimes: run a localized program on virtual ranks or on torch.distributed."""
