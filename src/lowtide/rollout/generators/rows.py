"""Completions that are written a turn at a time: each turn of all that go on together, until none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.rollout.generators.generator import Completion, Lengths, Reply, Request, Sampling


class Row:
    """A completion that is being written.

    Args:
        most: tokens that it may have.
    """

    def __init__(self, request: int, number: int, prompt: Sequence[int], most: int) -> None:
        self.request, self.number, self.prompt, self.most = request, number, list(prompt), most
        self.completion = Completion()

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.most - len(self.completion.token_ids)

    def goes_on(self, reply: Reply | None) -> bool:
        """Whether there is more to write, after what is returned to the completion."""
        if reply is None or self.completion.finish != "stop" or self.left == 0:
            return False
        found = reply(self.request, self.number, self.completion)
        if found is None:
            return False
        tokens = [int(token) for token in found][: self.left]
        self.completion.append(tokens, [0.0] * len(tokens), [0.0] * len(tokens), written=False)
        self.completion.finish = "length"
        return self.left > 0


def write_turns(
    write: Callable[[list[Row], int], None],
    requests: Sequence[Request],
    sampling: Sampling,
    reply: Reply | None,
    lengths: Lengths | None = None,
) -> list[list[Completion]]:
    """The completions of each request, in their order; as long as `reply` returns tokens to some, these go on.

    Args:
        write: writes the turn of some rows, whose number it is given.
        lengths: of completions that are to have fewer tokens than others.
    """

    def most(place: int, number: int) -> int:
        room = requests[place].room(sampling)
        return room if lengths is None else min(room, lengths(place, number))

    rows = [
        Row(place, number, request.prompt_ids, most(place, number))
        for place, request in enumerate(requests)
        for number in range(request.count)
    ]
    pending, turn = rows, 0
    while pending:
        write(pending, turn)
        pending, turn = [row for row in pending if row.goes_on(reply)], turn + 1
    completions = iter(row.completion for row in rows)
    return [[next(completions) for _ in range(request.count)] for request in requests]
