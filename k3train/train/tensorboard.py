"""The metrics in TensorBoard's format: `tensorboard --logdir RUN/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """A `MetricWriter` of scalars; an array over layers becomes one curve per layer, `name/07`."""

    def __init__(self, folder: Path, *, resume_step: int = 0):
        """Goes on in the folder; TensorBoard hides what an interrupted run wrote beyond `resume_step`."""
        self._folder, self._purge = folder, resume_step + 1 if resume_step else None
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """See `MetricWriter.write`; what is no finite number is left out."""
        if self._writer is None:  # with the first figures, as in `JsonLines`
            from tensorboardX import SummaryWriter  # a tenth of a second

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge, max_queue=1000, flush_secs=30)
        for name, value in values.items():
            array = np.asarray(value)
            if array.dtype.kind not in "fiub":
                continue
            for index in np.ndindex(array.shape):
                if not np.isfinite(array[index]):
                    continue
                tag = "/".join((name, *(f"{i:02}" for i in index)))
                self._writer.add_scalar(tag, float(array[index]), step)

    def close(self) -> None:
        """See `MetricWriter.close`."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
