"""Listeners of streams get each piece once and in order, earlier ones too, and then the end."""

import threading

from mint_jax.rollout.request import Request
from mint_jax.rollout.stream import Piece, Stream


def test_pieces_before_and_after_listening_come_once_and_in_order():
    def put(stream):
        for n in range(2000):
            stream.put(Piece(0, [n], [0.0]))
        stream.end([])

    for _ in range(10):
        stream, found = Stream(Request((1,))), []
        thread = threading.Thread(target=put, args=(stream,))
        thread.start()
        stream.listen(lambda piece, found=found: found.append(piece and piece.tokens[0]))
        thread.join()
        assert found == [*range(2000), None]
