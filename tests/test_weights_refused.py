"""Starting weights that are not the model's, and exports that would not work: refused before any process starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_refusals import assert_one_message

import run
from meg_compile import Plan
from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.weights import save_folder, stored_weights
from meg_compile.weights.models import causal_lm_from_hf, gpt2_from_hf

SIZES = {"vocab_size": 101, "context": 16, "layers": 2, "hidden": 32, "heads": 4}
IDS = {"input_ids": torch.zeros(2, 12, dtype=torch.int64), "labels": torch.zeros(2, 12, dtype=torch.int64)}


@pytest.fixture(scope="module")
def program():
    return compile(GPT2(**SIZES), IDS, Plan())


@pytest.fixture
def folder(program, tmp_path):
    """The model as transformers keeps it."""
    save_folder(program, program.model.state_dict().items(), tmp_path / "hf")
    return tmp_path / "hf"


def change(folder, **changes):
    """Other values in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def tensors(folder, changes=(), without=()):
    """Other tensors in it."""
    held = load_file(folder / "model.safetensors") | dict(changes)
    save_file({key: tensor for key, tensor in held.items() if key not in without}, folder / "model.safetensors")
    return folder


def message(program, path):
    with pytest.raises(Refused) as refused:
        stored_weights(path, program)
    return str(refused.value)


def test_names(program, folder):
    without = [f"transformer.h.{i}.ln_1.bias" for i in range(2)]
    tensors(folder, {"transformer.h.0.attn.q_norm.weight": torch.ones(8)}, without)
    text = message(program, folder)
    assert "these weights of the model are not in it: h.*.ln_1.bias (2)" in text
    assert "it holds what the model does not have: transformer.h.0.attn.q_norm.weight" in text
    assert "model=gpt2_from_hf" in text


def test_shapes_and_dtypes(program, folder):
    tensors(folder, {"transformer.wte.weight": torch.zeros(128, 32)})
    assert "other shapes: transformer.wte.weight [128, 32] where the model has [101, 32]" in message(program, folder)
    tensors(folder, {"transformer.wte.weight": torch.zeros(101, 32, dtype=torch.int8)})
    assert "dtypes that are not opened: transformer.wte.weight of I8" in message(program, folder)


def test_what_shapes_do_not_show(program, folder):
    text = message(program, change(folder, n_head=8))
    assert "model.heads=4: the config.json of init.path has n_head=8; use model.heads=8, or model=gpt2_from_hf" in text
    text = message(program, change(folder, n_head=4, activation_function="relu", layer_norm_epsilon=1e-6))
    assert "activation_function=relu, and our GPT-2 gelu_new or gelu_pytorch_tanh" in text
    assert "layer_norm_epsilon=1e-06" in text and "model=causal_lm_from_hf" in text


def test_ties(program, folder):
    assert "tie_word_embeddings=false; use model.tied=false" in message(
        program, change(folder, tie_word_embeddings=False)
    )
    (folder / "config.json").unlink()
    tensors(folder, {"lm_head.weight": torch.ones(101, 32)})
    assert "transformer.wte.weight and lm_head.weight differ, and the model ties them" in message(program, folder)


def test_untied_models_need_a_head(folder):
    untied = compile(GPT2(**SIZES, tied=False), IDS, Plan())
    assert "model.tied=False: the config.json of init.path has tie_word_embeddings=true" in message(untied, folder)
    (folder / "config.json").unlink()
    assert "these weights of the model are not in it: lm_head.weight" in message(untied, folder)


