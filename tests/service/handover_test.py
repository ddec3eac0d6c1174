"""Who listens to a stream is told each piece once and in order, also those that came before, and
then its end.
"""

import asyncio
import threading

from mint_jax.rollout.request import Request
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.service.handover import Handover


def test_pieces_before_and_behind_listening_come_once_and_in_order():
    for begin in range(0, 2000, 200):
        stream, found, started = Stream(Request((1,))), [], threading.Event()

        def put(stream=stream, started=started, begin=begin):
            for n in range(2000):
                if n == begin:
                    started.set()
                stream.put(Piece(0, [n], [0.0]))
            stream.end([])

        thread = threading.Thread(target=put)
        thread.start()
        started.wait()
        stream.listen(lambda piece, found=found: found.append(piece and piece.tokens[0]))
        thread.join()
        assert found == [*range(2000), None]


def test_a_handover_calls_into_a_loop_once_for_all_that_came():
    async def follow():
        loop = asyncio.get_running_loop()
        crossings = []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: crossings.append(args) or call_soon(*args)
        handover, found = Handover(loop), [[] for _ in range(5)]
        streams = [Stream(Request((1,))) for _ in found]
        for stream, pieces in zip(streams, found, strict=True):
            stream.listen(lambda piece, pieces=pieces: handover.give(pieces.append, piece))

        def put():
            for n in range(100):
                for stream in streams:
                    stream.put(Piece(0, [n], [0.0]))
            for stream in streams:
                stream.end([])

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()  # the loop stands still meanwhile
        await asyncio.sleep(0)
        return found, len(crossings)

    found, crossings = asyncio.run(follow())
    assert crossings == 1
    for pieces in found:
        assert [piece and piece.tokens[0] for piece in pieces] == [*range(100), None]
