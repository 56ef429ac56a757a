"""Small texts and files that users and launchers wrote."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from byteps_py.errors import BytePSError, ConfigurationError, ProtocolError
from byteps_py.launch.installation import visible_gpus
from byteps_py.placement.placement_plan import entries, load_model, read_shapes
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.torch.operations.broadcasts import NotPickledError, check_lengths, packed, unpacked

from .base import Target


class ModelFile(Target):
    """A file of names and shapes is an error that names it, or can be placed, all of it."""

    cost = 10
    _rows = (["conv1.weight", [64, 3, 7, 7]], ["fc.bias", [1000]], ["scale", []])
    seeds = (
        json.dumps(_rows).encode(),
        json.dumps([_rows[0], _rows[0]]).encode(),
        json.dumps([["w", [0]], ["v", [1 << 70, 3]], ["u", [True]]]).encode(),
        json.dumps([["w", [1 << 62, 1 << 62]]]).encode(),
        json.dumps([["\ud800", [3]]]).encode(),
        b"[" * 5000,
        b"9" * 5000,
        b"{}",
        b"null",
        b'[["w", [1e5, -3]]]',
    )

    def __init__(self) -> None:
        self._turn = self._placed = 0
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        self._path = Path(name)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        self._path.write_bytes(data)
        try:
            shapes = read_shapes(str(self._path))
            listed = entries(shapes)
        except ConfigurationError as error:
            str(error).encode()
            return
        try:
            table = PlacementTable([(1, 1), (2, 3)], 4 << 20)
            placed = [entry for entry in listed if entry.nbytes < 1 << 28]  # more is many partitions
            table.add(placed)
        except BytePSError as error:
            str(error).encode()
            return
        self._placed += 1
        for key, nbytes, _ in placed:
            assert sum(part.length for part in table.partitions(key)) == nbytes
        if self._turn % 64 == 0:
            try:
                load_model(data.decode(errors="replace"))
            except ConfigurationError:
                return
            raise AssertionError("an unknown model is known")

    def end(self) -> None:
        assert self._placed

    def close(self) -> None:
        self._path.unlink()


class GpuList(Target):
    """However devices are listed, there are as many as entries before the first that is none."""

    seeds = (b"0,1,2,3", b"", b"all", b"none", b"void", b"-1", b"0,-1,2", b"GPU-1,MIG-2/3/4", b" 0 , 1 ", b"NoDevFiles")

    def feed(self, data: bytes) -> None:
        text = os.fsdecode(data.replace(b"\0", b""))
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            found = visible_gpus({name: text}, lambda: 77)
            assert found == 77 or 0 <= found <= text.count(",") + 1
            assert found != 77 or "," in text or (name != "CUDA_VISIBLE_DEVICES" and text.strip() == "all")


def _snapshot() -> dict[str, object]:
    table = PlacementTable([(7, 6), (8, 2)], 4096)
    table.add([(1, 8192, 4), (2, 16384, 4)])
    return table.snapshot()


_SNAPSHOT = _snapshot()


class Snapshot(Target):
    """A placement table's snapshot is one, and comes back as it was, or is a ProtocolError."""

    seeds = (
        json.dumps(_SNAPSHOT).encode(),
        *[
            json.dumps(_SNAPSHOT | change).encode()
            for change in (
                {"servers": []}, {"servers": [[7, -1]]}, {"partition_bytes": 0}, {"tensors": [[1, 3, 2, []]]},
                {"tensors": [[1 << 64, 4, 4, [[0, 4, 7]]]]}, {"servers": [[1e400, 1]]}, {"tensors": [[1, 0, 1, []]]},
            )
        ],
    )  # fmt: skip

    def __init__(self) -> None:
        self._restored = 0

    def feed(self, data: bytes) -> None:
        try:
            snapshot = json.loads(data)
        except (ValueError, RecursionError):
            return
        try:
            table = PlacementTable.restore(snapshot)
        except ProtocolError as error:
            str(error)
            return
        again = json.loads(json.dumps(table.snapshot()))
        assert PlacementTable.restore(again).snapshot() == again
        self._restored += 1

    def end(self) -> None:
        assert self._restored


class Objects(Target):
    """What surrounds a rank's pickled object: how long it is, and why there is none."""

    seeds = (packed(None)[0], packed(lambda: 0)[0], b"f", b"f\xff", b"", bytes(range(24)), bytes(8))

    def feed(self, data: bytes) -> None:
        lengths = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data) - 7, 8)]
        with contextlib.suppress(ProtocolError):
            check_lengths(lengths, 1 + len(data) % 3, sum(lengths))
            assert all(length >= 0 for length in lengths)
        if data[:1] != packed(None)[0][:1]:  # what pickle makes of the rest is its own affair
            try:
                unpacked(data)
            except (NotPickledError, ProtocolError) as error:
                str(error).encode()
            else:
                raise AssertionError("an object came out of nothing")
