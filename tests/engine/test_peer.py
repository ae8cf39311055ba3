"""Against llama.cpp's tools and published vectors. Needs EDGELLAMA_PEER: a folder with its bin/ and src/."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellama.engine import factory
from edgellama.engine.base import Batch, Engine, EngineOptions

pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(1800)]
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

PEER = os.environ.get("EDGELLAMA_PEER", "")
ANSWER_TOKENS = 128
TEMPLATES = {
    "chatml": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\n{} [/INST] ",
    "raw": "{}",
}
PROMPTS = [
    "Which city is the capital of France?",
    "What is 2 + 2?",
    "How many days are in a week?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "def fibonacci(n):",
    "Translate to German: I like tea.",
    "Il était une fois, dans un pays lointain,",
    "Warum ist der Himmel blau?",
    "北京是中国的首都。请介绍一下。",
    "Once upon a time there was a dragon 🐉 who",
    "Summarize: The quick brown fox jumps over the lazy dog.",
    "What does HTTP status 404 mean?",
    "Give me a recipe for pancakes with 3 eggs.",
    "The meaning of life is",
    "Name the planets of the solar system in order.",
    "Write a JSON object with the keys name and age.",
    "Who wrote Romeo and Juliet?",
    "A long list of numbers: " + " ".join(str(i * i) for i in range(150)),
]


@pytest.fixture(scope="module")
def peer() -> Path:
    if not PEER:
        pytest.skip("EDGELLAMA_PEER is not set: no llama.cpp tools to compare with")
    return Path(PEER)


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[Engine]:
    options = EngineOptions(context_tokens=2048, threads=2, flash_attention="on")
    loaded = factory("llamacpp")(str(default_model_path), options)
    yield loaded
    loaded.close()


def ours(engine: Engine, prompt: str) -> str:
    """Greedy answer with llama-completion's mark where the model ends it."""
    tokenizer = engine.tokenizer
    engine.remove_sequence(0)
    ids = tokenizer.tokenize(prompt, special=True, add_bos=True)
    rows = engine.decode(Batch.one_sequence(ids, 0))
    answer: list[int] = []
    end = ""
    while len(answer) < ANSWER_TOKENS:
        token = int(rows[-1].argmax())
        if tokenizer.is_end(token):
            end = " [end of text]"
            break
        answer.append(token)
        rows = engine.decode(Batch.one_sequence([token], len(ids) + len(answer) - 1))
    return b"".join(map(tokenizer.piece, answer)).decode("utf-8", "replace") + end


def theirs(peer: Path, model: Path, prompt: str) -> str:
    command = [str(peer / "bin" / "llama-completion"), "-m", str(model), "-p", prompt]  # -f would cut the last newline
    command += ["-n", str(ANSWER_TOKENS), "-c", "2048", "-b", "2048", "-ub", "512", "-fa", "on", "-t", "2", "-tb", "2"]
    command += ["--temp", "0", "--top-k", "1", "-no-cnv", "--no-escape", "--no-display-prompt", "--simple-io"]
    done = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
    return done.stdout.decode("utf-8", "replace")


@pytest.mark.model
@pytest.mark.parametrize("template", TEMPLATES)
def test_greedy_text_is_llama_completions(peer: Path, engine: Engine, default_model_path: Path, template: str) -> None:
    different = []
    for question in PROMPTS:
        prompt = TEMPLATES[template].format(question)
        expected, found = theirs(peer, default_model_path, prompt), ours(engine, prompt)
        if expected.rstrip("\n") != found.rstrip("\n"):
            different.append((question, expected, found))
    assert not different, f"{len(different)} of {len(PROMPTS)} texts differ"


LONG_RUNS = ["a" * 60_000, "1" * 60_000, " " * 60_000, "中" * 60_000, "!" * 60_000, "a" * 499_999 + " b"]


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "falcon"])
def test_long_runs_do_not_overflow_the_stack(peer: Path, name: str) -> None:
    """In a process of its own: what this guards against ends the process."""
    code = (
        "import sys, threading; from edgellama.engine.llamacpp.bindings import bindings;"
        "from edgellama.engine.llamacpp.tokenizer import LlamaTokenizer;"
        "c = bindings(); p = c.llama_model_default_params(); p.vocab_only = True;"
        "t = LlamaTokenizer(c, c.llama_model_load_from_file(sys.argv[1].encode(), p), whole_rule=False);"
        "text = eval(sys.argv[2]); ids = t.tokenize(text);"
        "assert b''.join(map(t.piece, ids)).decode() == text"
    )
    for text in LONG_RUNS:
        expression = f"{text[0]!r} * {len(text)}" if len(set(text)) == 1 else "'a' * 499_999 + ' b'"
        file = peer / "src" / "models" / f"ggml-vocab-{name}.gguf"
        subprocess.run([sys.executable, "-c", code, str(file), expression], check=True, timeout=300)


VOCABULARIES = ["bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"]
VOCABULARIES += ["llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokenizer_equals_the_published_vectors(peer: Path, name: str) -> None:
    from edgellama.engine.llamacpp.bindings import bindings
    from edgellama.engine.llamacpp.tokenizer import LlamaTokenizer

    file = peer / "src" / "models" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(word) for word in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    c = bindings()
    params = c.llama_model_default_params()
    params.vocab_only = True
    model = c.llama_model_load_from_file(str(file).encode(), params)
    try:
        tokenizer = LlamaTokenizer(c, model, whole_rule=False)
        assert [tokenizer.tokenize(text) for text in texts[: len(expected)]] == expected
        assert len(expected) > 20
    finally:
        c.llama_model_free(model)
