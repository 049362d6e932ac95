"""Does a run survive kill -9 at any moment? `python -m benchmarks.kills --kills 50`

Trains a GPT-2 on two pipeline ranks with dropout=fast, saving at every step, and kills the whole run after a random
time, again and again; each time the same command is typed again. In the end the curve must be, bit by bit, that of a
run that was never killed, and every checkpoint that counts must have been good all along.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meg_compile.checkpoint.folder import damage, manifest_of, name_of, steps_in

SETTINGS = (
    "plan=pp2 model.layers=2 model.hidden=64 model.dropout=0.1 dropout=fast train.check=false launch.threads=1 "
    "train.global_batch_size=4 optim.schedule=constant checkpoint.every=1 checkpoint.keep=3 hydra.run.dir=run"
).split()


def start(folder: Path, *settings: str) -> subprocess.Popen:
    command = [sys.executable, str(Path.cwd() / "run.py"), *SETTINGS, *settings]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def curve(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def until_it_saves(run: subprocess.Popen, checkpoints: Path, before: int) -> None:
    """Wait for its first checkpoint, so that kills fall where it saves rather than where it starts."""
    while run.poll() is None and max(steps_in(checkpoints), default=0) <= before:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, unfinished, steps, bad = random.Random(args.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        killed, whole = Path(name) / "killed", Path(name) / "whole"
        killed.mkdir()
        whole.mkdir()
        for kill in range(1, args.kills + 1):
            run = start(killed, "train.steps=100000", "checkpoint.dir=ck")
            until_it_saves(run, killed / "ck", steps)
            time.sleep(rng.uniform(0, 0.5))
            run.kill()
            said, _ = run.communicate()
            assert run.returncode == -9, said
            time.sleep(0.3)  # the workers end with it
            part = bool(list((killed / "ck").glob("*.part")))
            unfinished += part
            for step in steps_in(killed / "ck"):
                path = killed / "ck" / name_of(step)
                if problems := damage(path, manifest_of(path), manifest_of(path)):
                    bad += 1
                    print(f"{path.name}: {problems}", flush=True)
            before, steps = steps, max(steps_in(killed / "ck"), default=0)
            note = ", one cut short" if part else ""
            print(f"kill {kill}: {name_of(before)} to {name_of(steps)}{note}", flush=True)
        steps += 2
        for folder, settings in ((killed, ["checkpoint.dir=ck"]), (whole, ["checkpoint.every=null"])):
            said, _ = start(folder, f"train.steps={steps}", *settings).communicate()
            assert (folder / "run" / "result.json").exists(), said
        same = curve(killed) == curve(whole)
    print(f"{args.kills} kills, {unfinished} in the middle of a save, {bad} damaged checkpoints that counted")
    print(f"curve of {steps} steps {'equal to the last bit' if same else 'DIFFERENT'}")
    sys.exit(bad > 0 or not same)


if __name__ == "__main__":
    main()
