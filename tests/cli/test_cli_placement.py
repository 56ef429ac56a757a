"""`bps placement` and `bps env`, as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from byteps_py.cli.__main__ import main
from byteps_py.config.variables import VARIABLES

RESNET50_BYTES = 4 * 25_557_032


def _json(capsys, *arguments):
    assert main(["placement", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_what_is_promised(capsys):
    result = _json(capsys, "--model", "resnet50", "-n", "8", "-k", "4")
    assert set(result) == {"n", "k", "servers", "time_over_optimum"}
    assert (result["n"], result["k"]) == (8, 4)
    servers = result["servers"]
    assert [s["kind"] for s in servers] == ["cpu"] * 4 + ["gpu"] * 8
    assert all(set(s) == {"kind", "bytes", "share", "formula_share"} for s in servers)
    assert sum(s["bytes"] for s in servers) == RESNET50_BYTES
    assert [s["formula_share"] for s in servers] == [14 / 88] * 4 + [4 / 88] * 8
    assert all(s["share"] == s["bytes"] / RESNET50_BYTES for s in servers)
    assert 1 <= result["time_over_optimum"] < 1.01


@pytest.mark.parametrize(("n", "k", "empty"), [(4, 4, 4), (2, 5, 5), (1, 0, 1), (1, 2, 3)])
def test_servers_that_get_nothing_are_listed(capsys, n, k, empty):
    result = _json(capsys, "--model", "resnet50", "-n", str(n), "-k", str(k))
    servers = result["servers"]
    assert [s["kind"] for s in servers] == ["cpu"] * k + ["gpu"] * n
    nothing = [s for s in servers if s["bytes"] == 0]
    assert len(nothing) == empty
    assert all(s["share"] == s["formula_share"] == 0 for s in nothing)
    assert 1 <= result["time_over_optimum"] < 1.01


def test_table_for_reading(capsys):
    assert main(["placement", "--model", "gpt2", "-n", "4", "-k", "2"]) == 0
    output = capsys.readouterr().out
    assert "497,759,232 bytes in 148 tensors" in output
    assert "30.0000%" in output
    assert "1.2000 M/B" in output
    assert "gain over ring          1.250" in output
    assert "gain over servers only  1.667" in output


@pytest.mark.parametrize(
    ("n", "k", "sentence"),
    [
        (4, 0, "gain over servers only  –"),
        (2, 4, "2 of 4 CPU machines hold nothing"),
        (4, 4, "GPU machines hold nothing"),
        (1, 1, "needs no network"),
    ],
)
def test_special_clusters_are_explained(capsys, n, k, sentence):
    assert main(["placement", "--model", "resnet50", "-n", str(n), "-k", str(k)]) == 0
    assert sentence in capsys.readouterr().out


def test_own_shapes_and_partition_bytes(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('[["w", [1000, 1000]], ["b", [1000]]]')
    result = _json(capsys, "--shapes", str(path), "-n", "2", "--partition-bytes", "8192")
    assert sum(s["bytes"] for s in result["servers"]) == 4_004_000
    assert result["k"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "alexnet", "-n", "2"], "known models are resnet50, vgg16, bert-large, gpt2"),
        (["--model", "gpt2", "-n", "0"], "must be at least 1, got 0"),
        (["--model", "gpt2", "-n", "2", "-k", "-1"], "can't be negative"),
        (["--model", "gpt2", "-n", "2", "--partition-bytes", "5000"], "--partition-bytes 5000"),
        (["--model", "gpt2", "-n", "2", "--partition-bytes", "-1"], "--partition-bytes -1"),
        (["--shapes", "no-such-file.json", "-n", "2"], "no-such-file.json can't be read"),
    ],
)
def test_errors_say_what_is_wrong(capsys, arguments, message):
    assert main(["placement", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bps: ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["placement", "-n", "2"], ["placement", "--model", "gpt2"]])
def test_wrong_command_lines_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: bps" in capsys.readouterr().err


def test_nothing_heavy_is_imported():
    program = (
        "import sys\n"
        "from byteps_py.cli.__main__ import main\n"
        "code = main(['placement', '--model', 'resnet50', '-n', '4', '-k', '2', '--json'])\n"
        "heavy = {'torch', 'grpc', 'zmq', 'numba', 'numpy', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m byteps_py.cli placement --model vgg16 -n 64 -k 9 | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_env_lists_every_variable(capsys):
    assert main(["env"]) == 0
    plain = capsys.readouterr().out
    assert main(["env", "--markdown"]) == 0
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    rows = table.splitlines()
    assert len(rows) == 2 + len(VARIABLES)
    for variable, row in zip(VARIABLES, rows[2:], strict=True):
        assert all(f"`{name}`" in row and name in plain for name in variable.names)
        assert variable.meaning in row
        assert row.count("|") == 5
        assert variable.detail in notes
        assert re.sub(r"\[(.*?)\]\(.*?\)", r"\1", variable.detail) in plain  # without links
    assert "| `BYTEPS_FUSION_BYTES` | `1048576` |" in "\n".join(rows)
    assert "| `BYTEPS_PARTITION_BYTES` |  |" in "\n".join(rows)  # follows the links
    assert "| `DMLC_PS_ROOT_PORT` |  |" in "\n".join(rows)


def test_placement_behind_unequal_links_is_explained(capsys):
    links = ["--gpu-mbit", "400,400,400,200", "--cpu-mbit", "400,100"]
    assert main(["placement", "--model", "resnet50", *links]) == 0
    text = capsys.readouterr().out
    assert "The limit is a GPU machine's link of 200 Mbit/s" in text
    assert re.search(r"formula's shares +9\.814 s", text)
    assert re.search(r"^ +5  gpu +200 +0  +0\.0000%", text, re.MULTILINE)
    assert main(["placement", "--model", "resnet50", *links, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [server["formula_share"] for server in answer["servers"]] == pytest.approx(
        [10 / 29, 5 / 58, *[11 / 58] * 3, 0]
    )
    assert answer["time_over_optimum"] == pytest.approx(1, abs=0.001)
    assert main(["placement", "--model", "resnet50", "--gpu-mbit", "400,300,300"]) == 0
    assert "no other shares are faster" in capsys.readouterr().out


def test_equal_and_unequal_links_do_not_mix(capsys):
    assert main(["placement", "--model", "vgg16", "-n", "4", "--cpu-mbit", "400"]) != 0
    assert "--gpu-mbit with --cpu-mbit" in capsys.readouterr().err


def test_a_rate_that_is_no_number_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["placement", "--model", "vgg16", "--gpu-mbit", "400,abc"])
    assert "--gpu-mbit: takes numbers with commas between them, got '400,abc'" in capsys.readouterr().err
