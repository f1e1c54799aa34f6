"""What every test process starts with."""

from __future__ import annotations

import signal
import threading

# A shell has what it starts in the background ignore Ctrl-C, and so would every command that the tests start and interrupt.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
