"""Work in a forked child."""

import os
import signal
import traceback


def in_child(work, seconds=30):
    """What work() returns, bytes, in a forked child; fails if it raises, or has not ended after so many seconds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            os.write(writing, work())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as results:
        answer = results.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), f"the child ended by signal {os.WTERMSIG(status)}, {signal.SIGALRM} is a timeout"
    assert status == 0
    return answer
