"""Does a pretrained model say the same when it is compiled? `python -m benchmarks.pretrained FOLDER --prompt 7 26 ...`

FOLDER holds a model as transformers saves it (config.json and weights; nothing is unpickled), such as the one that the
package iglm brings (`pip download --no-deps iglm`, iglm/trained_models/IgLM). Greedy text of the plain model, token by
token, is compared with that of the compiled one under each plan.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import meg_compile
from meg_compile import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups

PLANS = tuple(
    Plan(schedule="gpipe", **sizes)  # which runs a single micro-batch too
    for sizes in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "sp": True}, {"pp": 3})
)


class Greedy(nn.Module):
    """The likeliest token after a position of one row: ids [1, T], at [1, T] with a 1 there -> a number."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, at: Tensor) -> Tensor:
        logits_1TV = self.model(input_ids=input_ids, use_cache=False).logits
        return (logits_1TV.argmax(-1) * at).sum().double()


def load(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, weights_only=True, local_files_only=True).eval()


def text(prompt: list[int], num_tokens: int, next_token) -> list[int]:
    """The prompt and the tokens that follow. The row has its full length from the start; what is not there yet is 0."""
    ids, at = torch.zeros(2, 1, len(prompt) + num_tokens, dtype=torch.int64)
    ids[0, : len(prompt)] = torch.tensor(prompt)
    for place in range(len(prompt), ids.shape[1]):
        at.zero_()
        at[0, place - 1] = 1
        ids[0, place] = next_token({"input_ids": ids, "at": at})
    return ids[0].tolist()


def _rank(rank: int, plan: Plan, folder: Path, prompt: list[int], num_tokens: int, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=plan.mesh.size)
    model, zeros = Greedy(load(folder)), torch.zeros(1, len(prompt) + num_tokens, dtype=torch.int64)
    program = meg_compile.compile(model, {"input_ids": zeros, "at": zeros}, plan, loss=None, training=False)
    executor = Executor(program, init_groups(plan.mesh, "cpu"), torch.device("cpu"))
    executor.load()
    last = plan.mesh.rank(pp=plan.rank_of(plan.num_stages - 1))

    def next_token(batch: dict[str, Tensor]) -> int:
        token = torch.tensor(executor.evaluate(batch, 1.0))
        dist.broadcast(token, last)
        return int(token)

    found = text(prompt, num_tokens, next_token)
    if rank == 0:
        torch.save(torch.tensor(found), Path(scratch, "text.pt"))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model as transformers saves it")
    parser.add_argument("--prompt", type=int, nargs="+", required=True, help="token ids to begin with")
    parser.add_argument("--tokens", type=int, default=200, help="how many follow (default 200)")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    model = load(given.folder)
    with torch.no_grad():
        right = text(given.prompt, given.tokens, lambda batch: int(Greedy(model)(**batch)))
    print(f"plain: {' '.join(map(str, right))}", flush=True)
    same = True
    for plan in PLANS:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="pretrained_") as scratch:
            mp.spawn(_rank, (plan, given.folder, given.prompt, given.tokens, scratch), plan.mesh.size)
            found = torch.load(Path(scratch, "text.pt"), weights_only=True).tolist()
        first = next((i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1]), None)
        verdict = "the same text" if first is None else f"another token at {first}: {found[first]}, not {right[first]}"
        print(f"{plan!s:24} {verdict} ({time.perf_counter() - begin:.0f} s)", flush=True)
        same = same and first is None
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
