"""Weights in and out: folders that transformers writes and opens, and files, under any plan and bit by bit."""

import json
from functools import partial

import models
import pytest
import torch
from models import fixed_batch
from safetensors.torch import load_file
from safetensors.torch import save_file as write_file
from test_init_memory import LiveBytes
from threads import run_threads
from training import CPU, config, on_ranks

from meg_compile import Plan
from meg_compile.compiler import compile
from meg_compile.config import Target
from meg_compile.models.gpt2 import GPT2
from meg_compile.prepare import build_dataset, compile_program, loss_of, plain_model, starting_weights
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.loop import train
from meg_compile.verify import verify
from meg_compile.weights import Stored, fill, save_folder, stored_weights
from meg_compile.weights.models import causal_lm_from_hf, gpt2_from_hf

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "context": 16, "layers": 4, "hidden": 32, "heads": 4}
PLANS = {
    "tp2": {"plan__tp": 2},
    "pp2": {"plan__pp": 2},
    "tp2_pp2": {"plan__tp": 2, "plan__pp": 2},
    "zero3": {"plan__dp": 2, "plan__zero": 3},
    "vpp2": {"plan__pp": 2, "plan__vpp": 2, "plan__schedule": "interleaved_1f1b"},
}
IDS = {"input_ids": torch.zeros(2, 12, dtype=torch.int64), "labels": torch.zeros(2, 12, dtype=torch.int64)}


def gpt2_config(**changes):
    sizes = {"vocab_size": 101, "n_positions": 16, "n_layer": 4, "n_embd": 32, "n_head": 4}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2Config(**sizes, **dropout, bos_token_id=7, eos_token_id=8, **changes)


@pytest.fixture(scope="module")
def hf0(tmp_path_factory):
    """A GPT-2 of transformers with 101 tokens."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("hf0")
    transformers.GPT2LMHeadModel(gpt2_config()).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def trained(factory, init, export, run_dir, **changes):
    """Train `factory` from the weights in `init` and export them."""
    paths = {"init__path": str(init) if init else None, "export__path": str(export)}
    settings = config(**paths, **{"train__steps": 0, "precision": "fp32"} | changes)
    dataset = models.FixedRows(vocab=101)

    def work(program, executor, groups):
        if init:
            executor.load(stored_weights(init, program))
        return train(settings, program, executor, groups, dataset, run_dir)

    on_ranks(settings, work, factory, dataset)


def written(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def opened(folder, kind="GPT2LMHeadModel"):
    """The model as transformers opens it, which has to find exactly what it looks for."""
    model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(found.values()), found
    return model.eval()


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def save(model, folder, **options):
    """Export a ready model."""
    program = compile(model, IDS, Plan())
    values = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    save_folder(program, values.items(), folder, **options)
    return folder


# ------------------------------------------------------------------------------------------------ GPT-2


def test_a_folder_comes_back_as_it_was(hf0, tmp_path):
    """C39, no steps: 101 tokens on two ranks, the tie, c_attn in transformers' layout; the same bytes of every plan."""
    for name, plan in PLANS.items():
        trained(lambda: gpt2_from_hf(str(hf0)), hf0, tmp_path / name, tmp_path, **plan)
    hf1 = tmp_path / "tp2_pp2"
    assert all(written(tmp_path / name) == written(hf1) for name in PLANS)
    assert_same_tensors(load_file(hf0 / "model.safetensors"), load_file(hf1 / "model.safetensors"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hf0, hf1))
    assert before == after and (after["vocab_size"], after["tie_word_embeddings"]) == (101, True)
    assert (hf1 / "generation_config.json").read_bytes() == (hf0 / "generation_config.json").read_bytes()


def test_five_steps_are_those_of_transformers_own_model(hf0, tmp_path):
    """C39, five steps in float64."""
    plans = PLANS["tp2_pp2"] | {"train__steps": 5, "precision": "fp64"}
    trained(lambda: gpt2_from_hf(str(hf0)), hf0, tmp_path / "hf2", tmp_path, **plans)
    plain = opened(hf0).double().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        ids, labels = fixed_batch(step, vocab=101)
        torch.nn.functional.cross_entropy(plain(ids).logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours, ids = opened(tmp_path / "hf2"), fixed_batch(9, vocab=101)[0]
    assert ours.dtype == torch.float64
    assert ours.transformer.wte.weight.shape[0] == 101 and ours.lm_head.weight is ours.transformer.wte.weight
    assert (ours(ids).logits - plain.eval()(ids).logits).abs().max() < 1e-9
    assert (ours(ids).logits - opened(hf0).double()(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"qkv_layout": "stacked"}, {"qkv_layout": "per_head"}])
