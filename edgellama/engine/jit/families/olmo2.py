"""OLMo 2: norms only behind attention and feed-forward, and over whole queries and keys. arXiv 2501.00656."""

from edgellama.engine.jit.families.base import Family, no_windows
from edgellama.errors import UnsupportedError
from edgellama.gguf_io import Header


def _windows(header: Header) -> tuple[int, ...]:
    if header.number("attention.sliding_window"):
        raise UnsupportedError("the JIT engine does not know OLMo 3's sliding windows", "use the engine llamacpp")
    return no_windows(header)


FAMILY = Family(
    layout="half",
    attention_norm="",
    attention_post_norm="post_attention_norm",
    feed_forward_norm="",
    feed_forward_post_norm="post_ffw_norm",
    head_norms=True,
    windows=_windows,
)
