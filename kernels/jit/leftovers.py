"""What killed compilers left in the cache: `temporary_name`, `remove_leftovers`."""

import contextlib
import os
import re
import secrets
import time

TEMPORARY = re.compile(r"\.[0-9a-f]{64}-(\d{1,10})-[0-9a-f]{16}")
ABANDONED_AFTER_S = 3600  # where no process here has its number; one in another container may
OLD_AFTER_S = 24 * 3600  # whatever has its number: writing takes less than a second


def temporary_name(key: str) -> str:
    """Where an entry is written before it gets its own name."""
    return f".{key}-{os.getpid()}-{secrets.token_hex(8)}"


def remove_leftovers(folder: int) -> None:
    """Removes temporaries that nobody writes any more from an open folder."""
    now = time.time()
    for name in os.listdir(folder):
        match = TEMPORARY.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(OSError):  # another process was first, or it may not go: it takes room only
            age_s = now - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            if age_s > OLD_AFTER_S or (age_s > ABANDONED_AFTER_S and not _is_running(int(match[1]))):
                os.unlink(name, dir_fd=folder)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
