"""deploy/monitoring: every query can be parsed, and names metrics and labels that pages have; Prometheus's own tool
checks the files, and alerts come when they should."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from byteps_py.prometheus.metrics import BY_NAME, LABELS

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
#: What Grafana puts in the place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$job": "some job"}
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed: apt-get install --no-install-recommends prometheus"
)


def queries() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in ALERTS]
    for variable, text in VARIABLES.items():
        found = [query.replace(variable, text) for query in found]
    return found


def selectors(node: Any) -> list[Any]:
    """All vector selectors below a node of the parser."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    parts += list(getattr(node, "args", []))
    return [found for part in parts if part is not None for found in selectors(part)]


def test_there_are_queries() -> None:
    assert len(PANELS) >= 20
    assert len(ALERTS) >= 6


@pytest.mark.parametrize("query", queries())
def test_a_query_names_metrics_and_labels_that_there_are(query: str) -> None:
    found = selectors(promql_parser.parse(query))
    assert found
    for selector in found:
        metric = BY_NAME[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= {*LABELS, *metric.extra}
        if metric.kind == "counter" and "rate(" not in query and "increase(" not in query:
            assert query.startswith(("min(", "max("))  # a total is shown as such


def test_a_query_of_a_metric_that_there_is_not_would_be_found() -> None:
    (selector,) = selectors(promql_parser.parse('sum(rate(byteps_no_such_total{job="a"}[1m])) > 3'))
    assert selector.name not in BY_NAME


def test_panels_have_titles_and_numbers_of_their_own() -> None:
    for key in ("title", "id"):
        values = [panel[key] for panel in PANELS]
        assert len(set(values)) == len(values)


@needs_promtool
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    for what, name in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(["promtool", "check", what, FOLDER / name], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ",".join(f'{label}="{value}"' for label, value in {"job": "j", **labels}.items())
    return {"series": f"byteps_{name}{{{text}}}", "values": values}


RUNNING = series("job_state", "1x60", role="scheduler", state="running")
SERVER = {"role": "server", "machine": "cpu-a:1"}
#: (alert, series of a value a minute, minutes after which it comes, minutes at which it is not there)
CASES = [
    ("BytePSNoStep", [RUNNING, series("last_step_timestamp_seconds", "0+60x9 540x50", rank="0")], 16, 12),
    ("BytePSRankAwaited", [series("awaited_seconds", "0x9 10x1 70x40", awaited_rank="3")], 12, 10),
    ("BytePSSlowMember", [series("slow_members", "0x9 1x50", role="scheduler")], 14, 10),
    ("BytePSMemberLost", [series("member_up", "1x9 0x50", **SERVER)], 12, 8),
    ("BytePSMemberLost", [series("member_up", "1x9 0x50", **SERVER)], 12, 40),
    ("BytePSRecovery", [series("epoch", "1x9 2x50", role="scheduler")], 11, 8),
    ("BytePSRecovery", [series("recoveries_total", "0x9 1x50", rank="0")], 11, 40),
    ("BytePSNoDurableShadow", [series("shadow_survives_loss", "1x9 0x50", role="scheduler")], 24, 12),
    ("BytePSExposedCommunication", [series("exposed_communication_ratio", "0.1x9 0.6x50", rank="0")], 24, 12),
]  # fmt: skip


@needs_promtool
def test_alerts_come_when_they_should_and_not_before(tmp_path: Path) -> None:
    tests = []
    for name, given, comes, silent in CASES:
        query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
        tests.append({
            "interval": "1m", "name": name, "input_series": given,
            "promql_expr_test": [
                {"expr": query, "eval_time": f"{at}m", "exp_samples": [{"labels": "{}", "value": value}]}
                for at, value in ((comes, 1), (silent, 0))
            ],
        })  # fmt: skip
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name for name, *_ in CASES} == {rule["alert"] for rule in ALERTS}
