"""A process without a network: only its own loopback interface, for itself and all that it starts."""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
REQUEST: Final = "16sh22x"  # struct ifreq with flags


def keep_loopback_only() -> bool:
    """Give up every other interface, for good. False, with nothing changed, where the system forbids it.

    Threads that run already keep theirs. Others than root need that there are none.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(CLONE_NEWNET) != 0:
        ids = (("uid_map", os.getuid()), ("gid_map", os.getgid()))
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        for name, own in ids:
            Path("/proc/self", name).write_text(f"{own} {own} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        found = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack(REQUEST, b"lo", 0))
        _, flags = struct.unpack(REQUEST, found)
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack(REQUEST, b"lo", flags | IFF_UP))
    return True
