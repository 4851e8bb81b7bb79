"""rlmath report RUN [RUN ...] [--output report.html]"""

from __future__ import annotations

import sys

from rlmath.report.command import main

if __name__ == "__main__":
    sys.exit(main())
