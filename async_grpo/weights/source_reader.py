"""Opens `HeldWeights` as tensors: from a store, from a checkpoint folder, or as adapters merged into their base."""

from __future__ import annotations

from pathlib import Path

from async_grpo.weights.base import CheckpointSource, HeldWeights, TensorReader
from async_grpo.weights.store import WeightStore


class SourceReader:
    """Opens one version after another. Keeps the store mapped until its file is replaced."""

    def __init__(self) -> None:
        self._store: WeightStore | None = None
        self._mapped_file: tuple[Path, int] | None = None

    def open(self, held: HeldWeights) -> TensorReader:
        """Return a reader of exactly this version, with adapters already merged.

        Raises WeightsError if there is no store, WeightsReplaced if the version is no longer in it, and WeightsCorrupt
        if adapters belong to another base.
        """
        # The checkpoint and adapter readers import torch, so they are imported only where needed: the transport's
        # processes run without torch.
        if isinstance(held.source, CheckpointSource):
            from async_grpo.weights.checkpoint_folder import CheckpointReader

            return CheckpointReader(held.source)

        snapshot = self._map_store(Path(held.source.path)).snapshot(held.identity)
        if held.base is None:
            return snapshot

        from async_grpo.weights.lora import AdapterReader

        return AdapterReader(snapshot, held.base)

    def _map_store(self, path: Path) -> WeightStore:
        """Map the store, or reuse the mapping. A restarted receiver may have created a new file at the same path."""
        file = (path, path.stat().st_ino) if path.exists() else None
        if self._store is None or file != self._mapped_file:
            self._store = WeightStore.open(path)
            self._mapped_file = file
        return self._store
