"""Chat templates by model family, for files that carry none: the turn formats the families were trained with."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

_LOOP = "{% for message in messages %}"
_END = "{% endfor %}"


def _turns(before: str, after: str, prompt: str, *, trim: bool = False, start: str = "") -> str:
    """The common shape: each turn between `before` and `after`; `{role}` is the role, `prompt` the answer's header."""
    content = "message.content | trim" if trim else "message.content"
    head = before.replace("{role}", "{{ message.role }}")
    return f"{start}{_LOOP}{head}{{{{ {content} }}}}{after}{_END}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def _by_role(turns: dict[str, str], prompt: str, start: str = "") -> str:
    """Turns that differ by role; `{}` is the content."""
    cases = ""
    for role, text in turns.items():
        word = "elif" if cases else "if"
        cases += f"{{% {word} message.role == {role!r} %}}" + text.replace("{}", "{{ message.content }}")
    return f"{start}{_LOOP}{cases}{{% endif %}}{_END}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def _system_in_first_user(user: str, assistant: str, prompt: str, start: str, *, trim: bool) -> str:
    """The system text begins the first user turn; `{}` is the content."""
    value = "| trim" if trim else ""
    return (
        start
        + "{% set ns = namespace(system='') %}"
        + _LOOP
        + "{% if message.role == 'system' %}"
        + f"{{% set ns.system = ns.system ~ (message.content {value}) ~ '\\n\\n' %}}"
        + "{% elif message.role == 'assistant' %}"
        + assistant.replace("{}", f"{{{{ message.content {value} }}}}")
        + "{% else %}"
        + user.replace("{}", f"{{{{ ns.system }}}}{{% set ns.system = '' %}}{{{{ message.content {value} }}}}")
        + "{% endif %}"
        + _END
        + f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


_BOS = "{{ bos_token }}"
_EOS = "{{ eos_token }}"
_COHERE = "<|START_OF_TURN_TOKEN|>"

FAMILIES = MappingProxyType(
    {
        "chatml": _turns("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
        "llama3": _turns(
            "<|start_header_id|>{role}<|end_header_id|>\n\n",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            trim=True,
            start=_BOS,
        ),
        "llama4": _turns(
            "<|header_start|>{role}<|header_end|>\n\n",
            "<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n",
            trim=True,
            start=_BOS,
        ),
        "phi3": _turns("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
        "phi4": _turns("<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "zephyr": _turns("<|{role}|>\n", _EOS + "\n", "<|assistant|>\n"),
        "granite": _turns(
            "<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
        ),
        "chatglm4": _turns("<|{role}|>\n", "", "<|assistant|>\n", start="[gMASK]<sop>"),
        "exaone3": _by_role(
            {
                "system": "[|system|]{{ message.content | trim }}[|endofturn|]\n",
                "user": "[|user|]{{ message.content | trim }}\n",
                "assistant": "[|assistant|]{{ message.content | trim }}[|endofturn|]\n",
            },
            "[|assistant|]",
        ),
        "command-r": _by_role(
            {
                "system": _COHERE + "<|SYSTEM_TOKEN|>{{ message.content | trim }}<|END_OF_TURN_TOKEN|>",
                "user": _COHERE + "<|USER_TOKEN|>{{ message.content | trim }}<|END_OF_TURN_TOKEN|>",
                "assistant": _COHERE + "<|CHATBOT_TOKEN|>{{ message.content | trim }}<|END_OF_TURN_TOKEN|>",
            },
            _COHERE + "<|CHATBOT_TOKEN|>",
            start=_BOS,
        ),
        "deepseek3": _by_role(
            {
                "system": "{}\n\n",
                "user": "<｜User｜>{}",  # noqa: RUF001  (full-width bars are the token's own)
                "assistant": "<｜Assistant｜>{}<｜end▁of▁sentence｜>",  # noqa: RUF001
            },
            "<｜Assistant｜>",  # noqa: RUF001
            start=_BOS,
        ),
        "vicuna": _by_role(
            {"system": "{}\n\n", "user": "USER: {}\n", "assistant": "ASSISTANT: {}" + _EOS + "\n"},
            "ASSISTANT:",
            start=_BOS,
        ),
        "alpaca": _by_role(
            {
                "system": "{}\n\n",
                "user": "### Instruction:\n{}\n\n",
                "assistant": "### Response:\n{}" + _EOS + "\n\n",
            },
            "### Response:\n",
            start=_BOS,
        ),
        "llama2": _by_role(
            {
                "system": "{{ bos_token }}[INST] <<SYS>>\n{}\n<</SYS>>\n\n",
                "user": "{% if loop.first or loop.previtem.role != 'system' %}{{ bos_token }}[INST] {% endif %}"
                "{{ message.content | trim }} [/INST]",
                "assistant": " {{ message.content | trim }} " + _EOS,
            },
            "",
        ),
        "mistral": _system_in_first_user("[INST] {}[/INST]", " {}" + _EOS, "", _BOS, trim=False),
        "gemma": _system_in_first_user(
            "<start_of_turn>user\n{}<end_of_turn>\n",
            "<start_of_turn>model\n{}<end_of_turn>\n",
            "<start_of_turn>model\n",
            _BOS,
            trim=True,
        ),
    }
)
"""Jinja sources by family name."""

_BY_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("phi4", ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    ("chatml", ("<|im_start|>", "<|im_end|>")),
    ("llama3", ("<|start_header_id|>", "<|eot_id|>")),
    ("llama4", ("<|header_start|>", "<|eot|>")),
    ("gemma", ("<start_of_turn>", "<end_of_turn>")),
    ("granite", ("<|start_of_role|>", "<|end_of_role|>")),
    ("command-r", (_COHERE, "<|CHATBOT_TOKEN|>")),
    ("deepseek3", ("<｜User｜>", "<｜Assistant｜>")),  # noqa: RUF001
    ("chatglm4", ("[gMASK]", "<sop>", "<|user|>")),
    ("exaone3", ("[|assistant|]", "[|endofturn|]")),
    ("phi3", ("<|user|>", "<|assistant|>", "<|end|>")),
    ("mistral", ("[INST]", "[/INST]")),
)
_BY_NAME: tuple[tuple[str, str], ...] = (
    ("codellama", "llama2"),
    ("llama-2", "llama2"),
    ("llama2", "llama2"),
    ("llama-3", "llama3"),
    ("llama3", "llama3"),
    ("llama-4", "llama4"),
    ("hermes", "chatml"),
    ("dolphin", "chatml"),
    ("openorca", "chatml"),
    ("zephyr", "zephyr"),
    ("tinyllama", "zephyr"),
    ("stablelm-zephyr", "zephyr"),
    ("wizardlm", "vicuna"),
    ("vicuna", "vicuna"),
    ("alpaca", "alpaca"),
    ("wizardcoder", "alpaca"),
    ("mistral", "mistral"),
    ("mixtral", "mistral"),
    ("phi-4", "phi4"),
    ("phi-3", "phi3"),
    ("gemma", "gemma"),
    ("qwen", "chatml"),
    ("smollm", "chatml"),
    ("command-r", "command-r"),
    ("granite", "granite"),
    ("exaone", "exaone3"),
    ("glm-4", "chatglm4"),
)
_BY_ARCHITECTURE = MappingProxyType(
    {
        "gemma": "gemma",
        "gemma2": "gemma",
        "gemma3": "gemma",
        "phi3": "phi3",
        "qwen": "chatml",
        "qwen2": "chatml",
        "qwen2moe": "chatml",
        "qwen3": "chatml",
        "qwen3moe": "chatml",
        "internlm2": "chatml",
        "command-r": "command-r",
        "cohere2": "command-r",
        "granite": "granite",
        "granitemoe": "granite",
        "deepseek2": "deepseek3",
        "chatglm": "chatglm4",
        "glm4": "chatglm4",
        "exaone": "exaone3",
        "llama4": "llama4",
    }
)


def family(architecture: str, name: str, control_texts: Sequence[str] = ()) -> tuple[str, str]:
    """The family whose turn format fits best, and what told so. A vocabulary's own turn tokens are the best witness."""
    known = frozenset(control_texts)
    for candidate, texts in _BY_TEXTS:
        if known.issuperset(texts):
            return candidate, f"the vocabulary's {texts[0]}"
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for part, candidate in _BY_NAME:
        if part in plain and _writable(candidate, known):
            return candidate, f"the model's name, {name}"
    candidate = _BY_ARCHITECTURE.get(architecture.lower(), "")
    if candidate and _writable(candidate, known):
        return candidate, f"the architecture, {architecture}"
    if known:
        return "vicuna", "elimination (no turn tokens in the vocabulary; is this a base model?)"
    return "chatml", "default (nothing is known about the model; is this a base model?)"


def _writable(candidate: str, known: frozenset[str]) -> bool:
    """Whether the vocabulary, as far as known, has the turn tokens of a family that needs some."""
    needed = dict(_BY_TEXTS).get(candidate, ())
    return not known or candidate == "mistral" or known.issuperset(needed)
