"""Random models whose tensors agree with their random keys: they pass every check of shapes."""

from __future__ import annotations

import random
from pathlib import Path

from edgellama import gguf_io
from edgellama.gguf_io import specimen
from edgellama.gguf_io.hyperparameters import KEY_RULES
from edgellama.gguf_io.types import GGMLType, ValueType
from edgellama.gguf_io.writer import Typed
from fuzzing.mutants import FLOATS

COUNTS = (0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 512, 513, 4096, 2**31 - 1, 2**31, 2**32 - 1)
FLAGS = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix")
IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pad", "prefix")
MORE_KEYS = {
    "rope.dimension_sections": "array",
    "attention.sliding_window_pattern": "count",
    "attention.temperature_scale": "float",
    "attention.temperature_length": "count",
    "rope.scaling.type": "scaling",
    "classifier.output_labels": "labels",
    "deepstack_mapping": "array",
    "interleave_moe_layer_step": "count",
    "dense_2_feat_out": "count",
}
TOKENIZERS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "none", "no_vocab", "gemma4", "test", "whitespace")


def generate(path: Path, draw: random.Random) -> str:
    """A specimen whose keys were chosen at random, with tensors that agree with them; returns what was changed."""
    architecture = draw.choice(sorted(gguf_io.ARCHITECTURES))
    layers = draw.choice((1, 2, 2, 3))
    keys: dict[str, object] = {}
    if draw.random() < 0.3 and "bert" not in architecture:
        keys |= specimen.vocabulary("gpt2") | {"tokenizer.ggml.scores": None}
    for _ in range(draw.choice((1, 1, 2, 3))):
        keys |= change(architecture, layers, draw)
    width = draw.choice((32, 64, 64, 96, 256))
    kind = draw.choice((GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.MXFP4, GGMLType.IQ4_NL))
    optional = draw.random() < 0.4
    specimen.build(path, architecture, keys=keys, tensor_type=kind, optional=optional, layers=layers, width=width)
    shown = {key: value for key, value in keys.items() if not isinstance(value, list) and "token_type" not in key}
    return f"{architecture} x{layers} {kind.name} width {width} optional {optional} {shown}"


def change(architecture: str, layers: int, draw: random.Random) -> dict[str, object]:
    choice = draw.random()
    if choice < 0.1:
        return {draw.choice(FLAGS): draw.random() < 0.5}
    if choice < 0.2:
        return {f"tokenizer.ggml.{draw.choice(IDS)}_token_id": draw.choice((None, 0, 1, 5, 257, 300, 2**32 - 1))}
    if choice < 0.3:
        return tokenizer_change(draw)
    name = draw.choice([name for name in (*KEY_RULES, *MORE_KEYS) if name != "block_count"])
    rule = KEY_RULES.get(name)
    kind = MORE_KEYS.get(name) or ("float" if rule and rule.types[0] == ValueType.FLOAT32 else "count")
    if rule and rule.types[0] == ValueType.BOOL:
        kind = "flag"
    value: object = draw.choice(COUNTS)
    if kind == "float":
        value = draw.choice(FLOATS)
    elif kind == "flag":
        value = draw.random() < 0.5
    elif kind == "scaling":
        value = draw.choice(("none", "linear", "yarn", "longrope", "su", ""))
    elif kind == "labels":
        value = [f"label {i}" for i in range(draw.choice((1, 2, 5)))]
    elif kind == "array" or draw.random() < 0.15:
        length = layers if kind == "count" else draw.choice((1, 3, 4, 4, 4, 5, layers))
        items = [draw.choice(COUNTS[:16]) for _ in range(length)]
        value = Typed(items, ValueType.ARRAY, draw.choice((ValueType.UINT32, ValueType.INT32)))
    elif draw.random() < 0.1:
        value = None
    return {f"{architecture}.{name}": value}


def tokenizer_change(draw: random.Random) -> dict[str, object]:
    keys: dict[str, object] = dict(specimen.vocabulary(draw.choice(("llama", "gpt2", "bert"))))
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    choice = draw.random()
    if choice < 0.4:
        keys["tokenizer.ggml.model"] = draw.choice(TOKENIZERS)
    elif choice < 0.7:
        types = [draw.choice((0, 1, 1, 1, 2, 3, 4, 5, 6, 7, -1)) for _ in tokens]
        keys["tokenizer.ggml.token_type"] = Typed(types, ValueType.ARRAY, ValueType.INT32)
    else:
        for _ in range(draw.choice((1, 3, 50))):
            tokens[draw.randrange(len(tokens))] = draw.choice(("", "\0", "\n", "ÿ", "x" * 300, "<0x41>", "</s>", "▁▁"))
    if draw.random() < 0.3:
        keys["tokenizer.ggml.pre"] = draw.choice(("llama-bpe", "qwen2", "tekken", "default", "nonsense", ""))
    if draw.random() < 0.2:
        keys["tokenizer.ggml.merges"] = draw.choice((["a"], ["a b", "a b"], [""], [" "], ["  "], ["a  b c"]))
    return keys