def test_our_gpt2_is_transformers_gpt2(options, tmp_path):
    """Logits within 1e-5 in float32, the same greedy tokens, and the same weights on the way back."""
    torch.manual_seed(5)
    model = GPT2(**SIZES, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms too
    theirs = opened(save(model, tmp_path / "hf"))
    ids = fixed_batch(0, vocab=101)[0]
    assert (theirs(ids).logits - model(ids)).abs().max() < 1e-5
    text = ids[:1, :4]
    for _ in range(12):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    assert theirs.generate(ids[:1, :4], max_new_tokens=12, do_sample=False, pad_token_id=0).tolist() == text.tolist()

    again = GPT2(**SIZES, **options)
    fill(again, stored_weights(tmp_path / "hf", compile(again, IDS, Plan())))
    assert_same_tensors(model.state_dict(), again.state_dict())


def test_config_json_says_what_the_model_is(tmp_path):
    found = json.loads((save(GPT2(**SIZES, dropout=0.25, tied=False), tmp_path / "hf") / "config.json").read_text())
    said = transformers.GPT2Config.from_pretrained(tmp_path / "hf")
    right = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 101, "n_positions": 16, "embd_pdrop": 0.25}
    right |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}
    right |= {"attn_pdrop": 0.25, "resid_pdrop": 0.25, "model_type": "gpt2", "eos_token_id": None}
    assert {key: getattr(said, key) for key in right} == right
    assert (found["architectures"], found["dtype"]) == (["GPT2LMHeadModel"], "float32")


def test_shards(hf0, tmp_path):
    model = GPT2(**SIZES)
    folder = save(model, tmp_path / "hf", max_shard_gb=5e-5)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors" and len(names) > 2
    assert all((folder / name).stat().st_size < 50_000 + 4_000 for name in names)
    held = {key: path for path in names for key in load_file(folder / path)}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == held and not (folder / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    ids = fixed_batch(0, vocab=101)[0]
    assert (opened(folder)(ids).logits - model(ids)).abs().max() < 1e-5
    again = GPT2(**SIZES)
    fill(again, stored_weights(folder, compile(again, IDS, Plan())))
    assert_same_tensors(model.state_dict(), again.state_dict())


def test_a_folder_in_half_precision(tmp_path):
    model = GPT2(**SIZES)
    opened_again = opened(save(model, tmp_path / "hf", dtype=torch.bfloat16))
    assert opened_again.dtype == torch.bfloat16
    assert torch.equal(opened_again.transformer.wte.weight, model.wte.weight.bfloat16())
    again = GPT2(**SIZES)
    fill(again, stored_weights(tmp_path / "hf", compile(again, IDS, Plan())))
    assert torch.equal(again.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight.bfloat16().float())


def test_names_of_old_checkpoints(hf0, tmp_path):
    """No prefix, masks beside the weights and a tied head, as the first GPT-2 files have them."""
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in load_file(hf0 / "model.safetensors").items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(4)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(4)}
    write_file(tensors | masks | {"lm_head.weight": tensors["wte.weight"].clone()}, tmp_path / "old.safetensors")
    old, new = GPT2(**SIZES), GPT2(**SIZES)
    for model, path in ((old, tmp_path / "old.safetensors"), (new, hf0)):
        fill(model, stored_weights(path, compile(model, IDS, Plan())))
    assert_same_tensors(old.state_dict(), new.state_dict())


# ------------------------------------------------------------------------------------------------ other models


