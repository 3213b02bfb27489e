"""Runs one program and leaves none of its processes behind, daemonised ones included.

    python -I -S reap.py CONTROL_FD ARGV...

It is a child subreaper: whatever ARGV starts stays below it, setsid and double fork or not. When
ARGV ends, or the other end of CONTROL_FD is closed (also by the death of the process that holds
it), every descendant is killed. The exit code is ARGV's; 128 + n when signal n killed it.
Not a security boundary: a program of the same user can kill its reaper.
Invariant: when this program exits by itself, none of its descendants is alive.
"""

import _signal  # type: ignore[import-not-found]  # signal pulls in enum: 3 ms of every episode
import ctypes
import os
import select
import sys

PR_SET_CHILD_SUBREAPER = 36
SPAWN_FAILED = 127


def children() -> list[int]:
    """Process ids of our direct children (orphaned descendants have become direct ones)."""
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # ended while we looked
        if parent == me:
            found.append(int(name))
    return found


def kill_all() -> None:
    """Kills and reaps until there is nothing left to reap."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for pid in children():
                os.kill(pid, _signal.SIGKILL)  # ours and not reaped: the id cannot be another's
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def wait_for(pid: int, control: int) -> int:
    """The exit code of `pid`, or that of a kill once `control` is closed."""
    watch = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if watch in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return code if code >= 0 else 128 - code
        if control in ready:
            return 128 + int(_signal.SIGKILL)


def main() -> int:
    control, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(control, False)
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit("reap: prctl(PR_SET_CHILD_SUBREAPER) failed; Linux 3.4 or later is needed")
    ignored = (_signal.SIGPIPE, _signal.SIGXFSZ)  # by Python, not by the program
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=ignored)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return SPAWN_FAILED
    code = wait_for(pid, control)
    kill_all()
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
