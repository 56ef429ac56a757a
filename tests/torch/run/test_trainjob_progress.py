"""RunState tells Kubeflow Trainer how far a TrainJob is: what a real HTTP server gets."""

from __future__ import annotations

import http.server
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import byteps_py as bps
from byteps_py.config.launchers import TrainJobStatus
from byteps_py.torch.run.trainjob_progress import PERIOD_S, TrainJobProgress

STATUS = json.loads((Path(__file__).parents[2] / "project" / "crds" / "trainjob.json").read_text())["schema"][
    "properties"
]["status"]["properties"]["trainerStatus"]


class Controller(http.server.BaseHTTPRequestHandler):
    """The end of Kubeflow Trainer that takes progress."""

    got: list[tuple[str, dict[str, Any]]]
    answer: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Authorization"], json.loads(body)))
        self.send_response(self.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="controller")
def _controller() -> Iterator[type[Controller]]:
    handler = type("OneController", (Controller,), {"got": [], "answer": 200})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_address[1]}/status"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def train(epochs: int) -> None:
    bps.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = bps.RunState(model, optimizer, loader=torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
    for _ in run.epochs(epochs):
        for batch in run:
            model(batch).sum().backward()
            optimizer.step()
    bps.shutdown()


def in_trainjob(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> None:
    (folder / "token").write_text("secret-token\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(folder / "token"))


def test_a_run_state_tells_its_progress(controller: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_trainjob(monkeypatch, tmp_path, controller.url)
    train(2)
    assert {authorization for authorization, _ in controller.got} == {"Bearer secret-token"}
    told = [body["trainerStatus"] for _, body in controller.got]
    for each in told:
        assert each.keys() <= STATUS["properties"].keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", each["lastUpdatedTime"])
    assert [each["progressPercentage"] for each in told] == [0, 100]
    assert told[-1]["estimatedRemainingSeconds"] == 0


def test_the_rest_is_estimated_from_what_this_process_has_done(controller: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    now_s = 100.0
    progress = TrainJobProgress(TrainJobStatus(controller.url, "", str(tmp_path / "token")), lambda: now_s)
    progress.report(0.5)  # it goes on from there
    now_s += 30.0
    progress.finish_sending()
    progress.report(0.6)
    progress.finish_sending()
    progress.report(0.61)  # too early for another one
    now_s += PERIOD_S
    progress.finish()
    told = [body["trainerStatus"] for _, body in controller.got]
    assert [each["progressPercentage"] for each in told] == [50, 60, 100]
    assert "estimatedRemainingSeconds" not in told[0]
    assert told[1]["estimatedRemainingSeconds"] == 120


def test_training_goes_on_where_nothing_can_be_told(
    controller: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller.answer = 403
    in_trainjob(monkeypatch, tmp_path, controller.url)
    with caplog.at_level(logging.WARNING):
        train(1)
    assert len(controller.got) == 2
    assert caplog.text.count("the progress of the TrainJob can't be told to") == 1


def test_elsewhere_nothing_is_told(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    train(1)
    assert not controller.got
