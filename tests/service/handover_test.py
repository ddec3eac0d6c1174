"""Listeners of streams get each piece once and in order, earlier ones too, and then the end."""

import asyncio
import threading

from mint_jax.rollout.request import Request
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.service.handover import Handover


def put(streams, count):
    for n in range(count):
        for stream in streams:
            stream.put(Piece(0, [n], [0.0]))
    for stream in streams:
        stream.end([])


def test_pieces_before_and_after_listening_come_once_and_in_order():
    for _ in range(10):
        stream, found = Stream(Request((1,))), []
        thread = threading.Thread(target=put, args=([stream], 2000))
        thread.start()
        stream.listen(lambda piece, found=found: found.append(piece and piece.tokens[0]))
        thread.join()
        assert found == [*range(2000), None]


def test_a_handover_calls_into_a_loop_once_for_everything_that_arrived():
    async def follow():
        loop, crossings = asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: crossings.append(args) or call_soon(*args)
        handover, found = Handover(loop), [[] for _ in range(5)]
        streams = [Stream(Request((1,))) for _ in found]
        for stream, pieces in zip(streams, found, strict=True):
            stream.listen(lambda piece, pieces=pieces: handover.give(pieces.append, piece))
        thread = threading.Thread(target=put, args=(streams, 100))
        thread.start()
        thread.join()  # the loop stands still meanwhile
        await asyncio.sleep(0)
        return found, len(crossings)

    found, crossings = asyncio.run(follow())
    assert crossings == 1
    for pieces in found:
        assert [piece and piece.tokens[0] for piece in pieces] == [*range(100), None]
