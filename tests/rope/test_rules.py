"""RoPE rules against vectors of Transformers' own functions, and their properties."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellama.errors import InvalidFileError, UnsupportedError, UsageError
from edgellama.rope import Layout, Rope, coordinates, rotate, rules
from edgellama.rope.config import from_config
from edgellama.rope.gguf import Factors, from_gguf

_CASES = json.loads((Path(__file__).parents[1] / "data" / "rope" / "transformers.json").read_text())["cases"]
_LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def _name(case: dict[str, Any]) -> str:
    return f"{case['config']['rope_parameters']['rope_type']}-{case['sequence_tokens']}"


@pytest.mark.parametrize("case", _CASES, ids=_name)
def test_agrees_with_transformers(case: dict[str, Any]) -> None:
    """Transformers computes in float32: two roundings of 6e-8 and the power's own error."""
    rope = from_config(case["config"], sequence_tokens=case["sequence_tokens"])
    assert rope.frequencies.dtype == np.float64
    np.testing.assert_allclose(rope.frequencies, case["frequencies"], rtol=2e-6, atol=1e-12)
    assert rope.attention_factor == pytest.approx(case["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("case", _CASES, ids=_name)
def test_the_older_spelling_means_the_same(case: dict[str, Any]) -> None:
    config = copy.deepcopy(case["config"])
    parameters = config.pop("rope_parameters")
    parameters["type"] = parameters.pop("rope_type")
    config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = parameters
    old, new = (from_config(c, sequence_tokens=case["sequence_tokens"]) for c in (config, case["config"]))
    np.testing.assert_array_equal(old.frequencies, new.frequencies)
    assert old.attention_factor == new.attention_factor


def test_without_parameters_the_default_rule_holds() -> None:
    rope = from_config({"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 5000.0})
    assert rope.rule == "default"
    np.testing.assert_allclose(rope.frequencies, [5000.0 ** (-2 * i / 32) for i in range(16)])


def test_parameters_per_layer_type() -> None:
    config = {
        "head_dim": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    np.testing.assert_allclose(from_config(config).frequencies, rules.linear(64, 1e6, 8))
    window = from_config(config, layer_type="sliding_attention")
    np.testing.assert_allclose(window.frequencies, rules.default(64, 1e4))
    with pytest.raises(InvalidFileError):
        from_config(config, layer_type="chunked_attention")


def test_gemma3s_local_base() -> None:
    config = {"head_dim": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert from_config(config, layer_type="sliding_attention").frequencies[1] == pytest.approx(1e4 ** (-2 / 64))
    assert from_config(config, layer_type="full_attention").frequencies[1] == pytest.approx(1e6 ** (-2 / 64))


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"rope_type": "spiral"}, UnsupportedError),
        ({"rope_type": "linear"}, InvalidFileError),
        ({"rope_type": "linear", "factor": "four"}, InvalidFileError),
        ({"rope_type": "linear", "factor": 0.0}, UsageError),
        ({"rope_type": "linear", "factor": math.nan}, UsageError),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 5}, UsageError),
        ({"rope_type": "longrope", "factor": 4.0}, InvalidFileError),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, UsageError),
        ([1, 2], InvalidFileError),
    ],
)
def test_senseless_parameters_are_refused(parameters: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        from_config({"head_dim": 64, "max_position_embeddings": 2048, "rope_parameters": parameters})


def test_a_config_without_a_head_size_is_refused() -> None:
    with pytest.raises(InvalidFileError):
        from_config({"hidden_size": 64})


def test_ntk_interpolates_the_slowest_pair_and_keeps_the_fastest() -> None:
    plain, scaled = rules.default(64, 1e4), rules.ntk(64, 1e4, 4)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    plain, scaled = rules.default(128, 1e4), rules.yarn(128, 1e4, 16, 4096)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 16)
    assert (np.diff(scaled / plain) <= 1e-15).all()


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_rotation_keeps_lengths_and_depends_on_distance_only(layout: Layout) -> None:
    draw = np.random.default_rng(0)
    rope = Rope("default", rules.default(32, 1e4))
    q, k = draw.standard_normal((1, 1, 48)), draw.standard_normal((1, 1, 48))
    products = []
    for positions in ((5, 3), (105, 103), (7005, 7003)):
        turned = [q.copy(), k.copy()]
        for values, position in zip(turned, positions, strict=True):
            rotate(values, *rope.cos_sin(np.array([position])), layout)
        assert np.linalg.norm(turned[0]) == pytest.approx(np.linalg.norm(q))
        np.testing.assert_array_equal(turned[0][..., 32:], q[..., 32:])
        products.append(float((turned[0] * turned[1]).sum()))
    assert products[1:] == pytest.approx([products[0]] * 2, rel=1e-9)


