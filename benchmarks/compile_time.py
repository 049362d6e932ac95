"""Time and memory of compiling and explaining a GPT-2 against its number of layers, as a Markdown table.

Each row is a process of its own, on one core: `python -m benchmarks.compile_time`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

HIDDEN, HEADS, CONTEXT, TP = 3072, 32, 1024, 8
LAYERS = (12, 24, 48, 72, 96)
HEADER = "| layers | parameters | compile | explain | peak memory |\n|---:|---:|---:|---:|---:|"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(_measure(args.layers[0])))
        return
    print(HEADER)
    for layers in args.layers:
        command = [sys.executable, "-m", "benchmarks.compile_time", "--one", "--layers", str(layers)]
        print(_line(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)), flush=True)


def _measure(layers: int) -> dict[str, float]:
    """CPU seconds of both steps and the process's peak memory, imports included."""
    import torch

    import meg_compile
    from meg_compile.models.gpt2 import GPT2

    torch.set_num_threads(1)
    inputs = {name: torch.zeros(1, CONTEXT, dtype=torch.int64) for name in ("input_ids", "labels")}
    started = time.process_time()
    program = meg_compile.compile(
        lambda: GPT2(context=CONTEXT, layers=layers, hidden=HIDDEN, heads=HEADS), inputs, meg_compile.Plan(tp=TP)
    )
    compiled = time.process_time()
    program.explain()
    explained = time.process_time()
    return {
        "layers": layers,
        "parameters": sum(spec.numel for spec in program.params.values()),
        "compile_s": compiled - started,
        "explain_s": explained - compiled,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9,
    }


def _line(row: dict[str, float]) -> str:
    return (
        f"| {row['layers']} | {row['parameters'] / 1e9:.1f} B | {row['compile_s']:.1f} s "
        f"| {row['explain_s']:.1f} s | {row['peak_gb']:.2f} GB |"
    )


if __name__ == "__main__":
    main()
