"""Configurations that cannot run: exit code 2, one message that names the key, its value and what would work."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import run
from meg_compile import driver
from meg_compile.train.indexed_file import IndexedWriter, fitting_dtype

ROOT = Path(__file__).parents[1]

USER_MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

VERSION = 3

class Net(nn.Module):
    def __init__(self, width, depth=1):
        super().__init__()
        self.emb, self.out = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, ids):
        return self.out(self.emb(ids))

class Short(Net):
    def forward(self, ids):
        if ids.shape[1] > 16:
            raise ValueError(f"{ids.shape[1]} tokens do not fit in 16")
        return super().forward(ids)

class Tiny(Net):
    def __init__(self):
        super().__init__(8)
        self.emb = nn.Embedding(64, 8)

class Picky(nn.Module):
    def __init__(self):
        raise RuntimeError("built on a Tuesday")

class NoModule:
    pass

class Empty(torch.utils.data.Dataset):
    def __len__(self):
        return 0

class Few(torch.utils.data.Dataset):
    def __len__(self):
        return 5
    def __getitem__(self, i):
        return {"input_ids": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}

class NoLength(Few):
    def __len__(self):
        raise ValueError("no index file")

class FloatLabels(Few):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return {"input_ids": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8)}

class Quits(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.map, self.where = nn.Linear(4, 4), where
        if where == "init":
            raise SystemExit(0)

    def forward(self, input_ids):
        exit(0) if self.where == "forward" else None

class QuitsReading(Few):
    def __getitem__(self, i):
        raise SystemExit

class Noisy(Net):
    def forward(self, ids):
        x = self.emb(ids)
        return self.out(x + 0.1 * torch.randn_like(x))

class Contrastive(Net):
    def forward(self, ids, labels):
        z = super().forward(ids).mean(1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

class Broken(Few):
    def __getitem__(self, i):
        raise KeyError("no such row")
"""


@dataclass(frozen=True)
class Case:
    """A command line, and what its one message must contain."""

    args: str
    words: tuple[str, ...]
    faults: int = 1


def case(args: str, *words: str, faults: int = 1) -> Case:
    return Case(args, words, faults)


