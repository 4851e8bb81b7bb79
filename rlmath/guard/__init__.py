"""What ends a run in order: signals that ask it to save and stop, ranks that died, ranks that hang.

exit_status  the codes a run ends with, and the file that tells the last one
signals      SIGTERM and SIGUSR1 ask the run to save and stop, within a bounded time
heartbeat    every rank tells that it lives, watches its neighbours, and ends with them
pulse        what a rank tells about itself
verdict      why a run is over, known to all ranks
stacks       where every thread of a process is
"""
