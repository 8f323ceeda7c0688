"""What `vllm serve` answers of the log-probabilities of texts, around a model that is computed densely."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

LONGEST = 512


class Teaches:
    """A server's answers.

    Attributes:
        texts: the texts that it was asked of.
        said: changes what is said of a text, [{token: {logprob, rank}}], before it is answered.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.texts: list[list[int]] = []
        self.said: Callable[[list[Any]], Any] = lambda places: places
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer; None for a path that there is not."""
        if path == "/health":
            return {}
        if path == "/v1/models":
            return {"data": [{"id": "teacher", "max_model_len": LONGEST}]}
        if path == "/tokenize" and self.tokenizer is not None:
            return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path == "/v1/completions":
            asked = body["prompt"]
            texts = asked if isinstance(asked[0], list) else [asked]
            return {"choices": [{"prompt_logprobs": self.of(text, body["prompt_logprobs"])} for text in texts]}
        return None

    @torch.no_grad()
    def of(self, text: list[int], top: int) -> Any:
        with self.lock:
            self.texts.append(text)
            logits = self.model(torch.tensor([text])).logits[0]
        logprobs = logits.double().log_softmax(-1)
        places: list[Any] = [None]
        for token, row in zip(text[1:], logprobs, strict=False):
            ranks = 1 + torch.empty_like(row, dtype=torch.long).scatter_(
                0, row.argsort(descending=True), torch.arange(len(row))
            )
            likeliest = row.topk(top).indices.tolist()
            places.append(
                {str(each): {"logprob": row[each].item(), "rank": ranks[each].item()} for each in {*likeliest, token}}
            )
        return self.said(places)


@contextlib.contextmanager
def teaching_server(teaches: Teaches) -> Iterator[str]:
    """The address of such a server, while it lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            found = teaches.answer(self.path, body)
            content = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
