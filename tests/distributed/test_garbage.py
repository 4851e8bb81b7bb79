"""The garbage collector of the programs in launch/."""

from __future__ import annotations

from tests.programs import run

PROGRAM = """
import gc
from rlmath.distributed import process
process.begin_program()
assert not gc.isenabled()

class Ring:
    ends = 0
    def __init__(self):
        self.me = self
    def __del__(self):
        Ring.ends += 1

stays = Ring()
Ring()
process.freeze_live_objects()
assert gc.isenabled() and Ring.ends == 1, "what was garbage before is collected"
assert not any(one is stays for one in gc.get_objects()), "what stays is not looked at again"
Ring()
gc.collect()
assert Ring.ends == 2, "what became garbage later is collected"
later = Ring()
process.skip_collection_at_exit()
assert not any(one is later for one in gc.get_objects())
print("well")
"""


def test_what_stays_is_not_looked_at_and_garbage_goes() -> None:
    assert run("-c", PROGRAM).stdout == "well\n"
