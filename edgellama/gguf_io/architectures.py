"""What each known architecture must contain: required keys, tensors with their shapes, rules between its numbers.

Shapes follow the loaders of llama.cpp (`src/models/*.cpp`). A table is text, so that it costs nothing until used:
`name:dim,dim` is a required tensor, `name?:dim` an optional one, `when/name:…` one that exists under a condition.
`QKV` stands for the attention projections, fused or separate.
"""

from __future__ import annotations

from typing import NamedTuple

_RMS = "attention.layer_norm_rms_epsilon"
_NORM = "attention.layer_norm_epsilon"

_TIED = "token_embd.weight:embd,vocab output_norm.weight:embd output.weight?:embd,vocab"
_UNTIED = "token_embd.weight:embd,vocab output_norm.weight:embd output.weight:embd,vocab"
_SHARED = "token_embd.weight:embd,vocab output_norm.weight:embd"
_FACTORS = "longrope/rope_factors_long.weight?:rot_half longrope/rope_factors_short.weight?:rot_half"
_ROPE = f"plainrope/rope_freqs.weight?:rot_half {_FACTORS}"

_ATTENTION = "attn_norm.weight:embd QKV attn_output.weight:q,embd"
_GATED = "ffn_gate.weight:embd,ff ffn_up.weight:embd,ff ffn_down.weight:ff,embd"
_NORMED_GATED = f"ffn_norm.weight:embd {_GATED}"
_HEAD_NORMS = "attn_q_norm.weight:head attn_k_norm.weight:head"
_POST_NORMS = "post_attention_norm.weight:embd post_ffw_norm.weight:embd"
_EXPERTS = (
    "ffn_gate_inp.weight:embd,experts ffn_gate_exps.weight:embd,ff_exp,experts "
    "ffn_up_exps.weight:embd,ff_exp,experts ffn_down_exps.weight:ff_exp,embd,experts"
)
_SHARED_EXPERTS = (
    "ffn_gate_shexp.weight:embd,ff_shexp ffn_up_shexp.weight:embd,ff_shexp ffn_down_shexp.weight:ff_shexp,embd"
)

_LLAMA_LAYER = (
    f"{_ATTENTION} attn_output.bias?:embd ffn_norm.weight:embd "
    "dense/ffn_gate.weight:embd,ff dense/ffn_up.weight:embd,ff dense/ffn_down.weight:ff,embd "
    "dense/ffn_gate.bias?:ff dense/ffn_up.bias?:ff dense/ffn_down.bias?:embd "
    "moe/ffn_gate_inp.weight:embd,experts moe/ffn_gate_exps.weight?:embd,ff,experts "
    "moe/ffn_up_exps.weight:embd,ff,experts moe/ffn_down_exps.weight:ff,embd,experts"
)
_GRANITE_SHARED = " ".join(f"shexp/{entry}" for entry in _SHARED_EXPERTS.split())
_BERT = (
    "QKV attn_output.weight:embd,embd attn_output.bias?:embd attn_output_norm.weight:embd attn_output_norm.bias:embd "
    "ffn_up.weight:embd,ff ffn_up.bias?:ff ffn_down.weight:ff,embd ffn_down.bias?:embd "
    "layer_output_norm.weight:embd layer_output_norm.bias:embd"
)
_BIASED = (
    "attn_norm.weight:embd attn_norm.bias:embd attn_output.weight:embd,embd attn_output.bias:embd "
    "ffn_up.weight:embd,ff ffn_up.bias:ff ffn_down.weight:ff,embd ffn_down.bias:embd"
)
_DEEPSEEK2 = (
    "attn_norm.weight:embd qlora/attn_q_a_norm.weight:q_lora qlora/attn_q_a.weight:embd,q_lora "
    "qlora/attn_q_b.weight:q_lora,mla_q noqlora/attn_q.weight:embd,mla_q attn_kv_a_norm.weight:kv_lora "
    "attn_kv_a_mqa.weight:embd,mla_kv_a mla/attn_k_b.weight:mla_nope,kv_lora,heads "
    "mla/attn_v_b.weight:kv_lora,mla_v,heads nomla/attn_kv_b.weight:kv_lora,mla_kv_b "
    "attn_output.weight:mla_out,embd ffn_norm.weight:embd "
    "dense/ffn_gate.weight:embd,ff dense/ffn_up.weight:embd,ff dense/ffn_down.weight:ff,embd "
    "moe/ffn_gate_inp.weight:embd,experts moe/exp_probs_b.bias?:experts moe/EXPS "
    "moe/ffn_down_exps.weight:ff_exp,embd,experts moe/ffn_gate_shexp.weight:embd,ff_shared "
    "moe/ffn_up_shexp.weight:embd,ff_shared moe/ffn_down_shexp.weight:ff_shared,embd"
)
_GPT_OSS = (
    "attn_norm.weight:embd post_attention_norm.weight:embd QKV attn_output.weight:q,embd attn_output.bias:embd "
    f"attn_sinks.weight:heads {_EXPERTS} ffn_gate_inp.bias:experts ffn_gate_exps.bias:ff_exp,experts "
    "ffn_up_exps.bias:ff_exp,experts ffn_down_exps.bias:embd,experts"
)
_GEMMA3N_GLOBAL = (
    "altup_proj.weight:embd,embd,altup_less altup_unembd_proj.weight:embd,embd,altup_less "
    "per_layer_token_embd.weight:altup_layers,vocab per_layer_model_proj.weight:embd,altup_layers "
    "per_layer_proj_norm.weight:altup_embd"
)
_GEMMA3N_LAYER = (
    f"{_ATTENTION} {_HEAD_NORMS} {_POST_NORMS} {_NORMED_GATED} inp_gate.weight:embd,altup_embd "
    "proj.weight:altup_embd,embd post_norm.weight:embd altup_correct_coef.weight:altup,altup "
    "altup_correct_scale.weight:embd altup_predict_coef.weight:altup,altup_square altup_router.weight:embd,altup "
    "altup_router_norm.weight:embd laurel_l.weight:embd,laurel laurel_r.weight:laurel,embd "
    "laurel_post_norm.weight:embd"
)


