from __future__ import annotations

import pytest

from trtpd.cli import main
from trtpd.errors import InputError
from trtpd.perf.option_lists import parts


def test_a_list_is_taken_apart_and_one_that_was_not_given_is_empty():
    assert parts(" 1, 4 ", "--concurrency") == ("1", "4")
    assert parts(None, "--concurrency") == ()


@pytest.mark.parametrize(("text", "fault"), [("", "names nothing"), (" , ", "names nothing"), ("1,,4", "empty place")])
def test_a_list_that_names_nothing_is_refused_with_its_option(text, fault):
    with pytest.raises(InputError, match=rf"--rates is .*{fault}"):
        parts(text, "--rates")


@pytest.mark.parametrize(
    ("command", "option"),
    [("perf-analyzer", "--concurrency"), ("perf-analyzer", "--rates"), ("profile BUILD", "--roles"),
     ("profile BUILD", "--paths"), ("compare BUILD --workload chat", "--rates"),
     ("compare BUILD --workload chat", "--chunks")],
)  # fmt: skip
@pytest.mark.parametrize("given", [",", ""])
def test_an_empty_list_is_bad_usage_and_not_a_run_with_defaults(command, option, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), option, given]) == 2
    assert f"{option} is {given!r}" in capsys.readouterr().err