def test_buffers_that_became_constants(tmp_path):
    """A mask of the file's own would not be the one that the program was compiled with."""
    mask = torch.ones(12, 12, dtype=torch.bool).tril()

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = torch.nn.Embedding(101, 8), torch.nn.Linear(8, 101)
            self.register_buffer("mask", mask.clone())

        def forward(self, input_ids):
            x = self.emb(input_ids)[:, None]
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)
            return self.out(y[:, 0])

    program = compile(Masked(), IDS, Plan())
    assert not any("mask" in stage.params for stage in program.stages)  # it is is_causal
    save_file(program.model.state_dict(), tmp_path / "right.safetensors")
    stored_weights(tmp_path / "right.safetensors", program)
    save_file(program.model.state_dict() | {"mask": torch.ones_like(mask)}, tmp_path / "wrong.safetensors")
    assert "mask has other values than the model" in message(program, tmp_path / "wrong.safetensors")


def test_files(program, folder, tmp_path):
    assert "hf download" in message(program, tmp_path / "gone")
    assert "neither model.safetensors nor" in message(program, tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"")
    assert "pickled weights are not opened" in message(program, tmp_path / "weights.pt")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    text = message(program, pickled)
    assert "its weights are pickled (pytorch_model.bin)" in text and "save_pretrained" in text
    whole = folder / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])
    assert "model.safetensors is no whole safetensors file" in message(program, folder)
    (folder / "config.json").write_text("{")
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"wte.weight": "model-1.safetensors"}})
    )
    assert "names model-1.safetensors, which is not there" in message(program, folder)


def test_models_of_folders(folder):
    for changes, words in (
        ({"n_inner": 64}, "n_inner=64, and our GPT-2 4 x n_embd=32"),
        ({"n_inner": None, "attn_pdrop": 0.5}, "model.dropout=0.1"),
        ({"attn_pdrop": 0.0, "model_type": "llama"}, "model_type=llama, and our GPT-2 gpt2"),
    ):
        with pytest.raises(Refused, match=words.replace(".", r"\.")):
            gpt2_from_hf(str(change(folder, **changes)))
    with pytest.raises(Refused, match=r"must be given for this model; add init\.path=FOLDER"):
        gpt2_from_hf(None)


def test_a_config_of_transformers_that_is_another_models(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    for name, heads, theta in (("one", 4, 1e4), ("other", 8, 5e5)):
        rope = {"rope_type": "default", "rope_theta": theta}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=heads, head_dim=8, rope_parameters=rope)
        config.num_key_value_heads = 4
        config.save_pretrained(tmp_path / name)
    with torch.device("meta"):
        model = causal_lm_from_hf(str(tmp_path / "one"))
    from meg_compile.weights import theirs

    other = json.loads((tmp_path / "other" / "config.json").read_text())
    (fault,) = theirs.differences(model, other, tmp_path / "other")
    assert "num_attention_heads=8 (the model has 4)" in str(fault) and "rope_parameters=" in str(fault)
    same = json.loads((tmp_path / "one" / "config.json").read_text())
    assert theirs.differences(model, same | {"attention_dropout": 0.5, "dtype": "bfloat16"}, tmp_path) == []
    (fault,) = theirs.differences(model, same | {"model_type": "mistral"}, tmp_path)
    assert "model_type=mistral" in str(fault)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("init.path=gone", ["init.path=", "gone", "no such file or folder"]),
        ("model=gpt2_from_hf", ["init.path: must be given for this model"]),
        ("model=gpt2_from_hf init.path=gone", ["init.path=", "there is no such folder", "hf download"]),
        ("model=nano init.path=hf task=explain", ["model.hidden=128", "n_embd=32", "use model.hidden=32"]),
        ("export.path=hf", ["export.path=", "is a directory with something in it"]),
        ("export.path=file", ["export.path=", "is a file"]),
        ("export.max_shard_gb=0", ["export.max_shard_gb=0.0", "a size in gigabytes"]),
        ("export.dtype=fp8", ["export.dtype=fp8", "held, fp64, fp32, bf16, fp16"]),
    ],
)
def test_as_settings(args, words, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    code = run.main(args.split())
    out, err = capfd.readouterr()
    assert_one_message(code, out, err, faults=4 if "nano" in args else 1)
    assert all(word in err for word in words), err
    assert not (tmp_path / "runs").exists()
    shutil.rmtree(folder)
