"""What programs write to a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios


def on_terminal(program: str, columns: int, status: int = 0) -> str:
    """What a Python program writes to a terminal of so many columns until it ends with a status."""
    controller, terminal = pty.openpty()
    size = columns.to_bytes(2, sys.byteorder)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, (24).to_bytes(2, sys.byteorder) + size + bytes(4))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=os.environ
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(controller)
    assert process.wait() == status, output
    return output.decode()


def shown_lines(written: str) -> list[str]:
    """What stands on the terminal's lines at the end."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown_line = ""
        for part in line.split("\r"):
            shown_line = part + shown_line[len(part) :]
        lines.append(shown_line.rstrip())
    return lines