def test_layouts_are_permutations_of_each_other() -> None:
    rope = Rope("default", rules.default(16, 1e4))
    x = np.random.default_rng(1).standard_normal((3, 2, 16))
    order = np.arange(16).reshape(2, 8).T.ravel()  # half layout's pairs, side by side
    half, interleaved = x.copy(), x[..., order].copy()
    turns = rope.cos_sin(np.arange(3))
    rotate(half, *turns, "half")
    rotate(interleaved, *turns, "interleaved")
    np.testing.assert_allclose(half[..., order], interleaved)


def test_mrope_sections() -> None:
    blocks = Rope("default", rules.default(32, 1e4), sections=(4, 6, 6))
    assert coordinates(blocks).tolist() == [0] * 4 + [1] * 6 + [2] * 6
    mixed = Rope("default", rules.default(32, 1e4), sections=(6, 5, 5), sections_interleaved=True)
    assert coordinates(mixed).tolist() == [0, 1, 2] * 5 + [0]
    positions = np.array([[1, 2], [30, 40], [500, 600]])
    angles = blocks.angles(positions)
    assert angles.shape == (2, 16)
    assert angles[1, 5] == pytest.approx(40 * blocks.frequencies[5])
    text = np.array([7, 8])
    np.testing.assert_allclose(blocks.angles(np.stack([text] * 3)), blocks.angles(text))
    with pytest.raises(UsageError):
        Rope("default", rules.default(32, 1e4)).angles(positions)


def _gguf(keys: dict[str, Any], *, factors: Factors | None = None, context_tokens: int = 4096) -> Rope:
    return from_gguf(keys.get, 64, "half", context_tokens, factors=factors)


def test_gguf_keys_mean_what_the_configuration_meant() -> None:
    config = {"head_dim": 64, "max_position_embeddings": 4096}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
        "context_length": 4096,
    }
    ours, theirs = _gguf(keys), from_config(config | {"rope_parameters": yarn})
    np.testing.assert_allclose(ours.frequencies, theirs.frequencies)
    assert ours.attention_factor == pytest.approx(theirs.attention_factor)
    linear = _gguf({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    np.testing.assert_allclose(linear.frequencies, rules.linear(64, 1e4, 4))
    assert _gguf({"rope.scale_linear": 4.0}).frequencies[3] == linear.frequencies[3]
    none = _gguf({"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    np.testing.assert_allclose(none.frequencies, rules.default(64, 1e4))
    with pytest.raises(UnsupportedError):
        _gguf({"rope.scaling.type": "spiral"})


def test_gguf_factor_tensors() -> None:
    short, long = (np.linspace(1, top, 32).astype(np.float32) for top in (2, 20))
    factors = Factors(short=short, long=long)
    keys = {"context_length": 65536, "rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.19}
    inside, beyond = (_gguf(keys, factors=factors, context_tokens=n) for n in (4096, 4097))
    np.testing.assert_allclose(inside.frequencies, rules.default(64, 1e4) / short)
    np.testing.assert_allclose(beyond.frequencies, rules.default(64, 1e4) / long)
    assert beyond.attention_factor == pytest.approx(1.19)
    always = _gguf(keys, factors=Factors(freqs=short, long=long), context_tokens=9999)
    np.testing.assert_allclose(always.frequencies, inside.frequencies)


def test_llama3_factors_are_what_files_carry() -> None:
    plain = rules.default(128, 5e5)
    divisors = rules.llama3_factors(plain, 8, 1, 4, 8192)
    assert divisors.min() == 1
    assert divisors.max() == 8
    np.testing.assert_allclose(plain / divisors, rules.llama3(128, 5e5, 8, 1, 4, 8192))


@pytest.mark.parametrize("dimensions", [0, 1, 63])
def test_odd_sizes_are_refused(dimensions: int) -> None:
    with pytest.raises(UsageError):
        rules.default(dimensions, 1e4)