def test_a_model_of_transformers_keeps_its_names_and_config(tmp_path):
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "rope_theta": 500.0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "hf0")
    hf0, hf1 = tmp_path / "hf0", tmp_path / "hf1"
    trained(lambda: causal_lm_from_hf(str(hf0)), hf0, hf1, tmp_path, **PLANS["tp2_pp2"])
    assert_same_tensors(load_file(hf0 / "model.safetensors"), load_file(hf1 / "model.safetensors"))
    ids = fixed_batch(0, vocab=101)[0]
    assert torch.equal(opened(hf1, "LlamaForCausalLM")(ids).logits, opened(hf0, "LlamaForCausalLM")(ids).logits)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hf0, hf1))
    assert before.items() <= after.items()


class Masked(models.TinyGPT):
    """With buffers in the state_dict and beside it, one of them filled in by the constructor alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("shift", torch.full((16,), 0.25), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.scale + self.shift.sum()


def test_any_other_model_has_its_own_names(tmp_path):
    torch.manual_seed(9)
    model = Masked()
    model.scale.fill_(2.5)
    program = compile(model, IDS, Plan())
    values = dict(model.state_dict())
    save_folder(program, values.items(), tmp_path / "own")
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"model.safetensors"}
    assert_same_tensors(load_file(tmp_path / "own" / "model.safetensors"), values)

    trained(Masked, tmp_path / "own", tmp_path / "again.safetensors", tmp_path, **PLANS["tp2"])
    assert_same_tensors(load_file(tmp_path / "again.safetensors"), values)


def test_the_settings_start_and_check_a_run(hf0):
    """One command: the preset, its weights, and the plain model of the check with the same ones."""
    settings = config(plan__tp=2, train__check=True, init__path=str(hf0))
    settings.model = Target("meg_compile.weights.models.gpt2_from_hf", {"path": str(hf0)})
    settings.data.args["vocab"] = 101
    dataset = build_dataset(settings)
    program, loss = compile_program(settings, dataset), loss_of(settings)

    def rank_main(_):
        groups = init_groups(program.plan.mesh, "cpu")
        executor = Executor(program, groups, CPU)
        executor.load(starting_weights(settings, program))
        values = {name: value for name, value in executor.gather() if value is not None}
        plain = partial(plain_model, settings, program)
        return values, verify(settings, program, executor, groups, plain, loss, dataset, steps=1)

    (values, report), _ = run_threads(2, rank_main)
    assert report.ok, report.worst()
    stored = load_file(hf0 / "model.safetensors")
    assert torch.equal(values["h.2.mlp.c_fc.weight"], stored["transformer.h.2.mlp.c_fc.weight"].t().double())


# ------------------------------------------------------------------------------------------------ memory


LARGE = {"vocab_size": 16384, "context": 16, "layers": 1, "hidden": 512, "heads": 8}
LARGEST = 16384 * 512 * 4


def test_memory_on_the_way_in_and_out(tmp_path):
    """Beside its shards a rank reads its half of the largest parameter, rank 0 writes from all of it, plus a tenth."""
    program = compile(lambda: GPT2(**LARGE), IDS, Plan(tp=2), dtype=torch.float32)
    assert program.source is not None
    values = program.source.replay(lambda _: lambda whole: whole)
    save_folder(program, values, tmp_path / "hf0")
    stored = stored_weights(tmp_path / "hf0", program)

    def rank_main(rank):
        executor = Executor(program, init_groups(program.plan.mesh, "cpu"), CPU)
        shards = sum(tensor.nbytes for tensor in executor.tensors.values())
        with LiveBytes() as reading:
            executor.load(Unread(stored))
        executor.load(stored)
        with LiveBytes() as writing:
            save_folder(program, executor.gather(), tmp_path / "hf1" if rank == 0 else None)
        return shards, reading.peak, writing.peak

    for shards, reading, writing in run_threads(2, rank_main):
        assert LARGEST <= reading < shards + 1.1 * LARGEST / 2  # its half, and where that is kept
        assert writing < shards + 1.1 * LARGEST
    assert written(tmp_path / "hf1") == written(tmp_path / "hf0")


class Unread(Stored):
    """Gives each piece as a tensor of its shape without memory of its own, as mapped files have none."""

    def __init__(self, stored):
        super().__init__(stored.pieces, stored)

    def replay(self, wanted, seed=None):
        for name, piece in self.pieces.items():
            if cut := wanted(name):
                stored = torch.zeros(1).expand(piece.shape)
                yield name, cut(piece.convert(stored) if piece.convert else stored)