class Architecture(NamedTuple):
    """`rope`: `full` needs rope dimensions = head size, `partial` at most that, `none` has no rotary embedding.

    `square`: heads x head size must be the embedding length. `experts`: whether expert layers are a must.
    """

    whole: str
    layer: str
    keys: tuple[str, ...] = (_RMS,)
    rope: str = "full"
    square: bool = False
    experts: bool = False


_LLAMA = Architecture(f"{_TIED} {_ROPE}", _LLAMA_LAYER)
_GRANITE = Architecture(f"{_TIED} {_ROPE}", f"{_LLAMA_LAYER} {_GRANITE_SHARED}", (_RMS, "logit_scale"))

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(
        f"{_TIED} {_ROPE}", f"{_ATTENTION} ffn_norm.weight:embd ffn_up.weight:embd,ff ffn_down.weight:ff,embd"
    ),
    "bert": Architecture(
        "token_embd.weight:embd,vocab token_types.weight?:embd,token_types position_embd.weight:embd,context "
        "token_embd_norm.weight:embd token_embd_norm.bias:embd cls.weight?:embd,embd cls.bias?:embd "
        "cls.output.weight?:embd,labels cls.output.bias?:labels",
        _BERT,
        (_NORM,),
        rope="none",
        square=True,
    ),
    "cohere2": Architecture(
        _SHARED, f"{_ATTENTION} {_GATED}", (_NORM, "attention.sliding_window", "logit_scale"), "partial", square=True
    ),
    "command-r": Architecture(_SHARED, f"{_ATTENTION} {_GATED}", (_NORM,), "partial", square=True),
    "deepseek2": Architecture(
        _TIED,
        _DEEPSEEK2,
        (_RMS, "attention.kv_lora_rank", "expert_feed_forward_length", "expert_shared_count"),
        rope="mla",
    ),
    "ernie4_5": Architecture(_TIED, f"{_ATTENTION} attn_output.bias?:embd {_NORMED_GATED}"),
    "exaone4": Architecture(
        f"{_TIED} {_ROPE}", f"QKV attn_output.weight:embd,embd {_POST_NORMS} {_HEAD_NORMS} {_GATED}", square=True
    ),
    "gemma": Architecture(_SHARED, f"{_ATTENTION} {_NORMED_GATED}", rope="partial"),
    "gemma2": Architecture(_SHARED, f"{_ATTENTION} {_POST_NORMS} {_NORMED_GATED}", rope="partial"),
    "gemma3": Architecture(_TIED, f"{_ATTENTION} {_HEAD_NORMS} {_POST_NORMS} {_NORMED_GATED}", rope="partial"),
    "gemma-embedding": Architecture(
        _TIED,
        f"{_ATTENTION} {_HEAD_NORMS} {_POST_NORMS} {_NORMED_GATED}",
        (_RMS, "attention.sliding_window"),
        rope="partial",
    ),
    "gemma3n": Architecture(
        f"{_TIED} {_GEMMA3N_GLOBAL}", _GEMMA3N_LAYER, (_RMS, "attention.sliding_window"), rope="partial"
    ),
    "glm4": Architecture(
        _TIED,
        f"{_ATTENTION} {_POST_NORMS} ffn_norm.weight:embd ffn_up.weight:embd,ff_double ffn_down.weight:ff,embd",
        rope="partial",
    ),
    "gpt2": Architecture(
        f"{_TIED} output_norm.bias:embd position_embd.weight:embd,context",
        f"{_BIASED} ffn_norm.weight:embd ffn_norm.bias:embd attn_qkv.weight:embd,qkv attn_qkv.bias:qkv",
        (_NORM,),
        rope="none",
        square=True,
    ),
    "gpt-oss": Architecture(
        _UNTIED, _GPT_OSS, (_RMS, "expert_feed_forward_length", "attention.sliding_window"), experts=True
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "hunyuan-dense": Architecture(_TIED, f"{_ATTENTION} {_HEAD_NORMS} {_NORMED_GATED}"),
    "internlm2": Architecture(_UNTIED, f"{_ATTENTION} {_NORMED_GATED}", square=True),
    "llama": _LLAMA,
    "minicpm": _LLAMA,
    "mistral3": _LLAMA,
    "nomic-bert": Architecture(
        "token_embd.weight:embd,vocab token_types.weight?:embd,token_types token_embd_norm.weight:embd "
        "token_embd_norm.bias:embd",
        f"{_BERT} ffn_gate.weight:embd,ff",
        (_NORM,),
        rope="partial",
        square=True,
    ),
    "olmo": Architecture(
        "token_embd.weight:embd,vocab output.weight?:embd,vocab",
        f"QKV attn_output.weight:embd,embd {_GATED}",
        (_NORM,),
        square=True,
    ),
    "olmo2": Architecture(
        _UNTIED,
        f"QKV attn_output.weight:embd,embd attn_q_norm.weight:embd attn_k_norm.weight:kv {_POST_NORMS} {_GATED}",
        square=True,
    ),
    "olmoe": Architecture(
        _UNTIED,
        f"{_ATTENTION} attn_q_norm.weight:embd attn_k_norm.weight:embd ffn_norm.weight:embd {_EXPERTS}",
        square=True,
        experts=True,
    ),
    "phi2": Architecture(
        f"{_UNTIED} output_norm.bias:embd output.bias:vocab", f"{_BIASED} QKV", (_NORM,), "partial", square=True
    ),
    "phi3": Architecture(
        f"{_TIED} rope_factors_long.weight?:rot_half rope_factors_short.weight?:rot_half",
        f"{_ATTENTION} ffn_norm.weight:embd ffn_up.weight:embd,ff_double ffn_down.weight:ff,embd",
        rope="partial",
        square=True,
    ),
    "qwen2": Architecture(f"{_TIED} output.bias?:vocab", f"{_ATTENTION} {_NORMED_GATED}", square=True),
    "qwen2moe": Architecture(
        _UNTIED,
        f"{_ATTENTION} ffn_norm.weight:embd {_EXPERTS} ffn_gate_inp_shexp.weight:embd {_SHARED_EXPERTS}",
        square=True,
        experts=True,
    ),
    "qwen3": Architecture(f"{_TIED} cls.output.weight?:embd,labels", f"{_ATTENTION} {_HEAD_NORMS} {_NORMED_GATED}"),
    "qwen3moe": Architecture(_TIED, f"{_ATTENTION} {_HEAD_NORMS} ffn_norm.weight:embd {_EXPERTS}", experts=True),
    "seed_oss": Architecture(_TIED, f"{_ATTENTION} post_attention_norm.weight:embd {_GATED}"),
    "smollm3": Architecture(_TIED, f"{_ATTENTION} {_NORMED_GATED}"),
    "stablelm": Architecture(
        f"{_UNTIED} output_norm.bias:embd",
        f"{_ATTENTION} attn_norm.bias:embd attn_q_norm.weight?:head,heads attn_k_norm.weight?:head,heads_kv "
        f"ffn_norm.weight?:embd ffn_norm.bias?:embd {_GATED}",
        (_NORM,),
        "partial",
        square=True,
    ),
    "starcoder2": Architecture(
        f"{_TIED} output_norm.bias:embd",
        f"{_BIASED} QKV ffn_norm.weight:embd ffn_norm.bias:embd",
        (_NORM,),
        square=True,
    ),
}
"""Architectures whose files are checked tensor by tensor."""
