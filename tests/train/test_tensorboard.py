"""Curves for TensorBoard, read back from the event files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from k3train.train.metrics import All, JsonLines, read
from k3train.train.tensorboard import TensorBoard


def events(folder: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every scalar, from the record format: length (8 bytes), checksum (4), event, checksum (4)."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value if value.HasField("simple_value")]
            data = data[16 + length :]
    return found


def test_one_curve_per_layer_and_none_for_texts(tmp_path: Path):
    with JsonLines(tmp_path / "m.jsonl") as lines, TensorBoard(tmp_path / "tb") as board:
        writer = All([lines, board])
        writer.write(3, {"loss": np.float32(0.5), "max_logit": np.array([1.0, 2.0]), "skipped": "layer 1", "grad_norm": np.float32("nan")})
    scalars = {(tag, step): value for tag, step, value in events(tmp_path / "tb")}
    assert scalars == {("loss", 3): 0.5, ("max_logit/00", 3): 1.0, ("max_logit/01", 3): 2.0}
    assert read(tmp_path / "m.jsonl") == [{"step": 3, "loss": 0.5, "max_logit": [1.0, 2.0], "skipped": "layer 1", "grad_norm": None}]