CASES = [
    # misspelt and unknown keys, in every form
    case("plan.tpp=2", "plan.tpp=2", "plan.tp?"),
    case("+plan.tpp=2", "plan.tpp=2", "plan.tp?"),
    case("++plan.tpp=2", "plan.tpp=2", "plan.tp?"),
    case("tsk=explain", "tsk=explain", "task?"),
    case("modle=nano", "modle=nano", "model?"),
    case("train.microbatch_size=2", "train.microbatch_size=2", "train.micro_batch_size?"),
    case("train.lr=0.1", "train.lr=0.1", "optim.lr?"),
    case("lr=0.1", "lr=0.1", "optim.lr?"),
    case("model.layer=3", "model.layer=3", "model.layers?", "GPT2"),
    case("+model.width=512", "model.width=512", "it takes vocab_size, context"),
    case("data.seqlen=3", "data.seqlen=3", "data.seq_len?"),
    case("+loss.weight=1", "loss.weight=1", "ignore_index"),
    case("zzz.yyy=1", "zzz", "no such setting"),
    # presets
    case("model=nan0", "model=nan0", "model=nano?", "gpt2_small"),
    case("plan=tp3", "plan=tp3", "there is no such preset", "tp2_pp2"),
    case("optim=adam", "optim=adam", "optim=adamw?", "sgd"),
    case("experiment=none_such", "experiment=none_such", "there is no such preset", "gpt2_small_tp2_pp2"),
    # types
    case("plan.tp=two", "plan.tp=two", "a whole number"),
    case("plan.tp=2.5", "plan.tp=2.5", "a whole number"),
    case("plan.tp=true", "plan.tp=True", "a whole number"),
    case("plan.sp=1", "plan.sp=1", "true or false"),
    case("optim.lr=fast", "optim.lr=fast", "a number"),
    case("optim.betas=0.9", "optim.betas=0.9", "a list of numbers"),
    case("plan.stages=[1,two]", "plan.stages=", "a list of whole numbers"),
    case("train=5", "train=5", "is a section", "train.NAME"),
    case("model.layers=four", "model.layers=four", "a whole number"),
    case("train.seed=null", "train.seed=null", "a whole number"),
    # choices
    case("task=trian", "task=trian", "did you mean train?", "explain, verify"),
    case("precision=fp8", "precision=fp8", "no such choice", "fp64, fp32, bf16, fp16"),
    case("train.loss_scale=1024", "train.loss_scale=1024", "scales no loss", "precision=fp16"),
    case("precision=fp16 train.loss_scale=0", "train.loss_scale=0", "a factor", "65536"),
    case("precision=[fp32]", "precision=['fp32']", "did you mean fp32?"),
    case("plan.schedule=1b1f", "plan.schedule=1b1f", "1f1b", "gpipe"),
    case("optim.name=adam", "optim.name=adam", "adamw"),
    case("optim.schedule=linea", "optim.schedule=linea", "did you mean linear?", "cosine, linear, constant"),
    case("launch.device=gpu", "launch.device=gpu", "auto, cpu, cuda"),
    # values that cannot be
    case("plan.tp=0", "plan.tp=0", "at least 1"),
    case("plan.dp=-1", "plan.dp=-1", "at least 1"),
    case("plan.sp=true data.seq_len=33", "plan.sp=True", "plan.tp=2 does not divide the sequence of 33"),
    case("plan.cp=2 data.seq_len=126", "plan.cp=2", "126", "4 divides", "plan.cp=1"),
    case("plan.vpp=2", "plan.vpp=2", "plan.schedule=interleaved_1f1b"),
    case("plan.stages=[1,2,1]", "plan.stages=[1,2,1]", "pp=2 x vpp=1 = 2"),
    case("train.steps=-1", "train.steps=-1", "0 or more"),
    case("train.micro_batch_size=0", "train.micro_batch_size=0", "1 or more"),
    case("train.clip_grad=-1", "train.clip_grad=-1.0", "0 or more"),
    case("train.seed=-7", "train.seed=-7", "0 or more"),
    case("optim.lr=0", "optim.lr=0.0", "use optim.lr=0.001"),
    case("optim.lr=nan", "optim.lr=nan", "use optim.lr=0.001"),
    case("optim.betas=[0.9,1.5]", "optim.betas=[0.9, 1.5]", "under 1"),
    case("optim.betas=[0.9]", "optim.betas=[0.9]", "two numbers"),
    case("optim.momentum=1", "optim.momentum=1.0", "0.9"),
    case("optim.min_lr=1", "optim.min_lr=1.0", "is over optim.lr=0.003"),
    case("optim.warmup_steps=300 train.steps=200", "optim.warmup_steps=300", "train.steps=200"),
    case("optim.warmup_fraction=0.1 optim.warmup_steps=3", "optim.warmup_fraction=0.1", "warmup_steps=3", "null"),
    case("optim.warmup_fraction=2 optim.name=null", "optim.warmup_fraction=2.0", "under 1", "adamw", faults=2),
    case("optim.decay_steps=5 optim.schedule=linear", "optim.decay_steps=5", "15 steps of warm-up", "16 or more"),
    case("optim.schedule=wsd optim.wsd_decay_steps=140", "optim.wsd_decay_steps=140", "135 until step 150", "135 or"),
    case("optim.name=sgd optim._target_=torch.optim.SGD", "optim._target_=torch.optim.SGD", "one of the two"),
    case("optim._target_=torch.optim.Muon", "optim._target_=torch.optim.Muon", "only supports 2D"),
    case("optim.frozen=[wtee]", "optim.frozen=wtee", "did you mean wte?"),
    case("optim.groups=[{params:wte,lr:1}]", "optim.groups.0.lr=1", "lr_scale"),
    case("log.wandb=mine log.every=0", "log.wandb=mine", "not installed", "log.every=0", faults=2),
    case("data.seq_len=0", "data.seq_len=0", "1 or more"),
    case("data.seq_len=129", "data.seq_len=129", "the model's context of 128", "model.context=129"),
    case("model.vocab_size=64", "model.vocab_size=64", "model.vocab_size=256"),
    case("verify.steps=0 task=verify", "verify.steps=0", "1 or more"),
    case("launch.threads=0", "launch.threads=0", "1 or more"),
    # sizes that must agree
    case("train.global_batch_size=7", "train.global_batch_size=7", "x plan.dp=1 = 2", "6 or 8"),
    case("train.global_batch_size=6 plan.dp=2", "train.global_batch_size=6", "2 = 4", "micro_batch_size=1 or 3"),
    case("train.global_batch_size=2", "plan.schedule=1f1b", "at least 2 micro-batches", "plan.schedule=gpipe"),
    case(
        "plan.schedule=interleaved_1f1b plan.vpp=2 train.micro_batch_size=1 train.global_batch_size=5",
        "plan.schedule=interleaved_1f1b",
        "5 micro-batches do not fill 2 rounds",
        "train.global_batch_size=4 or 6",
    ),
    case(
        "plan.schedule=dualpipev plan.vpp=2 train.global_batch_size=6",
        "plan.schedule=dualpipev",
        "at least 4 micro-batches for pp=2 x 2; there are 3",
        "train.global_batch_size=8",
        "plan.schedule=interleaved_1f1b, looped_bfs",
    ),
    case("plan.schedule=zbv_zero_bubble", "plan.vpp=1", "runs 2 stages per rank", "use plan.vpp=2"),
    case("plan.schedule=gpipe plan.vpp=2", "plan.vpp=2", "runs one stage per rank", "plan.schedule=interleaved_1f1b"),
    case("plan.stages=[1,2,three]", "plan.stages=[1, 2, 'three']", "a list of whole numbers or text or null"),
    case("plan.stages=Et|t*3", "plan.stages=Et|t*3", "must end with L"),
    case("plan.stages='Et*2|(t|)*2L'", "plan.stages=Et*2|(t|)*2L", "4 stages", "plan.vpp=2"),
    case("plan.split=2", "plan.split=2", "use plan.split=1, or null"),
    case("plan.place={h.0:0,h.1:one}", "plan.place=", "must be a mapping from names to whole numbers"),
    case("plan.shard=['h.*.mlp.c_fc.weight:1']", "plan.shard=h.*.mlp.c_fc.weight:1", "normalises over it (gpt2.py:"),
    case("launch.nproc=3", "launch.nproc=3", "tp 2 x cp 1 x dp 1 x pp 2 = 4", "launch.nproc=4"),
    case("launch.nproc=4 plan.dp=2", "launch.nproc=4", "tp 2 x cp 1 x dp 2 x pp 2 = 8", "plan.dp=1"),
    case("launch.device=cuda", "launch.device=cuda", "4 local ranks", "launch.device=cpu"),
    # files and values that are not there
    case("data=text", "data.path", "must be given"),
    case("data=text data.path=gone.txt", "data.path=", "gone.txt", "no such file"),
    case("data=text data.path=.", "data.path=", "is a directory"),
    case("data.tokenizer=gone.json", "data.tokenizer=", "no such file"),
    case("data=text data.path=short.txt", "data.path=", "make no row of 128", "data.seq_len=4"),
    case("data=indexed data.path=gone", "data.path=", "gone.idx cannot be read", "meg_compile.tokenize"),
    case("data=indexed data.path=tokens", "data._target_=", "go up to 300", "256 rows", "give the model 301"),
    case("data=indexed data.path=[1,tokens,tokens]", "data.path=", "list of weights and paths"),
    case("data=indexed data.path=tokens data.documents=label", "data.documents=label", "one of ignore, labels"),
    case(
        "data=indexed data.path=tokens data.documents=attention model._target_=user_code.Net +model.width=4",
        "data.documents=attention",
        "takes no document_ids and no position_ids",
        "data.documents=labels",
        faults=2,  # and its vocabulary
    ),
    case("eval.every=2", "data.split=null", "the valid part's 0 tokens", "data.split=[969,30,1]"),
    case("eval.every=2 eval.data.path=gone.txt", "eval.data.path=", "No such file"),
    case("eval.every=2 eval.data.paht=short.txt", "eval.data.paht=short.txt", "did you mean eval.data.path?"),
    case("eval.every=2 data._target_=user_code.Few train.global_batch_size=4", "eval.data=null", "no argument `part`"),
    case("eval.every=0", "eval.every=0", "eval.every=1 or more"),
    case("train.batch_ramp.start=4", "train.batch_ramp=", "start, increment and rows"),
    case("export.path=.", "export.path=", "is a directory"),
    case("train.steps=${train.stepz}", "train.steps=${train.stepz}", "cannot be resolved"),
    case("train.steps=???", "train.steps", "must be given"),
    case("~train.seed", "train.seed", "is not set"),
    # targets
    case("model._target_=Net", "model._target_=Net", "package.module.Name"),
    case("model._target_=no_such_module.Net", "model._target_=no_such_module.Net", "no module", "PYTHONPATH"),
    case("model._target_=user_code.Nett", "model._target_=user_code.Nett", "user_code.Net?"),
    case("model._target_=broken_code.Net", "model._target_=broken_code.Net", "ZeroDivisionError"),
    case("model._target_=needs_code.Net", "model._target_=needs_code.Net", "No module named 'not_installed'"),
    case("model._target_=user_code.VERSION", "model._target_=user_code.VERSION", "cannot be called"),
    case("model._target_=user_code.Net", "model.width", "needs this argument", "+model.width=..."),
    case("model._target_=user_code.Net +model.widht=3", "model.widht=3", "model.width?", faults=2),
    case("model._target_=user_code.Picky", "model._target_=user_code.Picky", "RuntimeError: built on a Tuesday"),
    case("model._target_=user_code.NoModule", "model._target_=user_code.NoModule", "not a torch.nn.Module"),
    case("data._target_=user_code.Empty", "train.global_batch_size=16", "0 rows"),
    case("data._target_=user_code.Few", "train.global_batch_size=16", "5 rows"),
    case(
        "data._target_=user_code.Broken train.global_batch_size=4",
        "data._target_=Broken",
        "row 0",
        "no such row",
        "dataset[0]",
    ),
    case("data._target_=user_code.NoLength", "data._target_=NoLength", "its __len__ raised ValueError: no index file"),
    case("data._target_=user_code.FloatLabels", "labels=float32[2, 8]", "integers"),
    case(
        "model._target_=user_code.Noisy +model.width=8 task=verify dropout=fast", "task=verify", "randn_like (user_code"
    ),
    case(
        "model._target_=user_code.Noisy +model.width=8 train.check=true dropout=fast", "train.check=false", "randn_like"
    ),
    case("model._target_=user_code.Noisy +model.width=8", "dropout=exact", "dropout=fast", "randn_like"),
    case(
        "model._target_=user_code.Contrastive +model.width=8 plan=single",
        *("train.micro_batch_size=2", "matmul at user_code.py", "plan.dp=1 and train.micro_batch_size=16"),
    ),
    case("model=null", "model=null", "is no name of a preset", "nano"),
    case("task=explain explain.block=4", "explain.block=4", "4 blocks", "use 0 to 3"),
    *(
        case(f"{key}={2**70}", f"{key}={2**70}", "or less")
        for key in ("train.seed", "train.steps", "launch.threads", "verify.steps", "explain.block", "data.seq_len")
    ),
    case("data.fields=[input_id,labels]", "data.fields", "input_id", "input_ids?"),
    case("model._target_=user_code.Tiny", "data._target_", "go up to 255", "emb.weight of the model has 64 rows"),
    case("model.hidden=130", "model._target_", "hidden=130 does not divide into heads=4"),
    # what only the compiler can tell
    case("model.heads=6 model.hidden=96 plan.tp=4", "plan.tp=4", "6 heads", "1, 2, 3 or 6"),
    case("model._target_=user_code.Short +model.width=8 plan=single", "128 tokens do not fit in 16"),
    case(
        "model._target_=models.TinyGPT +model.d=24 +model.heads=6 +model.vocab=102 experiment=plain_sgd "
        "data._target_=models.FixedRows plan=single plan.tp=5",
        "plan.tp=5",
        "96 ffn",
        "6 heads",
        "1, 2, 3 or 6",
        faults=2,
    ),
    case("plan.pp=16 train.global_batch_size=64", "plan.pp"),
    # several at once
    case("plan.tp=two plan.foo=1 optim.lr=0 data.path=x.txt", "plan.tp=two", "plan.foo", "optim.lr", "x.txt", faults=4),
    case(
        "model.heads=6 model.hidden=96 plan.tp=4 optim.lr=0 train.global_batch_size=7",
        "plan.tp=4",
        "6 heads",
        "optim.lr=0.0",
        "train.global_batch_size=7",
        faults=3,
    ),
    # what Hydra refuses
    case("plan.tp=[1", "plan.tp=[1"),
    case("~plan.nothing", "plan.nothing"),
    case("plan.tp=1,2", "plan.tp", "multirun"),
    case("+plan=tp2", "plan"),
    case("--config-name none_such", "none_such"),
    case("--config-dir no_such_dir", "no_such_dir"),
]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs run.py's command line in this process, in a fresh directory, where it must start no process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(driver, "launch", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "user_code.py").write_text(USER_MODULE)
    (tmp_path / "broken_code.py").write_text("1 / 0\n")
    (tmp_path / "needs_code.py").write_text("import not_installed\n")
    (tmp_path / "short.txt").write_text("hello")
    with IndexedWriter(str(tmp_path / "tokens"), fitting_dtype(301)) as writer:
        writer.add([0, 1, 300] * 1000)
    for name in ("user_code", "broken_code", "needs_code"):
        sys.modules.pop(name, None)

    def call(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run.main(list(args))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def assert_one_message(code: int, out: str, err: str, faults: int = 1) -> None:
    assert code == 2
    assert "Traceback" not in out + err
    assert (out + err).count("cannot run") + (out + err).count("cannot be captured") == 1, out + err
    lines = [line for line in err.splitlines() if line.startswith("  ")]
    assert len(lines) == faults, err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.args)
