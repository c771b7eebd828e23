import importlib.util
import json

import pytest

from trtpd.kv_transfer.factory import TRANSPORTS
from trtpd.perf.kv_bench import main


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_case_is_measured_and_reported_as_json(capfd, transport):
    if transport == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed")
    options = ["--transports", transport, "--shapes", "smollm2", "--tokens", "40", "--repeats", "1"]
    assert main(["--json", *options, "--prefill-tokens-per-s", "100000"]) == 0
    found = json.loads(capfd.readouterr().out)
    cases = [(row["digests"], row["fragmented"]) for row in found["rows"]]
    assert cases == [(d, f) for d in (0, 1) for f in (0, 1)]
    assert all(row["ratio"] > 0 and row["megabytes"] > 0 for row in found["rows"])
    assert [case["transport"] for case in found["overlap"]] == [transport]


def test_no_room_is_one_clear_line(capsys):
    assert main(["--json", "--shapes", "smollm2", "--tokens", "100000000", "--repeats", "1"]) == 1
    assert "fewer --tokens" in capsys.readouterr().err
