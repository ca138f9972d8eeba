"""A language model's endpoint: speaks chat completions and messages over HTTP, from a script."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = (1000, 200)


@dataclass(frozen=True)
class Use:
    """The model uses a tool."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    usage: tuple[int, int] | None = USAGE
    finish: str | None = None
    cut: int | None = None
    """Characters of the arguments that arrive."""


@dataclass(frozen=True)
class Say:
    """The model writes text."""

    text: str
    usage: tuple[int, int] | None = USAGE
    finish: str | None = None


@dataclass(frozen=True)
class Answer:
    """Any HTTP answer."""

    status: int
    body: str = "{}"
    headers: Mapping[str, str] = field(default_factory=dict)


Move = Use | Say | Answer | Callable[[Mapping[str, Any]], "Move"]  # type: ignore[misc]


class Endpoint:
    """Answers each request with the next move; the last one again when they are used up.

    Attributes:
        requests: bodies as they came, with the path under `path` and the key under `key`.
    """

    def __init__(self, moves: Sequence[Any]) -> None:
        self._moves = list(moves)
        self._lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, path: str, key: str, body: dict[str, Any]) -> Answer:
        with self._lock:
            self.requests.append({**body, "path": path, "key": key})
            move = self._moves.pop(0) if len(self._moves) > 1 else self._moves[0]
        while callable(move):
            move = move(body)
        if isinstance(move, Answer):
            return move
        made = _chat(move) if path.endswith("/chat/completions") else _message(move)
        return Answer(200, json.dumps(made))

    @property
    def results(self) -> list[str]:
        """What tools answered to the model, in the last request."""
        found = []
        for message in self.requests[-1]["messages"]:
            if message["role"] == "tool":
                found.append(message["content"])
            if message["role"] == "user" and isinstance(message["content"], list):
                for part in message["content"]:
                    if part["type"] == "tool_result":
                        found.append(
                            part["content"] if isinstance(part["content"], str) else str(part["content"])
                        )
        return found


def _chat(move: Use | Say) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if isinstance(move, Say):
        message["content"], finish = move.text, "stop"
    else:
        arguments, finish = json.dumps(dict(move.arguments))[: move.cut], "tool_calls"
        call = {"id": "call_1", "type": "function", "function": {"name": move.tool, "arguments": arguments}}
        message["tool_calls"] = [call]
    made: dict[str, Any] = {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "stub-1",
        "choices": [{"index": 0, "message": message, "finish_reason": move.finish or finish}],
    }
    if move.usage is not None:
        read, written = move.usage
        made["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return made


def _message(move: Use | Say) -> dict[str, Any]:
    if isinstance(move, Say):
        content, finish = {"type": "text", "text": move.text}, "end_turn"
    else:
        content = {"type": "tool_use", "id": "toolu_1", "name": move.tool, "input": dict(move.arguments)}
        finish = "tool_use"
    made: dict[str, Any] = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "stub-1",
        "content": [content],
        "stop_reason": move.finish or finish,
        "stop_sequence": None,
    }
    if move.usage is not None:
        made["usage"] = {"input_tokens": move.usage[0], "output_tokens": move.usage[1]}
    return made


@contextmanager
def serving(*moves: Any) -> Iterator[Endpoint]:
    """An endpoint at a free port of this machine."""
    endpoint = Endpoint(moves)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = self.headers.get("x-api-key") or self.headers.get("Authorization", "").removeprefix(
                "Bearer "
            )
            found = endpoint.answer(self.path, key, body)
            data = found.body.encode()
            self.send_response(found.status)
            for name, value in {"Content-Type": "application/json", **found.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
