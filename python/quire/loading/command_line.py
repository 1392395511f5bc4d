"""How a program of quire ends."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the code that main() returns. If the reader of its output has ended before, as in `| head`,
    it ends without a message, with the code of a process that SIGPIPE has ended."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        code = 128 + signal.SIGPIPE
    sys.exit(code)
