"""Rendering equals transformers' (committed vectors), and conversations a template does not take are handled aloud."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellama.chat import fallback, templates
from edgellama.chat.messages import Message, ToolCall
from edgellama.chat.templates import ChatTemplate
from edgellama.errors import EdgellamaError, TemplateError, UsageError

DATA = Path(__file__).parent / "data"
GRID = json.loads((DATA / "conversations.json").read_text(encoding="utf-8"))
VECTORS = json.loads((DATA / "vectors.json").read_text(encoding="utf-8"))["templates"]
PEER = os.environ.get("EDGELLAMA_PEER", "")

SYSTEM = Message(role="system", content="Be brief.")
USER = Message(role="user", content="Hello")
CHATML = fallback.FAMILIES["chatml"]
GEMMA_LIKE = (DATA / "templates" / "strict.jinja").read_text(encoding="utf-8")


def source_of(name: str) -> str:
    file = DATA / "templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8") if file.exists() else fallback.FAMILIES[name]


def now() -> datetime.datetime:
    return datetime.datetime.fromisoformat(GRID["now"])


def rendered(template: ChatTemplate, key: str) -> str | EdgellamaError:
    conversation = GRID["conversations"][key.removesuffix("+prompt")]
    try:
        return template.render_dicts(
            conversation["messages"],
            tools=conversation.get("tools"),
            arguments=conversation.get("arguments"),
            add_generation_prompt=key.endswith("+prompt"),
        )
    except EdgellamaError as error:
        return error


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_equals_transformers(name: str) -> None:
    template = ChatTemplate(source_of(name), bos_text=GRID["bos_token"], eos_text=GRID["eos_token"], now=now)
    for key, wanted in VECTORS[name]["outputs"].items():
        found = rendered(template, key)
        if "error" in wanted:
            assert isinstance(found, TemplateError), key
            reason = " ".join(wanted["error"].split(": ", 1)[1].split())
            assert reason[:200] in found.message, key
        elif "text" in wanted:
            assert found == wanted["text"], key
        else:
            assert isinstance(found, str), (key, found)
            assert hashlib.sha256(found.encode()).hexdigest() == wanted["sha256"], key


@pytest.mark.skipif(not PEER, reason="EDGELLAMA_PEER names no llama.cpp build folder")
def test_every_peer_template_compiles_and_renders() -> None:
    files = sorted((Path(PEER) / "src" / "models" / "templates").glob("*.jinja"))
    assert files
    for file in files:
        template = ChatTemplate(file.read_text(encoding="utf-8"), bos_text="<s>", eos_text="</s>", now=now)
        talk = [USER, Message(role="assistant", content="Hi there"), Message(role="user", content="Go")]
        text = template.render(
            talk, arguments={"functions": "[]", "datetime": "today"} if "firefunction" in file.name else {}
        )
        assert "Hello" in text, file.name
        assert text.index("Hello") < text.index("Hi there") < text.rindex("Go"), file.name


def test_messages_become_the_form_templates_expect() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson(sort_keys=true) }}\n{% endfor %}")
    call = ToolCall(id="c1", name="now", arguments={"zone": "Zürich"})
    text = template.render(
        [
            Message(role="developer", content="rules"),
            Message(role="user", content="", name="Ada"),
            Message(role="assistant", reasoning="hm", tool_calls=(call,)),
            Message(role="tool", content="12:00", tool_call_id="c1"),
        ]
    )
    system, user, assistant, tool = map(json.loads, text.splitlines())
    assert system == {"role": "system", "content": "rules"}
    assert user == {"role": "user", "content": "", "name": "Ada"}
    assert assistant["reasoning_content"] == assistant["thinking"] == "hm"
    assert assistant["content"] == ""
    function = {"name": "now", "arguments": {"zone": "Zürich"}}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert tool == {"role": "tool", "content": "12:00", "tool_call_id": "c1", "name": "now"}


def test_content_is_none_only_where_the_template_asks_for_it() -> None:
    asks = "{% for m in messages %}{% if m['content'] is none %}calls{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments={}),))
    assert ChatTemplate(asks).render([call, Message(role="assistant")]) == "calls[]"


def test_developer_stays_where_the_template_knows_it() -> None:
    source = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    assert ChatTemplate(source).render([Message(role="developer", content="x")]) == "developer!"


def test_arguments_become_text_where_the_template_cannot_take_objects() -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments={"a": "é"}),))
    adds = "{% for c in messages[0].tool_calls %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}"
    prints = "{% for c in messages[0].tool_calls %}{{ c.function.arguments }}{% endfor %}"
    assert ChatTemplate(adds).render([call]) == 'f:{"a": "é"}'
    assert ChatTemplate(prints).render([call]) == '{"a": "é"}'


def test_a_template_that_walks_through_absent_tools_gets_none_of_them() -> None:
    walks = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    assert ChatTemplate(walks).render([USER]) == "Hello"


class Heard:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, kind: str, text: str) -> None:
        assert text
        self.kinds.append(kind)


def test_a_refused_system_message_moves_into_the_first_user_message() -> None:
    heard = Heard()
    text = ChatTemplate(GEMMA_LIKE).render([SYSTEM, USER], on_notice=heard)
    assert "<turn user>Be brief.\n\nHello</turn>" in text
    assert heard.kinds == ["system-moved"]


def test_a_dropped_system_message_moves_into_the_first_user_message() -> None:
    deaf = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    heard = Heard()
    assert ChatTemplate(deaf).render([SYSTEM, USER], on_notice=heard) == "user: Be brief.\n\nHello\n"
    assert heard.kinds == ["system-moved"]


def test_several_system_messages_are_joined_only_where_one_alone_is_taken() -> None:
    late = Message(role="system", content="Answer in French.")
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # noqa: E501
    heard = Heard()
    text = ChatTemplate(strict).render([SYSTEM, USER, late, USER], on_notice=heard)
    assert text == "system: Be brief.\n\nAnswer in French.\nuser: Hello\nuser: Hello\n"
    assert heard.kinds == ["system-joined"]
    heard = Heard()
    assert ChatTemplate(CHATML).render([SYSTEM, USER, late, USER], on_notice=heard).count("<|im_start|>system") == 2
    assert heard.kinds == []


def test_rows_of_one_role_are_joined_where_roles_must_alternate() -> None:
    heard = Heard()
    text = ChatTemplate(GEMMA_LIKE).render([SYSTEM, USER, Message(role="user", content="Bye")], on_notice=heard)
    assert "<turn user>Be brief.\n\nHello\n\nBye</turn>" in text
    assert heard.kinds == ["system-moved", "turns-joined"]


def test_a_conversation_that_begins_with_an_answer_is_refused_with_advice() -> None:
    with pytest.raises(TemplateError, match="must alternate") as caught:
        ChatTemplate(GEMMA_LIKE).render([Message(role="assistant", content="Hi"), USER])
    assert "begin with a user message" in caught.value.advice


def test_a_template_without_place_for_a_system_message_says_so() -> None:
    heard = Heard()
    ChatTemplate("{{ messages | length }}").render([SYSTEM], on_notice=heard)
    assert heard.kinds == ["system-ignored"]


def test_what_a_template_leaves_out_is_told() -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="now", arguments={}),))
    talk = [USER, call, Message(role="tool", content="12:00", tool_call_id="1"), Message(role="user", content="Thanks")]
    heard = Heard()
    ChatTemplate("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}").render(talk, on_notice=heard)
    assert heard.kinds == ["tool-messages-ignored"]
    heard = Heard()
    ChatTemplate("{{ messages[-1].content }}").render([USER, Message(role="user", content="Bye")], on_notice=heard)
    assert heard.kinds == ["user-ignored"]


def test_a_developer_message_the_template_leaves_out_is_given_as_system() -> None:
    source = "{% for m in messages if m.role != 'developer' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    talk = [Message(role="developer", content="Rules."), USER]
    assert ChatTemplate(source).render(talk) == "system: Rules.\nuser: Hello\n"


def test_empty_content_is_given_where_none_fails() -> None:
    source = "{% for m in messages %}{{ m.content | length if m.content is none }}[{{ m.content }}]{% endfor %}"
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments={}),))
    assert ChatTemplate(source).render([call]) == "[]"


def test_tools_without_a_place_for_them_are_told() -> None:
    heard = Heard()
    ChatTemplate(CHATML).render([USER], tools=[{"type": "function"}], on_notice=heard)
    assert heard.kinds == ["tools-ignored"]


def test_reserved_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="messages"):
        ChatTemplate(CHATML).render([USER], arguments={"messages": []})


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(TemplateError, match="object"):
        ChatTemplate(CHATML).render([USER], arguments={"x": object()})


def test_deeply_nested_input_is_refused() -> None:
    value: object = "x"
    for _ in range(200):
        value = [value]
    with pytest.raises(TemplateError, match="nested"):
        ChatTemplate(CHATML).render([USER], arguments={"x": value})


def test_errors_name_the_line_and_are_safe_to_print() -> None:
    with pytest.raises(TemplateError, match="line 2") as caught:
        ChatTemplate("\n{{ nothing.at.all }}").render([USER])
    assert caught.value.advice
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("{{ raise_exception('\\x1b[2J\\x07gone\\r\\n') }}").render([USER])
    assert str(caught.value).isprintable() or "\x1b" not in str(caught.value)
    assert "gone" in caught.value.message


def test_half_surrogate_pairs_become_replacements() -> None:
    text = ChatTemplate("{{ messages[0].content }}{{ '\\ud800' }}").render([Message(role="user", content="a\udc80b")])
    assert text == "a\ufffdb\ufffd"


def test_long_conversations_fit_the_budget() -> None:
    messages = [SYSTEM] + [
        Message(role=r, content="wörd <x> " * 400) for _ in range(500) for r in ("user", "assistant")
    ]  # type: ignore[arg-type]
    for name in ("smollm2", "agent", "language"):
        text = ChatTemplate(source_of(name)).render([*messages, USER])
        assert len(text) > 3_000_000


# ---- choice


@pytest.mark.parametrize(
    ("architecture", "name", "control_texts", "family"),
    [
        ("llama", "", ("<|im_start|>", "<|im_end|>"), "chatml"),
        ("llama", "", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "llama3"),
        ("llama", "zephyr-7b", ("<s>", "</s>"), "zephyr"),
        ("llama", "Llama-2-7b-chat", ("<s>", "</s>", "<unk>"), "llama2"),
        ("llama", "Mistral-7B-Instruct-v0.2", ("<s>", "</s>"), "mistral"),
        ("llama", "vicuna-13b", (), "vicuna"),
        ("gemma2", "", (), "gemma"),
        ("phi3", "", ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), "phi3"),
        ("qwen2", "", (), "chatml"),
        ("gpt2", "", ("<|endoftext|>",), "vicuna"),
        ("", "", (), "chatml"),
    ],
)
def test_fallback_by_family_is_said(architecture: str, name: str, control_texts: tuple[str, ...], family: str) -> None:
    template, notice = templates.choose(None, architecture, name, control_texts=control_texts)
    assert template.source == fallback.FAMILIES[family]
    assert notice is not None
    assert family in notice


def test_the_files_own_template_is_taken_silently() -> None:
    template, notice = templates.choose("{{ messages[0].content }}", "llama", "")
    assert template.render([USER]) == "Hello"
    assert notice is None


def test_a_family_can_be_asked_for_by_name() -> None:
    template, notice = templates.choose("llama3")
    assert notice is None
    assert "<|start_header_id|>user" in template.render([USER])


def test_a_broken_template_is_replaced_aloud() -> None:
    template, notice = templates.choose("{% for m in messages %}", "qwen2", "")
    assert template.source == CHATML
    assert notice is not None
    assert "cannot be used" in notice


LLAMA_CPP_NAMES = {
    "chatml": "chatml",
    "llama3": "llama3",
    "phi3": "phi3",
    "phi4": "phi4",
    "command-r": "command-r",
    "gemma": "gemma",
    "vicuna": "vicuna",
    "mistral": "mistral-v3",
    "deepseek3": "deepseek3",
    "chatglm4": "chatglm4",
    "exaone3": "exaone3",
    "granite": "granite",
    "llama4": "llama4",
}


@pytest.mark.llamacpp
@pytest.mark.parametrize(("family", "peer"), LLAMA_CPP_NAMES.items())
def test_families_equal_llama_cpps_own(family: str, peer: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    messages = [SYSTEM, USER, Message(role="assistant", content="Hi."), Message(role="user", content="Grüße 👩🏽‍🚀")]
    chat = (llama_cpp.llama_chat_message * len(messages))()
    for index, message in enumerate(messages):
        chat[index].role, chat[index].content = message.role.encode(), message.content.encode()
    import ctypes

    buffer = ctypes.create_string_buffer(4096)
    size = llama_cpp.llama_chat_apply_template(peer.encode(), chat, len(messages), True, buffer, len(buffer))
    assert size > 0
    ours = ChatTemplate(fallback.FAMILIES[family], bos_text="", eos_text="</s>").render(messages)
    assert ours == buffer.raw[:size].decode()


def test_light_modules_import_no_jinja() -> None:
    code = (
        "import sys\n"
        "import edgellama.chat.messages, edgellama.chat.stops, edgellama.chat.detokenize, edgellama.chat.reasoning,"
        " edgellama.chat.fit, edgellama.chat.fallback\n"
        "assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
