"""What a bad network does, for support.proxy: bits that flip in what passes, connections that end."""

from __future__ import annotations

import random
import threading


class Flipper:
    """Flips one bit ``times`` times: in the middle of a chunk of ``least`` bytes (a payload), or ``after`` some bytes
    of the next ``word``. Towards the listener, or away from it. One thread per direction."""

    def __init__(self, to_listener: bool, times: int, word: bytes = b"", after: int = 0, least: int = 8192) -> None:
        self._to_listener = to_listener
        self.left = times
        self._word = word
        self._after = after
        self._least = least
        self.flipped = 0
        self.has_flipped = threading.Event()
        self.passed = threading.Semaphore(0)  # chunks with ``word``, once nothing is left to flip

    def __call__(self, data: bytes, is_client: bool) -> bytes:
        if is_client is not self._to_listener:
            return data
        if self.left <= 0:
            if self._word in data:
                self.passed.release()
            return data
        at = len(data) // 2 if len(data) >= self._least else -1
        if self._word:
            at = data.find(self._word)
            at += self._after if at >= 0 else 0
        if not 0 <= at < len(data):
            return data
        self.left -= 1
        self.flipped += 1
        self.has_flipped.set()
        return data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]


class Loser:
    """A proxy's ``alter``: loses what passes, and the connection with it, so often; ``times`` in all."""

    def __init__(self, chance: float, times: int, seed: int = 1) -> None:
        self._chance, self._left = chance, times
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self.has_lost = threading.Event()

    def __call__(self, data: bytes, is_client: bool) -> bytes:
        with self._lock:
            if self._left and self._dice.random() < self._chance:
                self._left -= 1
                if not self._left:
                    self.has_lost.set()
                raise ConnectionResetError
        return data
