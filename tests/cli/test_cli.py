"""The command line: one line and the right exit status for every kind of end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from trtpd import cli, commands, console
from trtpd.errors import BuildError, SpecError

COMMANDS = ["fetch", "init", "lint", "build", "keys", "serve", "generate", "status", "profile", "doctor"]


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = cli.main(args)
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    status, out, _ = run(command, "--help", capsys=capsys)
    assert status == 0
    assert "example: trtpd" in out
    assert "--json" in out


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("frobnicate",),
        ("fetch", "gpt4"),
        ("serve", "B", "--http", "99999"),
        ("serve", "B", "--drain-s", "-1"),
        ("serve", "B", "--drain-s", "nan"),
        ("generate", "hello", "--max-tokens", "many"),
        ("build",),
        ("profile", "B", "--budget-s", "0"),
        ("profile", "no-such-build"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(args, capsys):
    status, out, err = run(*args, capsys=capsys)
    assert status == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_bad_usage_with_json_is_one_json_object_too(capsys):
    for args in (
        ("generate", "--json", "--max-tokens", "x", "hi"),
        ("serve", "B", "--http", "99999", "--js"),
        ("--json",),
    ):
        status, out, err = run(*args, capsys=capsys)
        assert status == 2
        found = json.loads(out)
        assert found["code"] == "usage"
        assert found["error"] == err.strip()


@pytest.mark.parametrize("url", ["", "nonsense", "http://127.0.0.1:8001", "127.0.0.1:99999"])
@pytest.mark.parametrize(
    "command", [("status",), ("generate", "hi"), ("bench", "--workload", "chat"), ("perf-analyzer",)]
)
def test_an_address_that_can_not_be_is_bad_usage_wherever_it_is_taken(command, url, capsys):
    status, _, err = run(*command, "--url", url, capsys=capsys)
    assert status == 2
    assert "argument --url" in err


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (SpecError("pools.decode.tpp is unknown"), 2, "invalid_pipeline"),
        (BuildError("no space"), 1, "build_failed"),
        (PermissionError(13, "Permission denied", "/x"), 1, "os_error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oops"), 1, "internal"),
    ],
)
def test_an_error_ends_in_one_line_and_its_status(monkeypatch, capsys, error, status, code):
    def fail(_args):
        raise error

    monkeypatch.setattr(commands, "doctor", fail)
    found, out, err = run("doctor", "--json", capsys=capsys)
    assert found == status
    assert json.loads(out)["code"] == code
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_verbose_adds_the_traceback_behind_the_line(monkeypatch, capsys):
    def fail(_args):
        raise BuildError("no space")

    monkeypatch.setattr(commands, "doctor", fail)
    _, _, err = run("doctor", "-v", capsys=capsys)
    assert err.splitlines()[0] == "trtpd doctor: no space"
    assert "Traceback" in err


def test_init_writes_a_file_that_lint_passes_and_refuses_to_overwrite_it(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    pipeline = tmp_path / "pipeline.yaml"
    args = ("init", "--model", str(tmp_path), "--engine", "emulated", "-o", str(pipeline))
    assert run(*args, capsys=capsys)[0] == 0
    status, out, _ = run("lint", str(pipeline), "--json", capsys=capsys)
    assert status == 0, out
    status, _, err = run(*args, capsys=capsys)
    assert status == 2
    assert "--force" in err


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def test_keys_are_made_once_and_their_secrets_are_the_owners_alone(tmp_path: Path, capsys):
    folder = tmp_path / "keys"
    assert run("keys", "-o", str(folder), capsys=capsys)[0] == 0
    secrets = list(folder.glob("*secret*"))
    assert secrets
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    status, _, err = run("keys", "-o", str(folder), capsys=capsys)
    assert status == 1
    assert "holds keys already" in err


def test_progress_away_from_a_terminal_is_plain_lines_that_end_at_100(capsys):
    with console.progress() as report:
        for done in range(0, 101, 10):
            report("download", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "download: 0 %"
    assert lines[-1] == "download: 100 %"
    assert len(lines) <= 3


def test_a_table_shows_brackets_as_they_are(capsys):
    console.table(["mend"], [["pip install 'trtpd[mpi]'"]])
    assert "trtpd[mpi]" in capsys.readouterr().out


def test_a_full_disk_behind_stdout_is_one_line():
    script = f"{sys.executable} -P -m trtpd.cli doctor --json >/dev/full"
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert len(run.stderr.strip().splitlines()) == 1
    assert "No space left on device" in run.stderr


def test_a_prompt_that_is_not_utf8_is_bad_input(capsys):
    status, _, err = run("generate", "caf\udce9", capsys=capsys)
    assert status == 2
    assert "UTF-8" in err


def shell(script: str) -> subprocess.CompletedProcess[str]:
    command = script.replace("TRTPD", f"{sys.executable} -P -m trtpd.cli")
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("given", ["PYTHONIOENCODING=utf-8:strict TRTPD generate -", "TRTPD generate -"])
def test_standard_input_that_is_not_utf8_is_bad_input(given):
    found = shell(f"printf '\\377abc' | {given}")
    assert found.returncode == 2
    assert "UTF-8" in found.stderr


def test_an_output_of_another_encoding_gets_text_escaped_and_json_that_can_be_read(tmp_path: Path):
    name = str(tmp_path / "caf\u00e9-\U0001f3f4")
    found = shell(f"PYTHONIOENCODING=ascii TRTPD lint --json {name}")
    assert found.returncode == 2
    assert name in json.loads(found.stdout)["error"]


def test_closed_standard_streams_are_no_fault_of_ours():
    found = shell("TRTPD lint /dev/null <&- >&-")
    assert found.returncode == 2
    assert "must hold keys" in found.stderr


def test_ctrl_c_while_commands_are_imported_is_one_line():
    """The interrupt comes from inside the first import of what the commands need."""
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'trtpd.command_line': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from trtpd.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (130, "trtpd: interrupted\n")


def test_the_beginning_imports_nothing_of_weight():
    script = "import sys, trtpd.cli; print(*sorted(n for n in sys.modules if n.partition('.')[0] in ('trtpd', 'rich')))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout.split() == ["trtpd", "trtpd.cli"]


@pytest.mark.parametrize("args", [("--help",), ("doctor", "--help"), ("doctor",), ("doctor", "--json")])
def test_a_reader_that_has_left_is_status_1_and_no_word(args):
    left, out = os.pipe()
    os.close(left)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(out, "w") as nobody:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "trtpd.cli", *args],
            stdout=nobody,
            stderr=subprocess.PIPE,
            env=buffered,
            timeout=60,
            check=False,
        )
    assert (found.returncode, found.stderr) == (1, b"")
