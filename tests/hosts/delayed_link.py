"""A cable between two network namespaces on which every packet takes a while, for kernels without netem.

    python delayed_link.py MILLISECONDS PID PID

Makes an interface ``eth0`` in the namespaces of both processes, prints ``ready``, and hands packets on until
standard input ends. Needs root and ``/dev/net/tun``.
"""

import collections
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
MTU = 60000  # fewer packets: each costs this program some 10 us
MOST = 65536
TURN = 64


def make_interface(pid):
    """Return the descriptor that sends and gets the packets of a new ``eth0``."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"mpirpc%d", IFF_TAP | IFF_NO_PI)
    name = fcntl.ioctl(descriptor, TUNSETIFF, request)[:16].rstrip(b"\0").decode()
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU), "txqueuelen", "10000"], check=True)
    subprocess.run(["ip", "link", "set", name, "netns", pid, "name", "eth0"], check=True)
    return descriptor


def carry(delay, first, second):
    """Hand packets on, in order, ``delay`` seconds after they came."""
    other = {first: second, second: first}
    waiting = collections.deque()  # (when, to whom, packet)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([0, first, second], [], [], patience)[0]
        if 0 in ready and not os.read(0, MOST):
            return
        when = time.monotonic() + delay
        for source in ready:
            if source != 0:
                waiting.extend((when, other[source], packet) for packet in packets(source))
        while waiting and waiting[0][0] <= time.monotonic():
            _, dest, packet = waiting.popleft()
            try:
                os.write(dest, packet)
            except OSError:
                pass  # a full interface drops, and so does one that is not up


def packets(source):
    """Some of the packets that lie there."""
    for _ in range(TURN):
        try:
            yield os.read(source, MOST)
        except BlockingIOError:
            return


def main(milliseconds, *pids):
    ends = [make_interface(pid) for pid in pids]
    print("ready", flush=True)
    carry(float(milliseconds) / 1000, *ends)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
