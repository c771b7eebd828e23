"""A benchmark's folder: what was asked and what was seen, from which the report can be made again without a server.

FOLDER/
  run.json  workload.jsonl.gz  records.jsonl.gz    always
  refused.txt                                      in place of a report, why there is none
  the files of a report (report.py)
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from trtpd.build.files import ELSEWHERE, translated, write_whole
from trtpd.errors import InputError
from trtpd.perf.bench_result import About, Taken
from trtpd.perf.client import Run
from trtpd.perf.records import load_records, save_records
from trtpd.perf.slo import FixedSlo
from trtpd.perf.workload import load as load_workload
from trtpd.perf.workload import save as save_workload

PLOTS = ("latency", "over_time", "stages", "slo_scale")
RUN, WORKLOAD, RECORDS, REFUSED = "run.json", "workload.jsonl.gz", "records.jsonl.gz", "refused.txt"
REPORT = ("report.html", "report.json", "requests.csv", *(f"plots/{name}.png" for name in PLOTS))


def keep(folder: Path, taken: Taken) -> None:
    """Writes all but the report, and takes away the one of a former run. Raises InputError if it can't."""
    with translated(f"{folder} can't be written", InputError, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RUN, REFUSED, *REPORT):
            (folder / name).unlink(missing_ok=True)
    save_workload(taken.workload, folder / WORKLOAD)
    save_records(folder / RECORDS, taken.run.info, taken.run.records)
    with translated(f"{folder} can't be written", InputError, ELSEWHERE):
        if taken.about.refused:
            (folder / REFUSED).write_text(f"{taken.about.refused}\n", encoding="utf-8")
        write_whole(folder / RUN, msgspec.json.format(msgspec.json.encode(taken.about), indent=2) + b"\n")


def load(folder: Path) -> Taken:
    """What `keep` wrote. Raises InputError for a folder that holds no run."""
    path = folder / RUN
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
    except OSError as error:
        raise InputError(
            f"{path}: can't be read ({error.strerror}); name a folder that `trtpd bench -o` wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: not a run of this trtpd's ({error}); measure it again") from error
    info, records = load_records(folder / RECORDS)
    return Taken(
        about=about,
        workload=load_workload(folder / WORKLOAD),
        run=Run(info=info, records=tuple(records), health=about.health),
    )


def replay_command(about: About, folder: Path, warm_up_s: float) -> str:
    """Asks the same server for the same requests, byte for byte, by the same targets."""
    words = ["trtpd", "bench", "--workload", str((folder / WORKLOAD).absolute()), *about.arguments]
    if isinstance(about.slo, FixedSlo):
        for name, target_s in (("--ttft-ms", about.slo.ttft_s), ("--tpot-ms", about.slo.tpot_s)):
            words += [] if target_s is None else [name, f"{target_s * 1e3:.12g}"]
    return shlex.join([*words, "--warm-up-s", f"{warm_up_s:.12g}"])


def again_command(folder: Path) -> str:
    return shlex.join(["trtpd", "bench", "--again", str(folder.absolute())])
