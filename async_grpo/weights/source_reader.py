"""Opens held weights as tensors: of a store, of a checkpoint folder, or adapters added to their base."""

from __future__ import annotations

from pathlib import Path

from async_grpo.weights.base import CheckpointSource, HeldWeights, TensorReader
from async_grpo.weights.store import WeightStore


class SourceReader:
    """Opens held weights again and again; keeps a store mapped for as long as its file is the same."""

    def __init__(self) -> None:
        self._store: WeightStore | None = None
        self._file: tuple[Path, int] | None = None

    def open(self, held: HeldWeights) -> TensorReader:
        """The tensors of exactly that version, adapters already added to their base. Raises WeightsError if there is no
        store, WeightsReplaced if the store does not hold the version, WeightsCorrupt for adapters of another base."""
        # Both readers import torch, which the processes of the transports do without.
        if isinstance(held.source, CheckpointSource):
            from async_grpo.weights.checkpoint_folder import CheckpointReader

            return CheckpointReader(held.source)
        path = Path(held.source.path)
        file = (path, path.stat().st_ino) if path.exists() else None
        if self._store is None or file != self._file:
            self._store, self._file = WeightStore.open(path), file
        snapshot = self._store.snapshot(held.identity)
        if held.base is None:
            return snapshot
        from async_grpo.weights.lora import AdapterReader

        return AdapterReader(snapshot, held.base)
