"""Weights to the store: one version, one view per precision, all from the same BF16 tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from motley_api import keys
from motley_weights.errors import StoreError, WeightsError
from motley_weights.store import WeightStore
from torch import Tensor

log = logging.getLogger(__name__)

VIEWS = keys.STANDARD_VIEWS
KEEP_VERSIONS = 4  # an engine that loads while the trainer goes on has this many steps to finish


class Publisher:
    """rank 0's hand on the store. small_files: config.json and the tokenizer's."""

    def __init__(self, store: WeightStore, small_files: Mapping[str, bytes], *, views: Sequence[str] = VIEWS) -> None:
        self._store = store
        self._small_files = small_files
        self._views = tuple(views)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Into every view whose pointer has not reached it. Returns reasons of views that failed: they keep their old
        version, the others go on. `tensors` is exhausted in any case: on several ranks it is a collective."""
        behind = [view for view in self._views if self._at(view) < version]
        if not behind:
            for _ in tensors:
                pass
            return {}
        report = self._store.publish(version, tensors, model_dir_files=self._small_files, views=behind)
        for view, reason in report.failed.items():
            log.error("event=view_failed view=%s version=%d error=%r", view, version, reason)
        return dict(report.failed)

    def lacking(self, version: int) -> list[str]:
        """Views that do not have the version: before `rewind` it must be published there.

        Errors: StoreError when it is gone from a view whose pointer is beyond it.
        """
        lacking = [view for view in self._views if version not in self._store.versions(view)]
        gone = [view for view in lacking if self._at(view) > version]
        if gone:
            raise StoreError(
                f"views {', '.join(gone)}: version {version} is not complete, and the pointer is beyond it"
            )
        return lacking

    def rewind(self, version: int) -> None:
        """Moves every pointer that is ahead of `version` back to it. Errors: StoreError when a view lacks it."""
        for view in self._views:
            ahead = self._at(view)
            if ahead > version:
                self._store.rewind(view, version)
                log.info("event=pointer_rewound view=%s from=%d to=%d", view, ahead, version)

    def _at(self, view: str) -> int:
        latest = self._store.latest(view)
        return -1 if latest is None else latest

    def newest_common(self) -> int:
        """Newest version that every view's pointer has reached; -1 before the first."""
        return min(self._at(view) for view in self._views)

    def prune(self, checkpoints: Collection[int]) -> None:
        """Keeps the weights of the checkpoints, which a resume goes back to, and the newest few, which an engine may be
        loading. A store that cannot remove now is asked again after the next version: training does not wait for it."""
        try:
            self._store.prune(KEEP_VERSIONS, also=checkpoints)
        except (WeightsError, OSError) as error:
            log.warning("event=prune_failed error=%r", str(error))


def bf16(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, tensor.to(torch.bfloat16)) for name, tensor in tensors)
