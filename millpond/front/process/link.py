"""One direction of the way between two processes: a sender and a receiver of messages."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import msgspec
import zmq

Heard = TypeVar("Heard")

# No limit on what is on its way: a request brings one message, one more to end it, and at most as
# many deltas as it may have tokens, and how many requests are under way is limited elsewhere.
# Nobody therefore ever waits for the other side, and what was sent in order arrives in order.
UNLIMITED = 0


class Sender:
    """Sends from any thread and never waits."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool):
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = UNLIMITED
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, message: msgspec.Struct) -> bool:
        """False when there is nobody at the other end, or this one is closed.

        `OverflowError` for a number that no message can hold.
        """
        with self._lock:
            data = self._encoder.encode(message)
            try:
                self._socket.send(data, zmq.DONTWAIT)
            except zmq.ZMQError:
                return False
            return True

    def close(self, linger: float) -> None:
        """Give up what could not be delivered within `linger` seconds."""
        with self._lock:
            self._socket.close(linger=round(linger * 1000))


class Receiver(Generic[Heard]):
    """Receives messages of the union `kinds`, in one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        kinds: Any,
        *,
        bind: bool,
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = UNLIMITED
        self._decoder: msgspec.msgpack.Decoder[Heard] = msgspec.msgpack.Decoder(kinds)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def receive(self, timeout: float) -> Heard | None:
        """The next message, None when there is none within `timeout` seconds."""
        if not self._socket.poll(round(timeout * 1000)):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Receive no more."""
        self._socket.close(linger=0)
