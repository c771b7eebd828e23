import json

from trtpd.perf.kv_bench import main


def test_every_case_is_measured_and_reported_as_json(capsys):
    assert main(["--json", "--tokens", "40", "--repeats", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["fragmented"], row["digests"]) for row in rows] == [(f, d) for f in (0, 1) for d in (0, 1)]
    assert all(row["ratio"] > 0 and row["megabytes"] > 0 for row in rows)


def test_no_room_is_one_clear_line(capsys):
    assert main(["--json", "--tokens", "100000000", "--repeats", "1"]) == 1
    assert "/dev/shm" in capsys.readouterr().err
