"""A weight sync with the checks that the settings ask for."""

from __future__ import annotations

from rlmath.config import SyncConfig
from rlmath.sync.probe import Probe
from rlmath.sync.transfer import SyncReport, WeightSync


class CheckedSync:
    """Call it to bring the engine's weights up to the policy's; then, with the engine awake, `probe_engine`.

    What is due every N syncs is done at the first one, too.
    """

    def __init__(self, sync: WeightSync, probe: Probe, settings: SyncConfig) -> None:
        self._sync = sync
        self._probe = probe
        self._settings = settings
        self.count = 0
        """Syncs so far, those of the run that this one goes on from included."""
        self.report: SyncReport | None = None
        """Of the last sync."""

    def _due(self, every: int) -> bool:
        return every > 0 and (self.count - 1) % every == 0

    def __call__(self) -> None:
        self.count += 1
        self.report = self._sync.run(check=self._due(self._settings.checksum_every))
        if self._due(self._settings.probe_every):
            self._probe.ask_policy()

    def probe_engine(self) -> dict[str, float]:
        """Metrics of the probe, where it is due. RuntimeError on all ranks where the two sides differ too much."""
        if not self._due(self._settings.probe_every):
            return {}
        result, threshold = self._probe.ask_engine(), self._settings.probe_threshold
        if not result.mean <= threshold:
            raise RuntimeError(
                f"the probe after weight sync {self.count}: log-probs of engine {result.engine} and of the policy "
                f"differ by {result.mean:.3g} nats per token (at most {result.largest:.3g}); sync.probe_threshold is "
                f"{threshold:g}. The engine does not have the policy's weights, or computes otherwise: what it "
                "samples is not on-policy"
            )
        return {"sync/probe_difference": result.mean, "sync/probe_difference_max": result.largest}

    def metrics(self) -> dict[str, float]:
        """What the last sync moved on this rank (GiB), and the seconds of it that vLLM spent packing matrices."""
        assert self.report is not None
        moved = {
            "copied": self.report.bytes_copied,
            "sent": self.report.bytes_sent,
            "received": self.report.bytes_received,
        }
        return {f"sync/{name}_gib": count / 2**30 for name, count in moved.items()} | {
            "seconds/sync_packing": self.report.packing_seconds
        }
