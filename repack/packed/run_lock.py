"""The lock that keeps a second run out of a directory: `take_lock`."""

import fcntl
import os
import socket
from pathlib import Path

from ..errors import PackedError


def take_lock(place: Path, destination: Path) -> int:
    """The descriptor of the lock file `place`, held (flock) until it is closed; its folder is made.

    A lock that its holder removed meanwhile is taken anew.

    Raises:
        PackedError: another process holds it, by its name.
        OSError: the system's own.
    """
    for _ in range(100):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(place)):
                os.ftruncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                held, lock = lock, -1
                return held
        except BlockingIOError as error:
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            raise PackedError(
                f"{place}: expected no other run on {destination}, got one: {holder}. "
                "Wait for it, or stop it and run again: that resumes."
            ) from error
        except FileNotFoundError:
            continue
        finally:
            if lock >= 0:
                os.close(lock)
    raise PackedError(f"{place}: expected to take the lock, but it keeps disappearing.")
