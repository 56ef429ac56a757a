"""A damaged checkpoint of `bps checkpoint` is refused, and the older one that can be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from byteps_py.errors import CheckpointError
from byteps_py.torch.gradients.stored_checkpoint import _StoredCheckpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", [0, 10, None])
def test_damaged_metadata_names_the_older_step(tmp_path: Path, size: int | None) -> None:
    for step in (1, 2, 3):
        state_dict_saver.save({"model.w": torch.ones(3)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    assert _StoredCheckpoint(tmp_path, 3).shape("model.w") == (3,)
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    for damaged in (".metadata", "__0_0.distcp"):
        path = tmp_path / "step-3" / damaged
        data = path.read_bytes()
        if size is None:
            path.unlink()
        else:
            path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"Nothing was loaded\. Step 1 there is intact: move step-3 away"):
            _StoredCheckpoint(tmp_path, 3)
        path.write_bytes(data)
