"""Waking a worker of the same host that sleeps: a datagram tells it to look at the network.

An idle worker would otherwise have to look often, which costs a core some percent, or answer late. A ring is
a hint: nothing is lost if none comes, the worker then looks a little later. Datagrams go to sockets in
Linux' abstract namespace, which leave no files behind and cannot be reached from another host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Sequence

from mpirpc._core.timing import monotonic

STAYS_AWAKE = 5e-3
"""Seconds after which a worker from which nothing has come is woken by who sends it something."""


class Doorbell:
    """One worker's bell, and the way to those of the others.

    Raises:
        OSError: This system has no such sockets, or gives none.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = f"\0mpirpc-{os.getpid()}-{secrets.token_hex(8)}"
        self._others: list[str] = []
        self.awake_until: list[float] = []  # by rank: before that time a worker sleeps at most shortly
        try:
            self._socket.bind(self.address)
        except OSError:
            self._socket.close()
            raise

    def find(self, addresses: Sequence[str]) -> bool:
        """Remember the bells of all workers, by rank; say whether each can be rung from here."""
        self._others = list(addresses)
        self.awake_until = [0.0] * len(addresses)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                for address in addresses:
                    probe.connect(address)
            except OSError:
                return False
        return True

    def rouse(self, rank: int) -> None:
        """Wake a worker that may sleep: something is about to be sent to it. Thread: any."""
        now = monotonic()
        if now > self.awake_until[rank]:
            self.awake_until[rank] = now + STAYS_AWAKE
            self.ring(rank)

    def ring(self, rank: int) -> None:
        """Wake a worker. Thread: any. Progress: never blocks; a bell that is full rings already."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", self._others[rank])

    def ring_all(self) -> None:
        """Wake all workers."""
        for rank in range(len(self._others)):
            self.ring(rank)

    def ring_here(self) -> None:
        """End this worker's :meth:`sleep`. Thread: any."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", self.address)

    def sleep(self, timeout: float) -> bool:
        """Sleep until somebody rings, ``timeout`` seconds at most; say whether it rang.

        Thread: one at a time.
        """
        rang = False
        with contextlib.suppress(OSError, ValueError):  # nothing more has come; or it was closed meanwhile
            poller = select.poll()  # select() takes no descriptor above 1023
            poller.register(self._socket, select.POLLIN)
            poller.poll(1e3 * timeout)
            while self._socket.recv(1):
                rang = True  # also if it came after the time was over: it is used up now
        return rang

    def close(self) -> None:
        """Give the socket back; who sleeps wakes up."""
        self.ring_here()
        self._socket.close()