def test_refused(case, command, tmp_path):
    code, out, err = command(*case.args.split())
    assert not (tmp_path / "runs").exists()
    assert_one_message(code, out, err, case.faults)
    for word in case.words:
        assert word in err, err


@pytest.mark.parametrize(
    "args",
    [
        "model._target_=user_code.Quits +model.where=init",
        "model._target_=user_code.Quits +model.where=forward",
        "data._target_=user_code.QuitsReading train.global_batch_size=4",
    ],
)
def test_code_that_ends_the_process_is_a_failure(args, command):
    code, _, err = command(*args.split(), "plan=single")
    assert code == 1
    assert "user_code.py:" in err and "called exit(" in err and "Traceback" not in err


YAML_CASES = [
    ("defaults: [config, _self_]\ntrain: {microbatch_size: 2}", "train.microbatch_size=2", "train.micro_batch_size?"),
    ("defaults: [config, _self_]\noptim: {lr: fast}", "optim.lr=fast", "a number"),
    ("train: {microbatch_size: 2}", "train.microbatch_size=2", "train.micro_batch_size?"),
    ("train: {steps: 5}", "plan", "defaults: [config, _self_]"),
    ("defaults: [config, _self_]\ntrain: {steps: ???}", "mine.yaml", "line 2"),
    ("defaults: [config, _self_]\nplan: 3", "plan=3", "is a section"),
]


@pytest.mark.parametrize("text, key, hint", YAML_CASES)
def test_a_file_of_the_user_is_refused_too(text, key, hint, command, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    code, _, err = command("--config-dir", ".", "--config-name", "mine")
    assert code == 2
    assert err.count("cannot run") == 1 and "Traceback" not in err
    assert key in err and hint in err, err


@pytest.mark.parametrize(
    "args, word",
    [
        ("plan.tpp=2", "plan.tp?"),
        ("plan=tp3", "there is no such preset"),
        ("launch.nproc=3", "launch.nproc=4"),
        ("-m plan.tp=two,0", "a whole number"),
    ],
)
def test_as_a_command(args, word, tmp_path):
    ran = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *args.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 2
    assert word in ran.stderr and "Traceback" not in ran.stderr
