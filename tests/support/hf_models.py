"""Tiny sizes of decoders of transformers, and Megatron's cuts of their MLPs."""

from __future__ import annotations

from typing import Any

from shardc import P

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
COLUMNS, ROWS = P("tp", None), P(None, "tp")
GATED = {"*.gate_proj.weight": COLUMNS, "*.up_proj.weight": COLUMNS, "*.down_proj.weight": ROWS}
