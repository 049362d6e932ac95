"""House rules, checked: imports point down, files stay small, the plain models are plain, every preset works."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "meg_compile"
CONF = PACKAGE.parent / "conf"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# A module imports from its own package and from the lines below its own.
LAYERS = [
    {"driver", "tokenize"},
    {"prepare"},
    {"verify", "generate"},
    {"train"},
    {"checkpoint"},
    {"compiler"},
    {"runtime"},
    {"weights"},
    {"program"},
    {"eject"},
    {"explain"},
    {"passes"},
    {"axes"},
    {"graph"},
    {"config"},
    {"plan", "orders", "ops", "models"},
    {"errors", "mesh", "schedules", "stage_layout"},
]
DEPTH = {package: depth for depth, packages in enumerate(LAYERS) for package in packages}


def top(path):
    """The first name below meg_compile: a package, or a module at its top; "" for the package itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")


def imports(path):
    """The dotted names that a file imports, wherever in the file, except those for type checkers only."""
    names, queue = [], [ast.parse(path.read_text(encoding="utf-8"))]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            queue += node.orelse
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        queue += ast.iter_child_nodes(node)
    return names


def test_imports_point_down():
    wrong = []
    for path in FILES:
        here = top(path)
        for name in imports(path):
            package, _, rest = name.partition(".")
            there = rest.split(".")[0]
            if package == "meg_compile" and here and there != here and DEPTH[there] <= DEPTH[here]:
                wrong.append(f"{path.relative_to(PACKAGE.parent)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_small():
    lines = {path.relative_to(PACKAGE): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def test_models_import_torch_only():
    allowed = {"torch", "math", "functools", "inspect", "dataclasses", "collections", "typing", "__future__"}
    for path in (PACKAGE / "models").rglob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_only_the_entry_knows_hydra():
    knows = {top(path) for path in FILES if any(name.split(".")[0] == "hydra" for name in imports(path))}
    assert knows <= {"config"}


NEEDS = {
    "data=text": ["data.path=text.txt"],
    "data=indexed": ["data.path=tokens"],
    "plan=gpt3_1024": ["train.global_batch_size=256"],
}


def presets():
    """What to type for each file in conf/; nothing for the main one."""
    files = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
    return [f"{path.parent}={path.stem}" if path.parent.name else "" for path in files]


@pytest.mark.parametrize("choice", presets())
def test_every_preset_composes_and_validates(choice, tmp_path):
    if "hf_" in choice:
        pytest.importorskip("transformers")
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from meg_compile.config import Here, resolve
    from meg_compile.config.compose import composed, register_resolvers

    register_resolvers()
    (tmp_path / "text.txt").write_text("some text " * 1000)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*filter(None, [choice]), *NEEDS.get(choice, [])], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        config, faults = resolve(*composed(cfg), Here(), tmp_path)
    assert config and not faults, "\n".join(map(str, faults))
