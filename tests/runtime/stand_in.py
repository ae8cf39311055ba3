"""A worker without an engine that misbehaves as its argument says. Run as a script."""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from edgellama.engine.base import Capabilities, ModelInfo
from edgellama.runtime.messages import (
    PROTOCOL,
    Abort,
    Cancel,
    Finished,
    FromWorker,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Prefilled,
    Probe,
    Probed,
    RequestFailed,
    Shutdown,
    Step,
    Tokenize,
    Tokens,
    ToWorker,
    WorkerFailed,
    decode_to_worker,
    frame,
    frame_length,
)

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else "good"
_out = os.fdopen(os.dup(1), "wb", buffering=0)
_lock = threading.Lock()


def send(message: FromWorker) -> None:
    write(frame(message))


def write(data: bytes) -> None:
    with _lock:
        view = memoryview(data)
        while view:
            view = view[_out.write(view) or 0 :]


def receive(stream: BinaryIO) -> ToWorker | None:
    header = stream.read(4)
    return decode_to_worker(stream.read(frame_length(header))) if len(header) == 4 else None


def beat() -> None:
    progress = 0
    while BEHAVIOUR != "mute":
        progress += BEHAVIOUR == "slow"
        send(Heartbeat(busy=(), progress=progress, resident_bytes=1000, peak_bytes=2000))
        time.sleep(0.05)


def loaded() -> Loaded:
    info = ModelInfo(
        architecture="none",
        description="stand-in",
        parameters=1,
        size_bytes=1,
        layers=1,
        embedding_length=4,
        vocabulary_tokens=300,
        trained_context_tokens=512,
        context_tokens=512,
        sequences=1,
        engine="fake",
        backend_build="stand-in 1",
    )
    return Loaded(info=info, capabilities=Capabilities(), seconds=0.0)


def main() -> None:
    if BEHAVIOUR == "exit":
        sys.stderr.write("cannot go on\n")
        sys.stderr.flush()
        os._exit(3)
    if BEHAVIOUR == "sleep":
        time.sleep(60)
    if BEHAVIOUR == "noise":
        write(os.urandom(4096))
        time.sleep(60)
    if BEHAVIOUR == "huge":
        write(b"\xff\xff\xff\xff")
        time.sleep(60)
    if BEHAVIOUR == "wrong-type":
        write(b"\x03\x00\x00\x00\x93\x01\x02")
        time.sleep(60)
    if BEHAVIOUR == "flood":
        os.write(2, (b"x" * 99 + b"\n") * 100_000 + b"the last line\n")
    send(Hello(protocol=PROTOCOL + (BEHAVIOUR == "newer"), pid=os.getpid()))
    if BEHAVIOUR == "hang-up":
        _out.close()
        os.close(1)
        time.sleep(60)
    threading.Thread(target=beat, daemon=True).start()
    while (message := receive(sys.stdin.buffer)) is not None:
        answer(message)


def answer(message: ToWorker) -> None:
    match message:
        case Load():
            if BEHAVIOUR == "refuse":
                send(WorkerFailed(kind="InvalidFileError", message="not a model", advice="try another"))
                os._exit(1)
            send(LoadProgress(7.0))
            send(loaded())
        case Probe(tokens=tokens):
            send(Probed(tokens=tokens, logits=struct.pack("<300f", *range(300)), seconds=0.0))
        case Tokenize(call_id=call_id):
            send(Tokens(call_id=call_id + (BEHAVIOUR == "confused"), tokens=(1, 2, 3)))
        case Generate(request_id=request_id, resume=resume):
            generate(request_id, len(resume))
        case Abort() if BEHAVIOUR == "obedient":
            send(RequestFailed(request_id="a", kind="AbortedError", message="aborted"))
        case Cancel() | Abort():
            pass
        case Shutdown():
            if BEHAVIOUR == "stubborn":
                time.sleep(60)
            os._exit(0)


def generate(request_id: str, resumed: int) -> None:
    send(Step(request_id="someone else", token=1, text="never asked for"))
    if BEHAVIOUR in {"stall", "obedient", "mute"}:
        return
    if BEHAVIOUR == "slow":
        time.sleep(1.0)
    send(Prefilled(request_id=request_id, done=3, total=3))
    for i in range(resumed, 5):
        if BEHAVIOUR == "garble" and i == 2 and not (done := Path(sys.argv[2])).exists():
            done.touch()
            write(b"\x05\x00\x00\x00hello")
        send(Step(request_id=request_id, token=i, text=f"{i} "))
    send(
        Finished(
            request_id=request_id,
            reason="length",
            prompt_tokens=3,
            cached_tokens=0,
            completion_tokens=5,
            prompt_seconds=0.1,
            generation_seconds=0.1,
            seed=0,
        )
    )


if __name__ == "__main__":
    main()
