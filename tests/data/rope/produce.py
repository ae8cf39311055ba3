"""Writes transformers.json: frequencies of Transformers' own RoPE functions, for tests/rope.

python produce.py        # needs transformers and torch; made with 5.24.0 and 2.13.0
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BASE = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 4096}
DRAW = torch.Generator().manual_seed(0)
FACTORS = {
    name: (1 + torch.rand(48, generator=DRAW, dtype=torch.float64) * top).tolist()
    for name, top in (("short_factor", 0.5), ("long_factor", 40.0))
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **FACTORS}
LONGER = {"max_position_embeddings": 131072}
ORIGINAL = {"original_max_position_embeddings": 4096}
CASES: list[tuple[dict, dict, int]] = [
    ({}, {"rope_type": "linear", "factor": 4.0}, 0),
    ({}, {"rope_type": "dynamic", "factor": 2.0}, 0),
    ({}, {"rope_type": "dynamic", "factor": 2.0}, 16000),
    ({}, YARN | {"original_max_position_embeddings": 1024}, 0),
    ({"rope_theta": 1e6}, YARN | {"factor": 8.0, "beta_fast": 16, "beta_slow": 2}, 0),
    ({}, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 0),
    ({}, YARN | {"attention_factor": 1.25, "truncate": False}, 0),
    ({"rope_theta": 500000.0} | LONGER, LLAMA3, 0),
    (LONGER, LONG | ORIGINAL, 0),
    (LONGER, LONG | ORIGINAL, 5000),
    ({}, LONG | {"factor": 32.0, "attention_factor": 1.5}, 0),
    ({}, {"rope_type": "proportional", "partial_rotary_factor": 0.25}, 0),
    ({"rope_theta": 1e6}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, 0),
]


def main() -> None:
    found = []
    for extra, parameters, length in CASES:
        config = LlamaConfig(**(BASE | extra), rope_parameters=dict(parameters))
        frequencies, attention = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length or None)
        found.append(
            {
                "config": BASE | extra | {"rope_parameters": parameters},
                "sequence_tokens": length,
                "frequencies": frequencies.tolist(),
                "attention_factor": float(attention),
            }
        )
    text = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": found}
    Path(__file__).with_name("transformers.json").write_text(json.dumps(text, indent=0) + "\n")


main()
