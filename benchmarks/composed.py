"""The configuration that a command line gives, for programs that run its ranks as threads of one process."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from meg_compile.config import Config, Here, resolve
from meg_compile.config.compose import composed, register_resolvers

ROOT = Path(__file__).resolve().parent.parent


def configuration(*settings: str) -> Config:
    """What `python run.py SETTINGS` would run. AssertionError for what it would refuse."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", list(settings), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        config, faults = resolve(*composed(cfg), Here(), ROOT)
    assert config and not faults, "\n".join(map(str, faults))
    return config
