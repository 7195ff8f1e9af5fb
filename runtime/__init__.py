"""Runtimes: a localized program run on virtual ranks or on torch.distributed."""
